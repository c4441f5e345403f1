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
    with socket.create_connection(job.plan.lead, timeout=10) as plain, context.wrap_socket(plain) as sock:
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


def exited(*exits: Any) -> dict[str, Any]:
    return {"m": "exited", "exits": list(exits)}


MALFORMED: dict[str, Any] = {
    "no rank": {"m": "listening", "role": "pserver"},
    "a rank that is a list": {"m": "listening", "role": "trainer", "rank": []},
    "a process of another node": {"m": "listening", "role": "trainer", "rank": 0},
    "a process of no plan": exited(["trainer", 77, 0, 0, False, "", 0, False]),
    "exits that are a number": {"m": "exited", "exits": 7},
    "an exit that is too short": exited(["trainer", 1, 0]),
    "an exit code that is a text": exited(["trainer", 1, "x", 0, False, "", 0, False]),
    "an exit code without end": b'{"m": "exited", "n": 1, "exits": [["trainer", 1, Infinity, 0, false, "", 0, false]]}',
    "a negative exit code": exited(["trainer", 1, -5, 0, False, "", 0, False]),
    "survivors that are none": {"m": "clean", "survivors": None, "attempt": 0},
    "an attempt that is none": {"m": "clean", "survivors": [], "attempt": "now"},
    "a stop by no one": {"m": "stop"},
    "an acknowledgement that is no number": {"m": "beat", "a": {}},
    "progress of ranks that is a number": {"m": "beat", "ranks": 7},
    "progress of a rank that is a list": {"m": "beat", "ranks": [["trainer", [], 1, 2, 3]]},
    "a step that is a text": {"m": "beat", "ranks": [["trainer", 1, None, "x", 0]]},
    "a number of its own that is none": b'{"m": "beat", "n": NaN}',
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_message_ends_the_part_of_its_sender(bench: Bench, kind: str) -> None:
    job = lone(bench)
    with connected(job) as sock:
        send(sock, {"m": "join", "node": 1, "token": job.token})
        message = MALFORMED[kind]
        send(sock, message if isinstance(message, bytes) else {"n": 1, **message})
        assert closed(sock)
    outcome = job.ended(0)
    name = job.nodes[1].host.name
    assert (outcome["state"], outcome["code"]) == ("lost", 75)
    assert outcome["reason"].startswith(f"node {name} is lost: it sent a message that cannot be read (")
    assert len(outcome["reason"]) < 250 and "\n" not in outcome["reason"]
    assert not (job.dir(0) / ".clustertool/supervisor.err").read_text()


GREETINGS: dict[str, Any] = {
    "a node that is a list": {"m": "join", "node": [1]},
    "a node that is an object": {"m": "join", "node": {}},
    "the coordinator's own node": {"m": "join", "node": 0},
    "a token that is not ASCII": {"m": "join", "node": 1, "token": "\udcffé"},
    "a token that is a list": {"m": "join", "node": 1, "token": ["x"]},
    "no JSON": b"{",
    "nested lists": b"[" * 30_000 + b"]" * 30_000,
}


def test_a_malformed_greeting_is_refused(bench: Bench) -> None:
    """And the node whose id it used joins as if nothing had happened."""
    job = lone(bench)
    for greeting in GREETINGS.values():
        with connected(job) as sock:
            send(sock, {"token": job.token, **greeting} if isinstance(greeting, dict) else greeting)
            assert closed(sock), greeting
    assert alive(job.process("supervisor"))
    job.nodes[1].client.agent.ask(job.start_requests[1])
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert not (job.dir(0) / ".clustertool/supervisor.err").read_text()
