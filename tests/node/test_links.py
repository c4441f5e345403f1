"""The link between a node and the coordinator: cables break and heal, strangers knock; a job notices neither."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import pytest

from clustertool.fleet import identity
from tests.node import programs as p
from tests.node.cable import CableOf
from tests.node.harness import Bench, Job, alive, kill, until


def test_nothing_is_lost_or_doubled(bench: Bench, cable_of: CableOf) -> None:
    """A cable that breaks all the time: every exit is counted once, so that the verdict comes with the last and not before."""
    program = "echo ready; until [ -e go$RANK ]; do sleep 0.2; done"
    job = bench.job(bench.nodes(2, LOSS_TIMEOUT=8), program, per_node=6)
    cable = cable_of(job)
    job.start().ready()
    chance = random.Random(1)
    for rank in chance.sample(range(12), 12):
        assert not job.events(0, "verdict")
        (job.dir(rank // 6) / f"go{rank}").touch()
        cable.cut()
        time.sleep(chance.uniform(0.0, 0.15))  # not a wait: the moments at which a cable breaks
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    exits = [event for node in range(2) for event in job.events(node, "exited")]
    assert sorted(event["rank"] for event in exits) == list(range(12))
    assert cable.connections > 3
    assert not job.events(0, "lost") and not job.events(1, "stopping")[1:]


@pytest.mark.chaos
def test_order_to_start_survives_a_cut(bench: Bench, cable_of: CableOf) -> None:
    """The coordinator's words are sent again, too: pservers on both sides, trainers only after all of them."""
    job = bench.job(bench.nodes(2, LOSS_TIMEOUT=20), "echo ready", pserver=p.PSERVER)
    cable = cable_of(job)
    job.start()
    pause = 0.1  # it grows: on a busy machine no message passes in a tenth of a second
    while not job.events(1, "ended"):
        cable.cut()
        time.sleep(pause)
        pause *= 1.1
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert [len(job.events(node, "started")) for node in range(2)] == [2, 2]


def test_pulled_for_less_than_the_timeout(bench: Bench, cable_of: CableOf) -> None:
    """Nothing arrives for a while, and no end is reported: what was sent meanwhile arrives when the cable is whole again."""
    job = bench.job(bench.nodes(2, LOSS_TIMEOUT=8), "echo ready; until [ -e go ]; do sleep 0.2; done; exit 9")
    cable = cable_of(job)
    job.start().ready()
    cable.pull()
    (job.dir(1) / "go").touch()
    job.until("exited", 1)
    time.sleep(2.0)  # not a wait: how long the cable is out
    assert not job.events(0, "verdict")
    cable.plug()
    assert [job.ended(node)["code"] for node in range(2)] == [9, 9]
    assert not job.events(0, "lost")


def test_pulled_for_longer(bench: Bench, cable_of: CableOf) -> None:
    """Both sides give up: the coordinator calls the node lost, the node ends its ranks by itself."""
    job = bench.job(bench.nodes(3, LOSS_TIMEOUT=2), p.PLAIN)
    cable = cable_of(job)
    for node, request in job.place_requests.items():
        if node == 2:
            request["spec"]["lead"] = job.place_requests[0]["spec"]["lead"]
    job.start().ready()
    cable.pull()
    outcomes = [job.ended(node) for node in range(3)]
    assert [(outcome["state"], outcome["code"], outcome["node"]) for outcome in outcomes] == [
        ("lost", 75, 1),
        ("lost", 75, 0),
        ("lost", 75, 1),
    ]
    job.gone()


def test_a_node_reports_that_it_cannot_connect(bench: Bench) -> None:
    """After 3 s, with address, port and errno; and when it has a connection."""
    job = bench.job(bench.nodes(2), "echo ready").place()
    before = time.time()
    job.nodes[1].client.agent.ask(job.start_requests[1])
    event = job.until("unconnected", 1)[0]
    host, port = job.plan.coordinator
    assert event["endpoint"] == f"{host}:{port}"
    assert (event["errno"], event["why"], event["again"]) == ("ECONNREFUSED", "connection refused", False)
    assert before - 1 < event["since"] < event["t"] - 2.5
    job.nodes[0].client.agent.ask(job.start_requests[0])
    job.until("connected", 1)
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert len(job.events(1, "unconnected")) == 1


def test_a_connected_coordinator_that_falls_silent(bench: Bench) -> None:
    """Its machine may have crashed, so nothing is known of its port."""
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=8), p.PLAIN).ready()
    coordinator = job.process("supervisor")
    kill(coordinator, signal.SIGSTOP)
    event = job.until("unconnected", 1)[0]
    kill(coordinator, signal.SIGCONT)
    assert (event["errno"], event["why"], event["again"]) == ("", "no message from it any more", True)
    job.until("connected", 1)
    job.stop()


def test_connect_takes_a_while(bench: Bench) -> None:
    """Across a real network connect() is never done at once. Here the coordinator's door has a queue that is full at first."""
    job = bench.job(bench.nodes(2), "echo ready")
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        fill = [socket.create_connection(door.getsockname()) for _ in range(1)]
        request = job.place_requests[1]
        coordinator = {**request["spec"]["lead"], "host": door.getsockname()[0], "port": door.getsockname()[1]}
        request["spec"] = {**request["spec"], "lead": coordinator}
        job.start()
        trying = until(lambda: _connecting(door.getsockname()[1]), "it is connecting")
        time.sleep(0.3)  # not a wait: far longer than the pause between two tries
        assert _connecting(door.getsockname()[1]) == trying, "it waits for its answer, and does not try anew"
        fill += [door.accept()[0] for _ in fill]
        cable = _pass_on(door, job.plan.coordinator)
        assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
        assert not (job.dir(1) / ".clustertool/supervisor.err").read_text()
        for sock in fill:
            sock.close()
        door.shutdown(socket.SHUT_RDWR)
        cable.join()


