"""A member of the job (who holds its certificate and token) sends the coordinator what no supervisor sends."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.node.harness import Bench, Job, alive


@contextmanager
def connected(job: Job) -> Iterator[ssl.SSLSocket]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{job.plan.identity.certificate}\n{job.plan.identity.key}")
        file.flush()
        context.load_cert_chain(file.name)
    with socket.create_connection(job.plan.coordinator, timeout=10) as plain, context.wrap_socket(plain) as sock:
        yield sock


def send(sock: ssl.SSLSocket, message: Any) -> None:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    sock.sendall(struct.pack(">II", len(text), 0) + text)


def closed(sock: ssl.SSLSocket) -> bool:
    """The other side ends the connection, whatever it sends before."""
    try:
        while sock.recv(4096):
            pass
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return True


def lone(bench: Bench) -> Job:
    """A job of two nodes, of which the first one runs and the second one is the test."""
    job = bench.job(bench.nodes(2, LOSS_TIMEOUT=5), "echo ready").place()
    job.nodes[0].client.agent.ask(job.start_requests[0])
    return job


MEMBER, OTHER = ["boot", 7, 1], ["boot", 7, 2]  # incarnations: the same pid, taken again


def joins(job: Job, sender: Any = MEMBER, **more: Any) -> dict[str, Any]:
    return {"type": "join", "node": 1, "token": job.token, "attempt": 0, "sender": sender, **more}


def exited(*exits: Any) -> dict[str, Any]:
    return {"type": "exited", "exits": list(exits)}


MALFORMED: dict[str, Any] = {
    "no rank": {"type": "listening", "role": "pserver"},
    "a rank that is a list": {"type": "listening", "role": "trainer", "rank": []},
    "a process of another node": {"type": "listening", "role": "trainer", "rank": 0},
    "a process of no plan": exited(["trainer", 77, 0, 0, False, "", 0, False]),
    "exits that are a number": {"type": "exited", "exits": 7},
    "an exit that is too short": exited(["trainer", 1, 0]),
    "an exit code that is a text": exited(["trainer", 1, "x", 0, False, "", 0, False]),
    "an exit code without end": exited(["trainer", 1, float("inf"), 0, False, "", 0, False]),
    "a negative exit code": exited(["trainer", 1, -5, 0, False, "", 0, False]),
    "survivors that are none": {"type": "clean", "survivors": None, "attempt": 0},
    "an attempt that is none": {"type": "clean", "survivors": [], "attempt": "now"},
    "a stop by no one": {"type": "stop"},
    "an acknowledgement that is no number": {"type": "beat", "ack": {}},
    "progress of ranks that is a number": {"type": "beat", "ranks": 7},
    "progress of a rank that is a list": {"type": "beat", "ranks": [["trainer", [], 1, 2, 3]]},
    "a step that is a text": {"type": "beat", "ranks": [["trainer", 1, None, "x", 0]]},
    "a number of its own that is none": b'{"type": "beat", "sender": ["boot", 7, 1], "number": NaN}',
}


# One of each kind of message, and of each kind of mistake in it; the others run with make test-chaos.
FEW = {
    "a process of another node",
    "a process of no plan",
    "an exit that is too short",
    "an exit code without end",
    "survivors that are none",
    "a stop by no one",
    "an acknowledgement that is no number",
    "progress of a rank that is a list",
    "a number of its own that is none",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.chaos) for kind in MALFORMED]
)
def test_a_malformed_message_ends_the_part_of_its_sender(bench: Bench, kind: str) -> None:
    job = lone(bench)
    with connected(job) as sock:
        send(sock, joins(job))
        message = MALFORMED[kind]
        send(sock, message if isinstance(message, bytes) else {"number": 1, "attempt": 0, "sender": MEMBER, **message})
        assert closed(sock)
    outcome = job.ended(0)
    name = job.nodes[1].host.name
    assert (outcome["state"], outcome["code"]) == ("lost", 75)
    assert outcome["reason"].startswith(f"node {name} is lost: it sent a message that cannot be read (")
    assert len(outcome["reason"]) < 250 and "\n" not in outcome["reason"]
    assert not (job.dir(0) / ".clustertool/supervisor.err").read_text()


GREETINGS: dict[str, Any] = {
    "a node that is a list": {"type": "join", "node": [1]},
    "a node that is an object": {"type": "join", "node": {}},
    "the coordinator's own node": {"type": "join", "node": 0},
    "a token that is not ASCII": {"type": "join", "node": 1, "token": "\udcffé"},
    "a token that is a list": {"type": "join", "node": 1, "token": ["x"]},
    "no incarnation": {"type": "join", "node": 1, "sender": None},
    "an incarnation that is too short": {"type": "join", "node": 1, "sender": ["boot", 7]},
    "an incarnation of texts": {"type": "join", "node": 1, "sender": ["boot", "7", "1"]},
    "a guard without its supervisor": {"type": "join", "node": 1, "gone": "it died"},
    "no JSON": b"{",
    "nested lists": b"[" * 30_000 + b"]" * 30_000,
}


def test_a_malformed_greeting_is_refused(bench: Bench) -> None:
    """And the node whose id it used joins as if nothing had happened."""
    job = lone(bench)
    for greeting in GREETINGS.values():
        with connected(job) as sock:
            send(sock, {"token": job.token, "sender": MEMBER, **greeting} if isinstance(greeting, dict) else greeting)
            assert closed(sock), greeting
    assert alive(job.process("supervisor"))
    job.nodes[1].client.agent.ask(job.start_requests[1])
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert not (job.dir(0) / ".clustertool/supervisor.err").read_text()


FAILED = ["trainer", 1, 7, 0, False, "", 0, False, False, False, False]


def answered(sock: ssl.SSLSocket, kind: str) -> dict[str, Any]:
    """The next message of this type from the coordinator."""
    sock.settimeout(10)
    while True:
        size, _ = struct.unpack(">II", take(sock, 8))
        message = json.loads(take(sock, size))
        if message["type"] == kind:
            return dict(message)


def take(sock: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data)) or pytest.fail("the coordinator has closed the connection")
    return data


def test_another_process_cannot_join_as_a_node_that_has_joined(bench: Bench) -> None:
    job = lone(bench)
    with connected(job) as member:
        send(member, joins(job))
        coordinator = answered(member, "welcome")["sender"]
        with connected(job) as other:
            send(other, joins(job, OTHER))
            assert closed(other)
        assert answered(member, "start")["sender"] == coordinator
        assert not job.events(0, "lost")
        with connected(job) as again:  # the same process, after its connection broke
            send(again, joins(job))
            assert answered(again, "welcome")["attempt"] == 0
            stop = {"type": "stop", "by": "ann", "code": 130, "number": 1, "attempt": 0, "sender": MEMBER}
            send(again, stop)
            answered(again, "stop")
            send(again, {"type": "clean", "survivors": [], "number": 2, "attempt": 0, "sender": MEMBER})
            assert answered(again, "finish")["outcome"]["code"] == 130


def test_a_guard_reports_only_its_own_supervisor(bench: Bench) -> None:
    job = lone(bench)
    with connected(job) as member:
        send(member, joins(job))
        answered(member, "welcome")
        with connected(job) as guard:
            send(guard, joins(job, ["boot", 8, 3], gone="it died", of=OTHER))
            assert closed(guard)
        assert not job.events(0, "lost")
        with connected(job) as guard:
            send(guard, joins(job, ["boot", 8, 3], gone="it died", of=MEMBER))
            assert job.ended(0)["reason"] == f"node {job.nodes[1].host.name} is lost: it died"


@pytest.mark.parametrize("change", [{"sender": OTHER}, {"attempt": 1}], ids=["incarnation", "attempt"])
def test_a_report_of_another_process_or_attempt_is_dropped(bench: Bench, change: dict[str, Any]) -> None:
    """An exit that would end the job is followed by one that counts, with another code."""
    job = lone(bench)
    with connected(job) as member:
        send(member, joins(job))
        answered(member, "start")
        good = {**exited(FAILED), "attempt": 0, "sender": MEMBER, "unknown": {"to": "this version"}}
        send(member, {**good, "number": 1, "exits": [[*FAILED[:2], 9, *FAILED[3:]]], **change})
        send(member, {**good, "number": 2})
        answered(member, "stop")
        send(member, {"type": "clean", "survivors": [], "number": 3, "attempt": 0, "sender": MEMBER})
        assert answered(member, "finish")["outcome"]["code"] == 7
