"""Who gets a piece from the laptop, and when: the real deciding and sending, with nodes that are told what to say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.plan import swarm
from clustertool.reach import spread as module
from clustertool.reach.dispatch import Receiver, Tally
from clustertool.reach.shipment import Shipment
from clustertool.reach.spread import Spread
from clustertool.reach.workspace import read_workspace


class Agent:
    """A node: what it was sent, and a mouth."""

    hear: Any = None

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def tell_relay(self, header: dict[str, Any], *_: Any) -> None:
        if header["k"] == "piece":
            self.pieces.append(header["i"])

    def nudge_relay(self) -> None:
        pass


class Fleet:
    check = None
    cluster = SimpleNamespace(relay="auto", hosts=("a", "b"))

    def __init__(self) -> None:
        self.agents = {0: Agent(), 1: Agent()}

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


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Node 0 has the release and has not said a word yet; node 1 is empty and has just got the manifest: it lacks piece 1."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job/big").write_bytes(os.urandom(300_000))
    fleet = Fleet()
    spread = Spread(fleet, Shipment(read_workspace(tmp_path / "job"), {}), Tally())  # type: ignore[arg-type]
    assert len(spread.shipment.pieces) == 2
    facts: Any = SimpleNamespace(address="127.0.0.1")
    spread.start()
    spread.add([Receiver(0, "release", None)], {0: facts}, helper=True)
    spread.add([Receiver(1, "release", None)], {1: facts})
    fleet.say(1, "ready", port=1, empty=True)
    assert fleet.gets(1, [0])
    fleet.say(1, "lacks", lacks=swarm.bits({1}, 2), have=swarm.bits({0}, 2))
    yield fleet
    spread.end()


def test_nothing_is_sent_that_a_helper_who_is_slow_to_speak_turns_out_to_hold(late):
    assert not late.gets(1, [0, 1], seconds=0.4)
    late.say(0, "ready", port=1, empty=False)
    assert not late.gets(1, [0, 1], seconds=0.1)
    late.say(0, "lacks", lacks=swarm.bits(set(), 2), have=swarm.bits({0, 1}, 2))
    late.say(0, "done")
    assert not late.gets(1, [0, 1], seconds=module._SETTLE + 0.5)


def test_a_helper_who_never_speaks_is_waited_for_only_a_moment(late):
    assert late.gets(1, [0, 1], seconds=module._SETTLE + 2.0)


def test_a_helper_who_fails_is_not_waited_for(late):
    late.say(0, "gone", why="killed")
    assert late.gets(1, [0, 1], seconds=module._SETTLE / 2)
