"""Who gets a piece from the laptop, and when: the real deciding and sending, with nodes that are told what to say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.fleet.dispatch import deliver
from clustertool.fleet.dispatch import spread as module
from clustertool.fleet.dispatch.receivers import Receiver, Tally
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.spread import Spread
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.model.dispatch import topology


class Agent:
    """A node: what it was sent, and a mouth."""

    hear: Any = None

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.heard: list[str] = []

    def tell_relay(self, header: dict[str, Any], *_: Any) -> None:
        self.heard.append(header["k"])
        if header["k"] == "piece":
            self.pieces.append(header["i"])

    def nudge_relay(self) -> None:
        pass


class Fleet:
    check = None
    cluster = SimpleNamespace(relay="auto", hosts=("a", "b", "c"))

    def __init__(self) -> None:
        self.agents = {node: Agent() for node in range(3)}
        self.held: dict[int, Agent] = {}

    def open(self, unless: str, opened: Any, ahead: float) -> None:
        """All nodes are there, one after the other."""
        for node in self.agents:
            opened(node)

    def name(self, at: int) -> str:
        return f"node{at}"

    def ask(self, requests: dict[int, Any], **_: Any) -> Any:
        return SimpleNamespace(ok={}, failed={})

    def say(self, at: int, said: str, **more: Any) -> None:
        self.agents[at].hear(at, {"k": "relay", "s": said, **more})

    def gets(self, at: int, pieces: list[int], seconds: float = 2.0) -> bool:
        end = time.monotonic() + seconds
        while self.agents[at].pieces != pieces and time.monotonic() < end:
            time.sleep(0.01)
        return self.agents[at].pieces == pieces


FACTS: Any = SimpleNamespace(address="127.0.0.1")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of two pieces: the manifest and one file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job/big").write_bytes(os.urandom(300_000))
    return tmp_path / "job"


@pytest.fixture
def spread(job: Path) -> Iterator[Spread]:
    made = Spread(Fleet(), Shipment(read_workspace(job), {}), Tally())  # type: ignore[arg-type]
    assert len(made.shipment.pieces) == 2
    made.start()
    yield made
    made.end()


@pytest.fixture
def late(spread: Spread) -> Fleet:
    """Node 0 has the release and has not said a word yet; node 1 is empty and has just got the manifest: it lacks piece 1."""
    fleet: Any = spread._fleet
    spread.add([Receiver(0, "release", None)], {0: FACTS}, helper=True)
    spread.add([Receiver(1, "release", None)], {1: FACTS})
    fleet.say(1, "ready", port=1, empty=True)
    assert fleet.gets(1, [0])
    fleet.say(1, "lacks", lacks=topology.bits({1}, 2), have=topology.bits({0}, 2))
    return fleet  # type: ignore[no-any-return]


def test_nothing_is_sent_that_a_helper_who_is_slow_to_speak_turns_out_to_hold(late):
    assert not late.gets(1, [0, 1], seconds=0.4)
    late.say(0, "ready", port=1, empty=False)
    assert not late.gets(1, [0, 1], seconds=0.1)
    late.say(0, "lacks", lacks=topology.bits(set(), 2), have=topology.bits({0, 1}, 2))
    late.say(0, "done", left=0, live=0, peers=0, came=[])
    assert not late.gets(1, [0, 1], seconds=module._SETTLE + 0.5)


def test_a_helper_who_never_speaks_is_waited_for_only_a_moment(late):
    assert late.gets(1, [0, 1], seconds=module._SETTLE + 2.0)


def test_a_helper_who_fails_is_not_waited_for(late):
    late.say(0, "gone", why="killed")
    assert late.gets(1, [0, 1], seconds=module._SETTLE / 2)


def test_pieces_go_gently_until_all_have_heard_of_one_another(spread):
    """A word for one node would wait behind the pieces for another."""
    fleet: Any = spread._fleet
    spread.add([Receiver(node, "release", None) for node in (0, 1)], {0: FACTS, 1: FACTS})
    spread.complete = True
    fleet.say(0, "ready", port=1, empty=True)
    assert fleet.gets(0, [0])
    time.sleep(0.2)
    assert spread.gentle and "sources" not in fleet.agents[0].heard
    fleet.say(1, "ready", port=1, empty=True)
    end = time.monotonic() + 2
    while spread.gentle and time.monotonic() < end:
        time.sleep(0.001)
    assert not spread.gentle and all("sources" in fleet.agents[node].heard for node in (0, 1))


def test_all_nodes_join_what_the_first_one_began(job, monkeypatch):
    monkeypatch.setattr(deliver, "_MUCH", 1)
    fleet: Any = Fleet()

    def look(node: int) -> Any:
        return SimpleNamespace(
            root_id=f"root{node}",
            root_hint=f"hint{node}",
            root_above=(),
            releases=(),
            problems=(),
            address="127.0.0.1",
            disk_free=1 << 40,
        )

    done, begun = deliver.quickly(fleet, read_workspace(job), look)
    assert begun and begun.nodes == (0, 1, 2) and not done.sent
    begun.end()
