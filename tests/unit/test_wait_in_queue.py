"""Waiting in a queue asks the engine less often while nothing changes, because a scheduler has many users."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clustertool.actions import wait_in_queue
from clustertool.engines.base import Description, EngineState
from clustertool.engines.known_engines import Capabilities
from clustertool.errors import PreflightError

QUEUED = Description(EngineState.QUEUED, "Priority")
ENDED = Description(EngineState.ENDED, "cancelled")


class Clock:
    """Time passes only in sleep()."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Queue:
    """An engine in which a job is `state(seconds)`. asked: when."""

    capabilities = Capabilities(False, queues=True, sends_workspace=False, live_channels=False, requeues=True)

    def __init__(self, clock: Clock, state: Callable[[float], Description]) -> None:
        self._clock, self._state = clock, state
        self.asked: list[float] = []

    def describe(self, known: object) -> dict[str, Description]:
        self.asked.append(self._clock.now)
        return {"J": self._state(self._clock.now)}

    def open(self, job: str = "") -> None:
        """ask_jobs() is replaced."""

    def cause(self, job: str) -> None:
        """The engine has not ended its nodes."""


def waited(monkeypatch: pytest.MonkeyPatch, state: Callable[[float], Description]) -> tuple[list[Description], Queue]:
    clock = Clock()
    monkeypatch.setattr(wait_in_queue, "time", clock)
    monkeypatch.setattr(wait_in_queue, "ask_jobs", lambda fleet, job: {})
    queue = Queue(clock, state)
    shown = []
    with pytest.raises(PreflightError, match="ended before a node had a record of it: cancelled"):
        for known in wait_in_queue.until_started(queue, "J", lambda: None):  # type: ignore[arg-type]
            shown.append(known)
    return shown, queue


def test_a_long_wait_asks_each_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, queue = waited(monkeypatch, lambda now: QUEUED if now < 600 else ENDED)
    between = [later - earlier for earlier, later in zip(queue.asked, queue.asked[1:])]
    assert shown == [QUEUED]
    assert between[0] == pytest.approx(1.0, abs=0.1)
    assert max(between) == pytest.approx(10.0, abs=0.1)
    assert len(between) < 70


def test_a_start_is_seen_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job leaves the queue; from then on its first records are waited for."""
    running = Description(EngineState.RUNNING)
    _, queue = waited(monkeypatch, lambda now: QUEUED if now < 300 else running if now < 320 else ENDED)
    late = [later - earlier for earlier, later in zip(queue.asked, queue.asked[1:]) if earlier > 300]
    assert max(late) == pytest.approx(1.0, abs=0.1)
