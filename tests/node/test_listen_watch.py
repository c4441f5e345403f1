"""Trainers start when every pserver listens at its own address; a listener at the same port of another one is not it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.model.facts import read_facts
from clustertool.node.ports import listeners
from tests.free_ports import free_port
from tests.node import programs as p
from tests.node.harness import Bench, Job, Node, until

# Listens at $AT (its own address, if that is empty) once the file $GO<rank> is there; at the right place after $THEN<rank>.
SERVER = p.python("""
import os, socket, time
from pathlib import Path
def wait(name):
    while not Path(os.environ[name] + os.environ["CLUSTERTOOL_RANK"]).exists():
        time.sleep(0.01)
def listen(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dual = dict(dualstack_ipv6=True) if family == socket.AF_INET6 else {}
    return socket.create_server((address, int(os.environ["PADDLE_PORT"])), family=family, **dual)
wait("GO")
server = listen(os.environ["AT"] or os.environ["POD_IP"])
say("listening")
if os.environ["THEN"]:
    wait("THEN")
    second = listen(os.environ["POD_IP"])
time.sleep(1000)
""")


@pytest.fixture
def port() -> int:
    """A port that is free on all addresses."""
    return free_port("")


def server_job(bench: Bench, nodes: list[Node], port: int, at: str = "", then: str = "", **given: object) -> Job:
    """A pserver on each node, all at one port number; a trainer there, too."""
    env = {"GO": str(bench.tmp / "go"), "AT": at, "THEN": then and str(bench.tmp / then)}
    endpoints = [f"{node.host.address}:{port}" for node in nodes]
    return bench.run(nodes, "true", pserver=SERVER, env=env, **{"endpoints": endpoints, **given})


def steps(job: Job, node: int = 0) -> list[str]:
    return [f"{e['type']} {e['role']}" for e in job.events(node) if e["type"] in ("started", "listening", "elsewhere")]


def test_one_port_on_two_addresses(bench: Bench, port: int, tmp_path: Path) -> None:
    """The first one's listener is not the second one's, though both are on one machine."""
    job = server_job(bench, bench.nodes(2), port)
    assert len({process.ports[0] for process in job.plan.processes if process.role == "pserver"}) == 1
    (tmp_path / "go0").touch()
    job.until("listening", 0)
    job.says(b"listening", 0, "pserver")
    beats = job.follow(1)
    until(lambda: beats.beats >= 2)  # the second node's supervisor has checked many times since
    assert steps(job, 1) == ["started pserver"]
    assert steps(job, 0) == ["started pserver", "listening pserver"]
    (tmp_path / "go1").touch()
    assert [job.ended(node)["state"] for node in (0, 1)] == ["succeeded"] * 2
    assert steps(job, 1) == ["started pserver", "listening pserver", "started trainer"]


@pytest.mark.parametrize("at", ["0.0.0.0", "::"])
def test_a_listener_on_all_addresses_counts(bench: Bench, port: int, tmp_path: Path, at: str) -> None:
    if at == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    (tmp_path / "go0").touch()
    assert server_job(bench, bench.nodes(1), port, at).ended()["state"] == "succeeded"


@pytest.mark.parametrize("address", ["localhost", "192.0.2.7", "gpu1.example"])
def test_an_endpoint_that_is_no_address_of_this_machine(bench: Bench, tmp_path: Path, address: str) -> None:
    """A name, an address that a router translates, a name that only others know: any listener counts there."""
    (tmp_path / "go0").touch()
    nodes = bench.nodes(1)
    fact = replace(read_facts(0, nodes[0].probe()), address=address)
    job = server_job(bench, nodes, 0, "127.0.0.1", facts={0: fact}, endpoints=())
    assert [process.endpoint.rpartition(":")[0] for process in job.plan.processes] == [address] * 2
    assert job.ended()["state"] == "succeeded"


def test_a_pserver_that_listens_at_another_address_is_reported(bench: Bench, port: int, tmp_path: Path) -> None:
    """As where a host's name is 127.0.1.1 to itself. It may open the right port later."""
    job = server_job(bench, bench.nodes(1), port, "127.0.1.1", "then")
    with socket.create_server(("127.0.2.2", port)):  # another program is no fault of the job
        (tmp_path / "go0").touch()
        (event,) = job.until("elsewhere")
        endpoint = f"{job.nodes[0].host.address}:{port}"
        assert (event["role"], event["rank"], event["listens"]) == ("pserver", 0, f"127.0.1.1 port {port}")
        assert event["endpoint"] == endpoint
        assert steps(job) == ["started pserver", "elsewhere pserver"]
        (tmp_path / "then0").touch()
        assert job.ended()["state"] == "succeeded"
    assert steps(job) == ["started pserver", "elsewhere pserver", "listening pserver", "started trainer"]


def test_both_ways_to_ask_the_kernel_say_the_same() -> None:
    """Netlink, and /proc/net/tcp where there is none; IPv4 in IPv6's clothes is IPv4."""
    opened = [socket.create_server(("127.0.3.3", 0)), socket.create_server(("", 0))]
    if socket.has_dualstack_ipv6():
        for host in ("::1", "::", "::ffff:127.0.3.4"):
            opened.append(socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=host != "::1"))
    wanted = {}
    for sock in opened:
        address, port = sock.getsockname()[:2]
        wanted[port] = (address.replace("::ffff:", ""), os.getuid(), os.fstat(sock.fileno()).st_ino)
    try:
        for found in (
            [*listeners._read_by_netlink(socket.AF_INET), *listeners._read_by_netlink(socket.AF_INET6)],
            [*listeners._read_table("/proc/net/tcp"), *listeners._read_table("/proc/net/tcp6")],
        ):
            assert {one.port: (one.address, one.uid, one.inode) for one in found if one.port in wanted} == wanted
    finally:
        for sock in opened:
            sock.close()


OWN = [
    ("127.0.0.1", "127.0.0.1"),
    ("127.0.7.9", "127.0.7.9"),
    ("192.0.2.1", ""),
    ("localhost", ""),
    ("", ""),
    ("10.0.0", ""),
    ("2001:db8::1", ""),
    ("not:v6", ""),
]


@pytest.mark.parametrize("host, own", OWN)
def test_which_addresses_are_ours(host: str, own: str) -> None:
    assert listeners.own_address(host) == own


SERVES = [
    ("10.0.0.1", "10.0.0.1", True),
    ("10.0.0.1", "10.0.0.11", False),
    ("0.0.0.0", "10.0.0.1", True),
    ("::", "10.0.0.1", True),
    ("::", "fe80::1", True),
    ("0.0.0.0", "fe80::1", False),
    ("::1", "fe80::1", False),
    ("127.0.0.1", "10.0.0.1", False),
]


@pytest.mark.parametrize("listens, asked, yes", SERVES)
def test_the_server_of_an_address(listens: str, asked: str, yes: bool) -> None:
    assert listeners.serves(listeners.Listener(listens, 80, 0, 0), asked) is yes


@pytest.mark.parametrize("pserver", ["true", "sleep 1000"])
def test_pservers_without_a_port(bench: Bench, pserver: str) -> None:
    """`[pserver] ready = "started"`: trainers start at once, and a pserver may end with 0 before them."""
    job = bench.run(bench.nodes(2), "sleep 0.5; echo ready", pserver=pserver, pserver_ready="started")
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert not any(job.events(node, "listening") for node in range(2))


def test_a_failure_of_such_a_pserver_is_one(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), p.PLAIN, pserver="sleep 0.3; exit 5", pserver_ready="started")
    assert [job.ended(node)["code"] for node in range(2)] == [5, 5]
