"""Programs that hang at a known place, and healthy ones that are quiet for long: 8 ranks.

LIBRARIES has the frameworks of these programs: collectives that wait in recv() for the other ranks, and those of torch (gloo).
"""

from __future__ import annotations

from typing import NamedTuple

_PLAIN = """
import os, socket, threading, time
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def serve(server):
    links = [server.accept()[0] for _ in range(WORLD)]
    while True:
        kinds = {link.recv(1) for link in links}
        while len(kinds) > 1:  # a collective that others do not take part in
            time.sleep(1000)
        for link in links:
            link.sendall(b"x")

def connect():
    if RANK == 0:
        threading.Thread(target=serve, args=(socket.create_server(AT, backlog=WORLD),), daemon=True).start()
    while True:
        try:
            return socket.create_connection(AT)
        except OSError:
            time.sleep(0.05)

def all_reduce(kind=b"a"):
    link.sendall(kind)
    link.recv(1)

def barrier():
    all_reduce(b"b")

link = connect()
"""

_TORCH = """
import os
import torch
import torch.distributed as dist
RANK = int(os.environ["RANK"])
AT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
torch.set_num_threads(1)
dist.init_process_group("gloo")

def all_reduce():
    dist.all_reduce(torch.ones(8))

def barrier():
    dist.barrier()
"""
LIBRARIES = {"plain": _PLAIN, "torch": _TORCH}

START = """
import sys
sys.path.insert(0, "site-packages")
import os, re, signal, socket, subprocess, threading, time, zlib
from collectives import AT, RANK, all_reduce, barrier
for step in range(3):
    all_reduce()
print("ready", flush=True)
"""

PSERVER = """
import os, socket, time
server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])), backlog=99)
links = []
while True:
    links.append(server.accept())
"""


class Hanging(NamedTuple):
    """text: of train.py after START. found: in the verdict. patience: in hang timeouts. options: of run."""

    text: str
    found: str
    patience: int = 1
    options: tuple[str, ...] = ()


HANGING = {
    "a skipped all_reduce": Hanging(
        """
for step in range(5):
    if RANK != 5 or step != 2:
        all_reduce()
barrier()  # here
""",
        "trainer 5 on node2 is in",
    ),
    "an extra barrier": Hanging(
        """
for step in range(5):
    all_reduce()
    if RANK == 3 and step == 2:
        barrier()  # here
""",
        "trainer 3 on node1 is in",
    ),
    "a worker of a data loader": Hanging(
        """
lock = threading.Lock()
lock.acquire()
def next_batch():
    inlet, outlet = os.pipe()
    if os.fork() == 0:
        lock.acquire()
    os.close(outlet)
    return os.waitpid(-1, 0)  # here
for step in range(5):
    if RANK == 6 and step == 2:
        next_batch()
    all_reduce()
""",
        "trainer 6 on node3 is in",
    ),
    "a lock in a thread": Hanging(
        """
lock = threading.Lock()
lock.acquire()
thread = threading.Thread(target=lock.acquire, daemon=True)
for step in range(5):
    if RANK == 1 and step == 2:
        thread.start()
        thread.join()  # here
    all_reduce()
""",
        "trainer 1 on node0 is in",
    ),
    "a sleep": Hanging(
        """
for step in range(5):
    if RANK == 7 and step == 2:
        time.sleep(1000)  # here
    all_reduce()
""",
        "trainer 7 on node3 is in",
    ),
    "a read of a pipe": Hanging(
        """
inlet, outlet = os.pipe()
for step in range(5):
    if RANK == 0 and step == 2:
        os.read(inlet, 1)  # here
    all_reduce()
""",
        "trainer 0 on node0 is in",
    ),
    "a rank that was stopped": Hanging(
        """
for step in range(5):
    if RANK == 4 and step == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce()
""",
        "trainer 4 on node2: stopped by a signal",
    ),
    "a loop in C": Hanging(
        """
def spin():
    re.match("(a+)+$", "a" * 99 + "b")  # here
for step in range(5):
    if RANK == 2 and step == 2:
        spin()
    all_reduce()
""",
        "trainer 2 on node1 runs in",
        2,
    ),
    "a pserver that does not answer": Hanging(
        """
address = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")[0].split(":")
server = socket.create_connection((address[0], int(address[1])))
server.recv(1)  # here
""",
        "accept (pserver.py:6); pserver 1 on node1 is in ",
        1,
        ("--mode", "ps"),
    ),
    "a peer that has died silently": Hanging(
        """
if RANK == 0:  # it says nothing: what the ranks see of a peer whose machine has died
    service = socket.create_server((AT[0], 7000), backlog=99)
all_reduce()
peer = socket.create_connection((AT[0], 7000))
peer.recv(1)  # here
""",
        "all 8 ranks wait in recvfrom",
    ),
}

# What real torch has in place of a program above.
WITH_TORCH = {
    "a worker of a data loader": Hanging(
        """
import torch.utils.data
class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        if RANK == 6 and index == 2:
            time.sleep(1000)
        return index
if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Batches(), num_workers=1):  # here
        all_reduce()
""",
        "trainer 6 on node3 is in",
    ),
}

_EVALUATE = """
def evaluate():
    end = time.monotonic() + SECONDS
    total = 0
    while time.monotonic() < end:
        for number in range(1000):
            total += number
        total %= 7
"""

HEALTHY = {
    "an evaluation of all ranks": _EVALUATE
    + """
evaluate()
""",
    "an evaluation of rank 0": _EVALUATE
    + """
if RANK == 0:
    evaluate()
barrier()
""",
    "a checkpoint of rank 0": """
if RANK == 0:
    end = time.monotonic() + SECONDS
    with open("/dev/shm/checkpoint", "wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 16))
            time.sleep(0.2)
barrier()
""",
    "a compilation": """
spin = "import time\\nend = time.monotonic() + float(__import__('sys').argv[1])\\nwhile time.monotonic() < end: pass"
subprocess.run([sys.executable, "-c", spin, str(SECONDS)])
""",
    "a slow first step": """
class Layer:
    def forward(self, depth):
        return depth and self.forward(depth - 1)
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    Layer().forward(200)
""",
    "a slow disk": """
end = time.monotonic() + SECONDS
inlet, outlet = os.pipe()
if os.fork() == 0:
    while time.monotonic() < end:
        time.sleep(0.3)
        os.write(outlet, bytes(8192))
    os._exit(0)
os.close(outlet)
while os.read(inlet, 1 << 16):
    pass
""",
    "a sleep with output": """
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    time.sleep(1)
    print("waiting", flush=True)
""",
    "a loop in zlib": """
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    zlib.compress(bytes(1 << 20))
""",
    "a growing output": """
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    time.sleep(1)
    with open(os.environ["CLUSTERTOOL_OUTPUT"] + f"/{RANK}", "a") as file:
        file.write("x")
""",
    "a breakpoint": """
import pdb
if RANK == 0:
    sys.stdin = open("fifo")
    pdb.set_trace()
barrier()
""",
}
