"""Dispatch when something goes wrong on the way: it ends right or fails by name, and nothing listens afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli import until

PIECES = ".clustertool/pieces"


def big(site, megabytes: int = 20) -> None:
    (site.workspace(train_py="print(1)") / "big").write_bytes(os.urandom(megabytes << 20))


def whole(site, node: int) -> int:
    """Bytes of whole pieces that a node has."""
    return sum(path.stat().st_size for path in site.root(node).glob(f"{PIECES}/*") if path.suffix != ".part")


def quiet(site) -> None:
    """No agent, no relay, and no port but sshd's on any node."""
    until(lambda: not [p for node in range(site.count) for p in site.processes(node)])
    for node in range(site.count):
        if node in site.lab.boots:
            listening = site.lab.exec(node, ["ss", "-Hltn"]).stdout.splitlines()
            assert all(line.split()[3].endswith(":22") for line in listening), listening


def firewall(site, node: int) -> None:
    """The node has no route to others, so it reaches no node and no node reaches it. The laptop does."""
    for other in range(site.count):
        if other != node:
            done = site.lab.exec(node, ["ip", "route", "add", "unreachable", site.lab.address(other)])
            assert done.returncode == 0, done.stderr


def swallow(site) -> None:
    """A firewall between all nodes that drops what comes: none gets a refusal."""
    for at in range(site.count):
        for to in range(site.count):
            if at != to:
                neighbour = [
                    "ip",
                    "neigh",
                    "replace",
                    site.lab.address(to),
                    "lladdr",
                    "02:00:00:00:00:99",
                    "dev",
                    "eth0",
                ]
                done = site.lab.exec(at, [*neighbour, "nud", "permanent"])
                assert done.returncode == 0, done.stderr


@pytest.mark.chaos
def test_what_the_interface_sends(site) -> None:
    """All of it, also the logins. The tool's own code is counted apart: it is sent with the first command of a version."""
    eight = site(8, installed=False)
    big(eight, 2)
    before = eight.lab.sent()
    rsync = ["rsync", "-a", "-e", "ssh -o BatchMode=yes -o StrictHostKeyChecking=no", "job/", "root@node0:copy/"]
    assert eight.lab.run(rsync, cwd=eight.folder).returncode == 0
    one = eight.lab.sent() - before
    assert 2 << 20 < one < 2.2e6
    before = eight.lab.sent()
    eight.inv("jobs").ends(0)
    assert 8 * 100_000 < eight.lab.sent() - before < 8 * 250_000
    before = eight.lab.sent()
    eight.inv("dispatch", "-w", "job").ends(0)
    assert eight.lab.sent() - before < 1.1 * one + 8 * 60_000


def test_each_byte_crosses_the_uplink_once(site) -> None:
    """And a node more costs little; afterwards nothing listens."""
    three = site(3)
    big(three, 10)
    done = three.inv("dispatch", "-w", "job", "--json").ends(0).json
    # On a busy machine some pieces are late and are sent twice: up to 3 of the 10. Sent to two nodes, all of it would be 20 MB.
    assert 10 << 20 < done["bytes"] < 15 << 20
    assert 15 << 20 < done["between"] < 23 << 20
    assert done["sent"] == [three.name(node) for node in range(3)] and done["served"] == {}
    quiet(three)
    assert [whole(three, node) >= 10 << 20 for node in range(3)] == [True] * 3
    three.inv("run", "-w", "job", "--only", "node2").ends(0)
    (job,) = three.jobs(2)
    assert (job / "big").read_bytes() == (three.folder / "job/big").read_bytes()


def test_a_node_that_cannot_reach_others_is_served_by_the_laptop(site) -> None:
    three = site(3)
    three.lab.shape("uplink", "10mbit")  # else it may get all of it as the first that is there, and lack nothing
    big(three, 10)
    firewall(three, 1)
    done = three.inv("dispatch", "-w", "job", "--json", timeout=120).ends(0)
    assert list(done.json["served"]) == ["node1"]
    assert (
        "node1 received the files from this machine because it could not connect to another node (10.77.0." in done.err
    )
    assert [whole(three, node) >= 10 << 20 for node in range(3)] == [True] * 3
    quiet(three)


