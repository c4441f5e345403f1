"""Left before the job is over, a follower leaves no thread behind: none that connects again, none that waits for a reader."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cases import cluster_of

from clustertool.actions import follow_job
from clustertool.actions.follow_job import Inbox, JobFollower, NodeQueues
from clustertool.errors import Unreachable
from clustertool.model.wire.stream_messages import StreamFrame

FRAME: StreamFrame = {"type": "end"}


class Left(Exception):
    """Ends the following."""


class Fleet:
    """One node answers, the other one is down until `back` is set. An attempt to connect to it takes `wait` seconds."""

    def __init__(self, wait: float) -> None:
        self.wait = wait
        self.cluster, self.agents = cluster_of(["10.0.0.1", "10.0.0.2"]), {0: None, 1: None}
        self.engine_end = None
        self.prompter = SimpleNamespace(serve=lambda: None)
        self.tried, self.back, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()

    def reopen(self, node: int) -> Any:
        self.threads.add(threading.current_thread())
        self.tried.set()
        if not self.back.wait(self.wait):
            raise Unreachable("it does not answer")
        return SimpleNamespace(link=SimpleNamespace(close=self.closed.set))


@pytest.mark.parametrize("back", [False, True], ids=["it stays down", "it comes back meanwhile"])
def test_nodes_are_not_reconnected_once_the_caller_has_left(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_job, "_RETRY", 0.01)
    fleet: Any = Fleet(10.0 if back else 0.01)
    follower = JobFollower(fleet, Inbox(), "J")
    follower.watch.closed[1] = "the connection broke"

    def check() -> None:
        if fleet.tried.is_set():
            raise Left

    with pytest.raises(Left):
        list(follower.items(check))
    if back:
        fleet.back.set()
    (thread,) = fleet.threads
    thread.join(5)
    assert not thread.is_alive()
    assert fleet.closed.is_set() == back, "the fleet does not close this connection any more"


def test_connections_that_all_break_at_once_are_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a job of one node do, and those of nodes that have one connection together."""
    monkeypatch.setattr(follow_job, "_RETRY", 0.01)
    fleet: Any = Fleet(0.01)
    inbox = Inbox()
    follower = JobFollower(fleet, inbox, "J")
    for node in range(2):
        inbox.put(node, {"type": "beat", "t": 0.0}, b"")
    checks = iter(range(4))

    def check() -> None:
        if next(checks, 4) == 1:
            for node in range(2):
                inbox.put(node, {"type": "closed", "why": "the connection broke", "refused": False}, b"")
        if fleet.tried.is_set():
            raise Left

    with pytest.raises(Left):
        list(follower.items(check))


@pytest.mark.parametrize("kind", [Inbox, lambda: NodeQueues(lambda: None)], ids=["Inbox", "NodeQueues"])
def test_no_thread_waits_for_a_reader_that_has_left(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_job, "_FULL", 0.02)
    inbox = kind()

    def chat() -> None:
        for _ in range(200):
            inbox.put(0, FRAME, b"line")

    reader = threading.Thread(target=chat, daemon=True)
    reader.start()
    reader.join(0.1)
    assert reader.is_alive(), "it waits for space"
    inbox.close()
    reader.join(5)
    assert not reader.is_alive()