def _connecting(port: int) -> list[str]:
    """Local addresses of the connections to a port that wait for their answer."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return [row[1] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "02"]


def _pass_on(door: socket.socket, coordinator: tuple[str, int]) -> threading.Thread:
    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = door.accept()[0], socket.create_connection(coordinator)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# -- strangers --------------------------------------------------------------------------------------------------------


def silent(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


def garbage(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address)
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 100)
    return sock


def flood(address: tuple[str, int]) -> socket.socket:
    """Data without end: the coordinator reads none of it for longer than it takes to see that it is no TLS."""
    sock = socket.create_connection(address)
    with contextlib.suppress(OSError):
        for _ in range(200):
            sock.sendall(b"\x16\x03\x01\xff\xff" + bytes(1 << 16))
    return sock


def reset(address: tuple[str, int]) -> socket.socket:
    """Gone with a reset before it was read, data and all."""
    sock = socket.create_connection(address)
    sock.sendall(b"x")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    return sock


def _tls(address: tuple[str, int], pair: tuple[str, str] | None, output: bytes) -> socket.socket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if pair:
        _load(context, pair)
    sock: socket.socket = socket.create_connection(address)
    with contextlib.suppress(OSError):
        sock = context.wrap_socket(sock)
        sock.sendall(output)
    return sock


def _load(context: ssl.SSLContext, pair: tuple[str, str]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(pair))
        file.flush()
        context.load_cert_chain(file.name)


def _frame(text: bytes) -> bytes:
    return struct.pack(">II", len(text), 0) + text


def no_certificate(address: tuple[str, int]) -> socket.socket:
    return _tls(address, None, _frame(b'{"type": "join", "node": 1}'))


def other_job(address: tuple[str, int]) -> socket.socket:
    return _tls(address, identity.certificate(), _frame(b'{"type": "join", "node": 1}'))


STRANGERS = [silent, garbage, flood, reset, no_certificate, other_job]


def test_strangers(bench: Bench) -> None:
    """They come before node 1 does, and while it works."""
    job = bench.job(bench.nodes(2), "echo ready; until [ -e go ]; do sleep 0.2; done; exit 4").place()
    job.nodes[0].client.agent.ask(job.start_requests[0])
    visitors = [stranger(job.plan.coordinator) for stranger in STRANGERS for _ in range(3)]
    job.nodes[1].client.agent.ask(job.start_requests[1])
    job.ready()
    visitors += [stranger(job.plan.coordinator) for stranger in STRANGERS for _ in range(3)]
    _untouched(job, visitors)


def test_many_at_once(bench: Bench) -> None:
    job = bench.job(bench.nodes(2), "echo ready; until [ -e go ]; do sleep 0.2; done; exit 4").place()
    job.nodes[0].client.agent.ask(job.start_requests[0])
    visitors = [silent(job.plan.coordinator) for _ in range(600)]
    job.nodes[1].client.agent.ask(job.start_requests[1])
    start = time.monotonic()
    job.ready()
    assert time.monotonic() - start < 25
    fds = len(list(Path(f"/proc/{job.process('supervisor').pid}/fd").iterdir()))
    assert fds < 560, "strangers are bounded in number"
    visitors += [stranger(job.plan.coordinator) for stranger in STRANGERS for _ in range(20)]
    _untouched(job, visitors)


def test_too_much_from_a_member(bench: Bench) -> None:
    """Whoever holds the certificate, and then talks without measure, is cut off all the same."""
    job = bench.run(bench.nodes(2), "echo ready; until [ -e go ]; do sleep 0.2; done; exit 4")
    pair = (job.plan.identity.certificate, job.plan.identity.key)
    visitors = [_tls(job.plan.coordinator, pair, struct.pack(">II", 1 << 30, 0) + bytes(1 << 20)) for _ in range(3)]
    visitors += [
        _tls(job.plan.coordinator, pair, _frame(text))
        for text in (b"[]", b"{", b'{"type": "join", "node": 1, "token": "x"}')
    ]
    _untouched(job.ready(), visitors)


def _untouched(job: Job, visitors: list[socket.socket]) -> None:
    """The strangers are put out, the job ends as it should."""
    assert alive(job.process("supervisor")) and alive(job.process("supervisor", 1))
    until(lambda: all(_closed(sock) for sock in visitors), "strangers are put out")
    assert not any(job.events(node, kind) for node in range(2) for kind in ("ended", "lost", "stopping"))
    (job.dir(1) / "go").touch()
    assert [job.ended(node)["code"] for node in range(2)] == [4, 4]
    assert not (job.dir() / ".clustertool/supervisor.err").read_text()


def _closed(sock: socket.socket) -> bool:
    if sock.fileno() < 0:
        return True
    sock.setblocking(False)
    try:
        if not sock.recv(4096):
            sock.close()
    except (ssl.SSLWantReadError, BlockingIOError):
        return False
    except OSError:
        sock.close()
    return sock.fileno() < 0
