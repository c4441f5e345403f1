"""Nodes that try each other: real listeners of real agents; strangers learn nothing and disturb nothing; nothing stays."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.ports import claims
from tests.free_ports import free_port
from tests.node.harness import Bench, Node, claims_on_disk, until

TOKEN = secrets.token_hex(16)


def opened(node: Node, index: int, *ports: int, token: str = TOKEN) -> list[int]:
    where = {"address": address_of(node), "ports": list(ports)}
    return list(node.ask("link-open", node=index, token=token, **where)["ports"])


def address_of(node: Node) -> str:
    return node.host.address or node.host.host


def tried(node: Node, *targets: tuple[int, str, int], token: str = TOKEN, seconds: float = 5.0) -> dict[int, str]:
    answer = node.ask("link-try", token=token, seconds=seconds, targets=[list(target) for target in targets])
    return {port: argument for _, port, argument, _ in answer["tries"]}


@pytest.fixture
def listening(bench: Bench) -> tuple[list[Node], str, int]:
    """Two nodes, of which the second listens: its address and port."""
    nodes = bench.nodes(2)
    address = address_of(nodes[1])
    port = free_port(address)
    assert opened(nodes[1], 1, port) == [port]
    return nodes, address, port


def test_a_node_reaches_another(listening: tuple[list[Node], str, int]) -> None:
    nodes, address, port = listening
    answer = nodes[0].ask("link-try", token=TOKEN, seconds=5.0, targets=[[1, address, port]] * 300)
    assert {(node, at, argument) for node, at, argument, _ in answer["tries"]} == {(1, port, "ok")}
    assert len(answer["tries"]) == 300
    assert all(0 < seconds < 5 for *_, seconds in answer["tries"])


def test_the_time_is_that_of_the_network(listening: tuple[list[Node], str, int]) -> None:
    """And not that of an agent which has other things to do."""
    nodes, address, port = listening
    agent = nodes[1].client.pid
    os.kill(agent, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (agent, signal.SIGCONT)).start()
    start = time.monotonic()
    ((_, _, argument, seconds),) = nodes[0].ask("link-try", token=TOKEN, seconds=1.0, targets=[[1, address, port]])[
        "tries"
    ]
    assert time.monotonic() - start > 1.4
    assert argument == "ok" and 0 < seconds < 1.0


def test_each_error_has_a_name(listening: tuple[list[Node], str, int]) -> None:
    nodes, address, port = listening
    other = free_port()
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.create_server(("127.0.0.1", 0)) as loud:
        ports = [server.getsockname()[1] for server in (deaf, loud)]
        loud.settimeout(20)
        contact: list[Any] = []

        def shout() -> None:
            one, _ = loud.accept()
            one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            contact.append(one)

        thread = threading.Thread(target=shout)
        thread.start()
        here = "127.0.0.1"
        tokens = tried(
            nodes[0], (1, here, other), (1, here, ports[0]), (1, here, ports[1]), (2, address, port), seconds=3.0
        )
        thread.join()
        contact[0].close()
    assert tokens == {
        other: "refused",
        ports[0]: "no answer of the agent",
        ports[1]: "something else listens there",
        port: "another node answered",
    }
    assert "not known" in tried(nodes[0], (1, "no.such.name.invalid", 1))[1]


def test_strangers_learn_nothing_and_disturb_nothing(listening: tuple[list[Node], str, int]) -> None:
    nodes, address, port = listening
    with contextlib.ExitStack() as strangers:

        def stranger() -> socket.socket:
            sock = strangers.enter_context(socket.create_connection((address, port)))
            sock.settimeout(20)
            return sock

        silent = [stranger() for _ in range(50)]
        wrong = stranger()
        wrong.sendall(secrets.token_hex(16).encode() + b"w")
        assert output(wrong) == b""
        almost = stranger()
        almost.sendall(TOKEN.encode()[:-1])
        rude = stranger()
        rude.sendall(b"\0" * 100_000)
        assert output(rude) == b""
        for sock in silent[:5]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
            sock.close()
        assert tried(nodes[0], (1, address, port)) == {port: "ok"}
        start = time.monotonic()
        assert [output(sock) for sock in (almost, *silent[5:])] == [b""] * 46  # they are put out after 2 s
        assert time.monotonic() - start < 20
        assert tried(nodes[0], (1, address, port)) == {port: "ok"}


def output(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionError:
        return b""


def test_another_checks_token_is_a_strangers(listening: tuple[list[Node], str, int]) -> None:
    nodes, address, port = listening
    assert tried(nodes[0], (1, address, port), token=secrets.token_hex(16)) == {port: "something else listens there"}


def test_how_much_goes_through(listening: tuple[list[Node], str, int]) -> None:
    nodes, address, port = listening
    ask: dict[str, Any] = {"token": TOKEN, "seconds": 0.2, "target": [1, address, port]}
    speed = nodes[0].ask("link-send", **ask)["speed"]
    assert 1e6 < speed < 1e12
    assert "speed" not in nodes[0].ask("link-send", **{**ask, "token": secrets.token_hex(16)})
    assert "speed" not in nodes[0].ask("link-send", **{**ask, "target": [7, address, port]})


def test_ports_are_claimed_and_given_back(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    port = free_port()
    assert opened(node, 0, port) == [port]
    assert claims.claimed_ports()[port] == "(check)"
    assert port in node.probe()["busy"]
    node.ask("link-close")
    assert port not in claims.claimed_ports()
    with socket.create_server((address_of(node), port)):
        assert opened(node, 0, port, free := free_port()) == [free]  # what is taken is left out


@pytest.mark.parametrize("how", ["close", "kill"])
def test_it_is_gone_with_the_agent(bench: Bench, how: str) -> None:
    node = bench.nodes(1)[0]
    port = free_port()
    assert opened(node, 0, port) == [port]
    address = address_of(node)
    socket.create_connection((address, port)).close()
    client = node.client
    client.close() if how == "close" else client.kill()

    def refused() -> bool:
        try:
            socket.create_connection((address, port)).close()
        except ConnectionRefusedError:
            return True
        return False

    until(refused, "nobody listens")
    until(lambda: port not in claims.claimed_ports(), "the claim is void")


def test_a_job_that_wants_a_port_of_a_check_is_reported(bench: Bench) -> None:
    from clustertool.errors import PortInUse

    node = bench.nodes(1)[0]
    port = free_port()
    assert opened(node, 0, port) == [port]
    with pytest.raises(PortInUse, match=r"in use by job \(check\)") as reported:
        claims.claim([port], "mine", str(node.root))
    assert "wait" in reported.value.fix
    node.ask("link-close")
    Path(node.root, "JOBmine").mkdir(parents=True)
    claims.claim([port], "mine", str(node.root))
    assert claims.claimed_ports()[port] == "mine"
    assert opened(node, 0, port, free := free_port()) == [free]  # a check leaves the port to the job
    assert (claims.claimed_ports()[port], claims.claimed_ports()[free]) == ("mine", "(check)")
    node.ask("link-close")
    assert claims.claimed_ports()[port] == "mine" and free not in claims.claimed_ports()
    Path(node.root, "JOBmine").rmdir()
    assert port not in claims.claimed_ports()
    assert claims_on_disk(), "the file is whole"
