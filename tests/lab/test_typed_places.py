"""Typed on each machine, and the place where they meet does not fit this machine: it says so within seconds."""

from __future__ import annotations

import re
import time

import pytest

from tests.lab.lab import Node
from tests.lab.test_typed import PROMPT
from tests.lab.typed import TypedSite

# Passes connections to `there` on: what a router with NAT does, or ssh -L.
FORWARDS = """
import socket, sys, threading
own, there = sys.argv[1].split(":"), sys.argv[2].split(":")
server = socket.create_server((own[0], int(own[1])))
print("up", flush=True)
def copy(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError:
        a.close(), b.close()
while True:
    near = server.accept()[0]
    try:
        far = socket.create_connection((there[0], int(there[1])))
    except OSError:
        near.close()
        continue
    for pair in ((near, far), (far, near)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""


@pytest.fixture(scope="module")
def machines(module_lab):
    debian = (
        "127.0.1.1 node1.debian",
        "127.0.0.1 trainer",
    )  # the second one: a file that was copied from another machine
    nodes = {0: Node(hosts=("10.77.0.2 node1.debian",)), 1: Node(hosts=debian)}
    return module_lab(3, nodes=nodes)


@pytest.fixture
def typed(machines):
    """typed(node): a folder of this node with a program, and the command with its options for a job of two machines."""
    made = []

    def make(node):
        made.append(TypedSite(machines, node, f"place{len(list(machines.home(node).glob('place*')))}"))
        made[-1].workspace(".", train_py=PROMPT)
        return made[-1]

    yield make
    for site in made:
        site.close()


def starts(site, host, rank="", port=29500, seconds=30, *more):
    number = ("--node-rank", rank) if rank != "" else ()
    where = ("--master-addr", host, "--master-port", port, "--nnodes", 2, *number)
    return site.types("--rdzv-conf", f"join_timeout={seconds}", *more, *where, "train.py")


def test_a_place_that_is_wrong_ends_within_seconds(machines, typed):
    """Each with its exit code, and with the addresses of this machine.

    The loopback admits a second member on the first machine, so this one waits for a moment, with a warning.
    """
    began = time.monotonic()
    first = [
        starts(typed(0), host, rank, 9120 + at, 11)
        for at, (host, rank) in enumerate((("127.0.0.1", 0), ("localhost", "")))
    ]
    own = machines.address(1)
    cases = [
        (own, 1, 64, rf"{re.escape(own)} is this machine, and --node-rank 1 is not the first"),
        ("node1", 1, 64, rf"node1 \({re.escape(own)} here\) is this machine"),
        ("node1.debian", 1, 64, r"node1.debian \(127\.0\.1\.1 here\) is this machine"),
        ("127.0.0.1", 1, 64, r"127\.0\.0\.1 is this machine"),
        ("localhost", 1, 64, r"localhost \(127\.0\.0\.1 here\) is this machine"),
        ("trainer", 1, 69, r"trainer \(127\.0\.0\.1 here\) is this machine"),
        ("0.0.0.0", 0, 64, r"0\.0\.0\.0 is not the address of one machine"),
        ("::", "", 64, r":: is not the address of one machine"),
        ("fe80::1%eth0", 1, 64, r"fe80::1%eth0 has a meaning on one link only"),
    ]
    running = [starts(typed(1), host, rank, 9100 + at, 600) for at, (host, rank, _, _) in enumerate(cases)]
    for one, (_, _, code, text) in zip(running, cases):
        done = one.wait().ends(code)
        assert re.search(text, done.err), done.err
        assert f"this machine has {own} (" in done.err
    for one in first:
        one.says("warning: .* admits no other machine than this one")
        assert f"this machine has {machines.address(0)} (" in one.wait().ends(64).err
    assert time.monotonic() - began < 60, "the machine is loaded; alone it takes 10 s"


def test_one_rank_on_two_machines(machines, typed):
    """Both say that they are the first: the one that has the address is it, whichever was typed first."""
    own = machines.address(0)
    second = starts(typed(1), own, 0, 9130, 600)
    second.says("1 of 2 machines is here")
    first = starts(typed(0), own, 0, 9130, 600)
    done = second.wait().ends(64)
    assert f"index 0 is in use: the coordinator answers at {own}:9130" in done.err
    starts(typed(2), own, 0, 9130, 600).wait().ends(64)
    starts(typed(1), own, 1, 9130, 600).wait().ends(0)
    first.wait().ends(0)


def test_another_machine_passes_the_port_on(machines, typed):
    """The address is none of the first machine's, and connections to it arrive there, also its own ones."""
    router = typed(2)
    (router.folder / "pass.py").write_text(FORWARDS)
    where = machines.address(2)
    passing = router.start("pass.py", f"{where}:9140", f"{machines.address(0)}:9140", program=["python3"])
    passing.says("up")
    first = starts(typed(0), where, 0, 9140, 600)
    first.says(rf"warning: {re.escape(where)} is no address of this machine")
    starts(typed(1), where, 1, 9140, 600).wait().ends(0)
    first.wait().ends(0)
    passing.process.kill()


def test_a_port_of_the_loopback_is_passed_on(machines, typed):
    """As ssh -L does. Then the address of the trainers must be named."""
    site = typed(1)
    (site.folder / "pass.py").write_text(FORWARDS)
    first = starts(typed(0), machines.address(0), 0, 9150, 600, "--rdzv-id", "passed")
    first.says("1 of 2 machines is here.*they join this machine, at ")
    passing = site.start("pass.py", "127.0.0.1:9150", f"{machines.address(0)}:9150", program=["python3"])
    passing.says("up")
    starts(site, "127.0.0.1", 1, 9150, 600, "--rdzv-id", "passed", "--host", machines.address(1)).wait().ends(0)
    first.wait().ends(0)
    passing.process.kill()


def test_a_name_that_is_the_loopback_on_its_own_machine(machines, typed):
    """As Debian writes it into /etc/hosts: the others know another address."""
    first = starts(typed(1), "node1.debian", 0, 9170, 600)
    first.says(r"warning: node1.debian \(127\.0\.1\.1 here\): this machine listens on all its addresses")
    starts(typed(0), "node1.debian", 1, 9170, 600).wait().ends(0)
    first.wait().ends(0)


def test_two_members_on_one_machine(machines, typed):
    """They are two nodes, in any order."""
    later, first = typed(0), typed(0)
    running = starts(later, machines.address(0), 1, 9160, 600)
    starts(first, machines.address(0), 0, 9160, 600).wait().ends(0)
    running.wait().ends(0)