@pytest.mark.chaos
def test_nodes_between_which_nothing_comes_through_are_served_by_the_laptop(site) -> None:
    three = site(3)
    three.lab.shape("uplink", "20mbit")
    big(three, 3)
    swallow(three)
    done = three.inv("dispatch", "-w", "job", "--json", timeout=120).ends(0)
    assert len(done.json["served"]) >= 2 and ": no answer" in done.err
    assert [whole(three, node) >= 3 << 20 for node in range(3)] == [True] * 3
    quiet(three)


def test_without_the_relay_the_laptop_serves_all(site) -> None:
    two = site(2)
    two.conf(RELAY="off")
    big(two, 2)
    done = two.inv("dispatch", "-w", "job", "--json").ends(0).json
    assert 4 << 20 < done["bytes"] < 5 << 20 and done["between"] == 0 and done["served"] == {}
    quiet(two)


@pytest.mark.chaos
def test_a_node_that_crashes_while_it_is_a_source(site) -> None:
    """The others get everything; the lost one is named. Then it comes back, and what it had is not sent again."""
    four = site(4)
    four.lab.shape("uplink", "40mbit")
    big(four)
    running = four.start("dispatch", "-w", "job", "--json")
    until(lambda: all(whole(four, node) > 2 << 20 for node in range(4)))
    had = whole(four, 2)
    four.lab.crash(2)
    done = running.wait(120).ends(74)
    assert "node2" in done.err
    assert list(done.json["failed"]) == ["node2"] and list(done.json["releases"]) == ["node0", "node1", "node3"]
    assert done.json["exit"]["code"] == 74
    for node in (0, 1, 3):
        assert whole(four, node) >= 20 << 20
    four.lab.start(2)
    again = four.inv("dispatch", "-w", "job", "--json", timeout=120).ends(0).json
    assert again["sent"] == ["node2"] and again["had"] == ["node0", "node1", "node3"]
    assert again["bytes"] < 1 << 20, "the others have it: hardly a byte crosses the uplink"
    assert again["between"] <= (21 << 20) - had
    quiet(four)


def seconds_to(site, *nodes: int) -> float:
    """How long new 10 MB take to these; the dispatch to the others is ended then."""
    big(site, 10)
    had = {node: whole(site, node) for node in nodes}
    running, start = site.start("dispatch", "-w", "job"), time.monotonic()
    until(lambda: all(whole(site, node) - had[node] >= 10 << 20 for node in nodes), 60)
    took = time.monotonic() - start
    running.signal(signal.SIGINT)
    running.wait(60)
    return took


@pytest.mark.chaos
def test_a_slow_node_does_not_hold_up_the_others(site) -> None:
    """It was given pieces that all others waited for, four seconds for each, the last one without a second chance."""
    four = site(4)
    four.lab.shape("uplink", "40mbit")
    alike = seconds_to(four, 0, 2, 3)
    four.lab.shape(1, "2mbit")
    assert any(seconds_to(four, 0, 2, 3) < 2 * alike for _ in range(3)), "also on a machine that is busy now and then"


@pytest.mark.chaos
def test_a_node_that_is_cut_while_it_receives(site) -> None:
    three = site(3)
    three.lab.shape("uplink", "40mbit")
    big(three)
    running = three.start("dispatch", "-w", "job")
    until(lambda: whole(three, 1) > 2 << 20)
    three.lab.cut(1)
    start = time.monotonic()
    done = running.wait(150).ends(74)
    assert time.monotonic() - start < 90
    assert "error: node1" in done.err and "error: node0" not in done.err and "error: node2" not in done.err
    assert whole(three, 0) >= 20 << 20 and whole(three, 2) >= 20 << 20
    three.lab.heal(1)
    three.inv("dispatch", "-w", "job", timeout=120).ends(0)
    assert whole(three, 1) >= 20 << 20
    quiet(three)


