"""A stranger floods the port where machines join: what it has there is bounded, and the job starts and ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clustertool.fleet import identity
from clustertool.node.supervisor.coordinator.member_connections import CoordinatorListener
from clustertool.node.system.tls_link import context, listen, wait_for
from tests.node.harness import until
from tests.node.joining import JoinBench, Machine, codes, start
from tests.security import flooder

RATE = 500  # connections a second: more than the coordinator keeps in a second, on a loaded machine too
STRANGER, MEMBER, COORDINATOR = "127.0.0.66", "127.0.0.22", "127.0.0.21"
MOST = 512  # connections without a message
MOST_EACH = 128  # of one address
OTHERS = 60  # descriptors of the coordinator for other purposes


@contextmanager
def flooded(machine: Machine, kinds: list[str]) -> Iterator[None]:
    """A stranger floods the port of this coordinator meanwhile, until it has as many connections as it may have."""
    pem = machine.folder / "stranger.pem"
    pem.write_text("".join(identity.certificate()))
    port = machine.join.coordinator.port
    argv = [sys.executable, flooder.__file__, STRANGER, COORDINATOR, str(port), str(RATE), str(pem), *kinds]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        until(lambda: open_files(machine) > MOST_EACH / 2, "the flood runs")
        yield
        assert int(child.communicate(timeout=60)[0]) > 0
    finally:
        child.kill()
        child.wait()


def open_files(machine: Machine) -> int:
    """The descriptors of its joining process, which becomes its supervisor."""
    return len(list(Path(f"/proc/{machine.process.pid}/fd").iterdir()))


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["silent"], marks=pytest.mark.chaos),
        pytest.param(["hello"], marks=pytest.mark.chaos),
        sorted(flooder.KINDS),
    ],
    ids=["silent", "hello", "all"],
)
def test_machines_join_during_a_flood(join_bench: JoinBench, kinds: list[str]) -> None:
    """While machines join, and when the coordinator of the job has the port, which refuses a third machine."""
    machines = join_bench.job(2, "echo ready; exec sleep 60")
    machines[0].start().until("waiting")
    with flooded(machines[0], kinds):
        start(machines[1:])
        for rank, machine in enumerate(machines):
            machine.says("ready", rank)
        assert join_bench.another(machines[1]).start().wait() == 64
        assert open_files(machines[0]) <= MOST_EACH + OTHERS, "the connections of one address are bounded"
    machines[0].signal(signal.SIGINT)
    assert codes(machines) == [130, 130]


def _dial(port: int, source: str) -> socket.socket:
    return socket.create_connection((COORDINATOR, port), 10, (source, 0))


def test_one_address_and_all_have_bounds() -> None:
    """A new connection replaces the oldest one of its address; beyond the bound of all, the oldest one."""
    certificate, key = identity.certificate()
    sock = listen(COORDINATOR, 0, 1024)
    listener, port = CoordinatorListener(context(certificate, key, server=True), sock, 2), sock.getsockname()[1]

    def closed(connection: socket.socket) -> bool:
        return bool(wait_for([connection], 0)) and not connection.recv(1)

    def connect(source: str, count: int) -> list[socket.socket]:
        made = [_dial(port, source) for _ in range(count)]
        assert list(listener.turn(0.0, None)) == []
        return made

    try:
        member = connect(MEMBER, 1)
        strangers = connect(STRANGER, MOST_EACH + 20)
        assert len(listener.wires()) == 1 + 1 + MOST_EACH
        assert [closed(one) for one in (*strangers[:20], *strangers[20:], *member)] == [True] * 20 + [False] * (
            MOST_EACH + 1
        )
        many = [one for last in range(70, 75) for one in connect(f"127.0.0.{last}", MOST_EACH)]
        assert len(listener.wires()) == 1 + MOST
        assert closed(member[0]) and not closed(many[-1])
    finally:
        listener.close()
    assert closed(many[-1])
    for one in (*member, *strangers, *many):
        one.close()
