"""Ranks that resist being ended. Each prints `pid N` for every process that must be gone, then `ready`."""

from __future__ import annotations

import shlex
import sys

PYTHON = sys.executable


_SAY = "import os\ndef say(text): os.write(1, text.encode() + b'\\n')\n"  # whole lines: several processes share a log


def python(text: str) -> list[str]:
    return [PYTHON, "-u", "-S", "-E", "-c", _SAY + text]


PLAIN = "echo pid $$; echo ready; exec sleep 1000"
IGNORES_TERM = "trap '' TERM; echo pid $$; echo ready; while :; do sleep 0.2; done"
SAYS_BYE = python("""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (say("bye"), sys.exit()))
say("ready")
time.sleep(1000)
""")
SETSID = """setsid sh -c 'echo pid $$; trap "" TERM; while :; do sleep 0.2; done' & echo ready; wait"""
ENV_WIPED = "env -i sh -c 'echo pid $$; exec sleep 1000' & echo ready; wait"
# Goes on to a process that no marker identifies, and that no search has found yet, once the file `go` is there.
ENV_WIPED_LATE = """
    echo ready; until [ -e go ]; do sleep 0.05; done
    (env -i sh -c 'echo pid $$; exec sleep 1000' &)
    exec sleep 1000
"""
BACKGROUND = "sleep 1000 & echo pid $!; setsid sleep 1000 & echo pid $!; echo ready"

DAEMON = python("""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(3, 99)
        say(f"pid {os.getpid()}")
        time.sleep(1000)
    os._exit(0)
os.wait()
say(f"pid {os.getpid()}")
say("ready")
time.sleep(1000)
""")


def one_each(*programs: "str | list[str]") -> str:
    """Rank 0 runs the first, rank 1 the second, ..."""
    tokens = [["sh", "-c", program] if isinstance(program, str) else program for program in programs]
    return "\n".join(f"[ $RANK = {rank} ] && exec {shlex.join(argv)}" for rank, argv in enumerate(tokens))


# What setproctitle does: the memory that /proc/PID/environ shows is written over.
RETITLED = python("""
import ctypes, os, time
def retitle():
    start, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
    ctypes.memset(start, ord("x"), end - start)
if os.fork() == 0:
    os.setsid()
    retitle()
    say(f"pid {os.getpid()}")
    time.sleep(1000)
retitle()
say(f"pid {os.getpid()}")
say("ready")
time.sleep(1000)
""")

ZOMBIES = python("""
import os, time
for _ in range(3):
    if os.fork() == 0:
        os._exit(0)
say(f"pid {os.getpid()}")
say("ready")
time.sleep(1000)
""")

# Its first thread is over and shows as a zombie, the process goes on.
HEADLESS = python("""
import ctypes, os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(1000,)).start()
say(f"pid {os.getpid()}")
say("ready")
ctypes.CDLL(None).pthread_exit(None)
""")

# Each generation lives for a moment: whoever is found is already replaced.
STORM = python("""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(f"pid {os.getpid()}")
for _ in range(3):
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            time.sleep(0.002)
say("ready")
time.sleep(1000)
""")

MANY_THREADS = python("""
import threading, time
for _ in range(300):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
say("ready")
time.sleep(1000)
""")

PSERVER = python("""
import os, socket, time
server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
say("listening")
time.sleep(1000)
""")

_MEET = """
import os, socket, time
def listen(name):
    host, port = os.environ[name].rsplit(":", 1)
    return socket.create_server((host, int(port)))
def meet(name):
    for endpoint in filter(None, os.environ[name].split(",")):
        host, port = endpoint.rsplit(":", 1)
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex((host, int(port))):
            assert time.monotonic() < deadline, endpoint
            time.sleep(0.02)
os.environ["OWN"] = os.environ["POD_IP"] + ":" + os.environ["PADDLE_PORT"]
"""
# A pserver as Paddle's first one is: it opens gloo's port, and its own when a trainer has come there.
GLOO_PSERVER = python(
    _MEET
    + """
if os.environ["CLUSTERTOOL_RANK"] == "0":
    gloo = listen("PADDLE_GLOO_HTTP_ENDPOINT")
    gloo.accept()
server = listen("OWN")
time.sleep(1000)
"""
)
GLOO_TRAINER = python(_MEET + 'meet("PADDLE_GLOO_HTTP_ENDPOINT"); meet("PADDLE_PSERVERS_IP_PORT_LIST"); say("met")')
# A trainer or heter trainer that goes on only when both its neighbours listen.
STAGE = python(
    _MEET
    + """
server = listen("OWN")
meet("PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST")
meet("PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST")
say("met")
if os.environ["TRAINING_ROLE"] == "HETER_TRAINER":
    time.sleep(1000)
"""
)

# At TERM the main process lets a child save, which dies of TERM itself, and starts another one after 1.5 s.
SAVES_BY_A_CHILD = python("""
import signal, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "echo pid $$; read line; sleep 0.3; echo saved"], stdin=subprocess.PIPE)
def save(*_):
    child.communicate(b"save\\n")
    time.sleep(1.5)
    sys.exit(subprocess.call(["sh", "-c", "sleep 0.3; echo copied; exit 3"]))
signal.signal(signal.SIGTERM, save)
say("ready")
time.sleep(1000)
""")
# The child names the time of TERM. The main process of rank 0 ignores TERM.
HAS_A_CHILD = python("""
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: say("term %f" % time.time()))
    say("pid %d" % os.getpid())
    say("ready")
    while True:
        time.sleep(1000)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    time.sleep(1000)
""")