def test_ctrl_c_in_the_middle_and_once_more(site) -> None:
    """Nothing is left that runs; the second time only the rest is sent."""
    pair = site(2)
    pair.lab.shape("uplink", "40mbit")
    big(pair)
    running = pair.start("dispatch", "-w", "job")
    until(lambda: whole(pair, 0) > 4 << 20)
    running.signal(signal.SIGINT)
    running.wait(30).ends(130)
    quiet(pair)
    assert not list(pair.root(0).glob(".clustertool/releases/????????????????????????????????"))
    again = pair.inv("dispatch", "-w", "job", "--json", timeout=120).ends(0).json
    assert again["bytes"] < 17 << 20


@pytest.mark.chaos
def test_rsync_is_interrupted_and_goes_on(site) -> None:
    """Nothing is left that runs; files that came are not sent again."""
    three = site(3)
    three.lab.shape("uplink", "40mbit")
    big(three, 10)
    (three.folder / "job/a").write_bytes(os.urandom(3 << 20))
    running = three.start("dispatch", "-w", "job", "--dispatch", "rsync")
    until(lambda: all(list(three.root(node).glob(".clustertool/staging/*/a")) for node in range(3)), 60)
    running.signal(signal.SIGINT)
    running.wait(30).ends(130)
    quiet(three)
    until(
        lambda: not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(three.folder).encode() in _read(path)]
    )
    again = three.inv("dispatch", "-w", "job", "--dispatch", "rsync", "--json", timeout=120).ends(0).json
    assert again["bytes"] < 3 * 11 << 20 and len(again["sent"]) == 3
    three.inv("run", "-w", "job").ends(0)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.chaos  # a minute, in which nothing moves
def test_a_node_that_is_cut_while_rsync_copies(site) -> None:
    three = site(3)
    three.lab.shape("uplink", "40mbit")
    big(three, 10)
    running = three.start("dispatch", "-w", "job", "--dispatch", "rsync")
    until(lambda: list(three.root(1).glob(".clustertool/staging/*/*")), 60)
    three.lab.cut(1)
    done = running.wait(200).ends(74)
    assert "error: node1" in done.err and "error: node0" not in done.err and "error: node2" not in done.err
    assert whole(three, 0) >= 10 << 20 and whole(three, 2) >= 10 << 20


def test_one_home_for_all(site) -> None:
    three = site(3, shared_home=True)
    big(three, 3)
    done = three.inv("dispatch", "-w", "job", "--json").ends(0).json
    # One that is reached after the first has all of it finds it there, and may pass the list of files on.
    assert 3 << 20 < done["bytes"] < 4 << 20 and done["between"] < 1000
    assert (
        len(done["sent"]) == 1 and len({*done["shared"], *done["had"]}) == len(done["shared"]) + len(done["had"]) == 2
    )
    three.inv("run", "-w", "job").ends(0)
    for node in range(3):
        (job,) = three.root(node).glob(f"node{node}/JOB*")
        assert (job / "big").stat().st_size == 3 << 20


def test_a_full_disk_on_one_node(site) -> None:
    from tests.lab.lab import Node

    pair = site(2, nodes={1: Node(disk="16m")})
    pair.lab.shape("uplink", "20mbit")
    big(pair, 12)
    running = pair.start("dispatch", "-w", "job")
    until(lambda: int(pair.lab.exec(1, ["sh", "-c", "ls clustertool/.clustertool/pieces | wc -l"]).stdout) > 1)
    pair.lab.exec(1, ["sh", "-c", "cat /dev/zero > clustertool/more"])
    done = running.wait(120).ends(74)
    assert "error: node1" in done.err and "No space left on device" in done.err and "error: node0" not in done.err
    assert whole(pair, 0) >= 12 << 20
    quiet(pair)
