"""The loop of a dispatch carries out what the scheduler decides; the nodes are played by the tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.errors import DispatchError, Unreachable
from clustertool.fleet.dispatch.receivers import DispatchCounts, Receiver
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.spread import Spread
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.model.dispatch import topology


class Agent:
    """A node: what it was sent, and its reports."""

    receive: Any = None

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.messages: list[str] = []
        self.broken = False

    def send_to_relay(self, header: dict[str, Any], data: bytes, moved: Any, gently: Any) -> None:
        if self.broken:
            raise Unreachable("the connection broke", "", "node")
        self.messages.append(header["type"])
        if header["type"] == "relay-piece":
            self.pieces.append(header["piece"])
            moved(len(data))

    def nudge_relay(self) -> None:
        pass


class Fleet:
    check = None
    cluster = SimpleNamespace(relay="auto", hosts=("a", "b", "c"))

    def __init__(self) -> None:
        self.agents = {node: Agent() for node in range(3)}
        self.ordered = {node: threading.Event() for node in range(3)}  # its relay was

    def name(self, at: int) -> str:
        return f"node{at}"

    def ask(self, requests: dict[int, Any], **_: Any) -> Any:
        return SimpleNamespace(ok={}, failed={})

    def ask_one(self, node: int, request: dict[str, Any]) -> None:
        self.ordered[node].set()

    def reports(self, at: int, kind: str, **more: Any) -> None:
        self.agents[at].on_relay(at, {"type": f"relay-{kind}", **more})

    def lacks(self, at: int, *pieces: int) -> None:
        self.reports(at, "lacks", lacks=topology.bits(set(pieces)), have="1")

    def done(self, at: int, came: list[int], peers: int = 0) -> None:
        self.reports(at, "done", left=0, live=1, peers=peers, came=came)

    def gets(self, at: int, pieces: list[int], seconds: float = 5.0) -> bool:
        end = time.monotonic() + seconds
        while self.agents[at].pieces != pieces and time.monotonic() < end:
            time.sleep(0.01)
        return self.agents[at].pieces == pieces


class Shown:
    """The progress as it was reported."""

    def __init__(self) -> None:
        self.all_done: list[str] = []

    def uplink(self, sent: int, total: int) -> None:
        self.sent = sent, total

    def node(self, name: str, got: int, size: int) -> None:
        pass

    def done(self, name: str) -> None:
        self.all_done.append(name)


FACTS: Any = dict.fromkeys(range(3), SimpleNamespace(address="127.0.0.1"))


class Running:
    """A dispatch of two pieces, the manifest and one file, to nodes 0 and 1, in a thread of its own."""

    def __init__(self, job: Path) -> None:
        self.fleet, self.tally, self.shown = Fleet(), DispatchCounts(), Shown()
        self.error: BaseException | None = None
        self.shipment = Shipment(read_workspace(job), {})
        self.spread = Spread(self.fleet, self.shipment, self.tally, self.shown)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.spread.run([Receiver(node, "release", None) for node in (0, 1)], [], FACTS)
        except BaseException as error:  # noqa: BLE001 - a test expects it
            self.error = error

    def start(self) -> None:
        """Node 0 is ready first."""
        self.thread.start()
        for node in (0, 1):
            assert self.fleet.ordered[node].wait(60)
            self.fleet.reports(node, "ready", port=1, empty=True)

    def ends(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job/big").write_bytes(os.urandom(300_000))
    made = Running(tmp_path / "job")
    assert len(made.shipment.pieces) == 2
    yield made


def test_each_piece_goes_to_one_node_and_both_end(running):
    running.start()
    fleet = running.fleet
    assert fleet.gets(0, [0])
    for node in (0, 1):
        fleet.lacks(node, 1)
    assert fleet.gets(1, [1]) or fleet.gets(0, [0, 1])
    fleet.done(0, [0], peers=300_000)
    fleet.done(1, [1], peers=len(running.shipment.packed))
    running.ends()
    sent = sum(len(agent.pieces) for agent in fleet.agents.values())
    assert sent == 2 and running.tally.uplink == sum(piece.size for piece in running.shipment.pieces)
    assert running.tally.between == 300_000 + len(running.shipment.packed)
    assert running.shown.all_done == ["node0", "node1"] and running.shown.sent == (running.tally.uplink,) * 2
    assert all("relay-sources" in fleet.agents[node].messages for node in (0, 1)) and not running.tally.failed


def test_a_node_that_fails_fails_alone(running):
    running.fleet.agents[0].broken = True
    running.start()
    assert running.fleet.gets(1, [0])
    running.fleet.done(1, [0])
    running.ends()
    assert running.error is None and list(running.tally.failed) == [0]
    assert isinstance(running.tally.failed[0], DispatchError) and running.shown.all_done == ["node1"]


def test_what_is_not_valid_fails_its_node(running):
    running.start()
    assert running.fleet.gets(0, [0])
    running.fleet.reports(1, "wrong", piece=2)
    running.fleet.done(0, [0])
    running.ends()
    assert "there is no piece 2" in running.tally.failed[1].what


def test_a_file_that_changes_ends_the_dispatch(running, tmp_path):
    running.start()
    assert running.fleet.gets(0, [0])
    (tmp_path / "job/big").write_bytes(os.urandom(300_000))
    running.fleet.lacks(0, 1)
    running.ends()
    assert isinstance(running.error, DispatchError) and "changed while it was sent" in running.error.what
