"""The copy of the logs after a job: what ends it, and that it is made where processes survived a stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.actions import read_logs
from clustertool.actions.follow_job import Inbox
from clustertool.engines import known_engines
from clustertool.errors import Survivors, Unreachable
from clustertool.ssh.parallel import Gathered
from clustertool.verbs import follow_session, run, signals
from clustertool.verbs.verb import Call
from clustertool.watch.job_view import JobView, LogPiece
from tests.unit.cases import cluster_of, plan_of

PIECE = LogPiece("log/workerlog.0", 0, b"text")


class Session:
    """A followed job, one process of which has survived a stop."""

    detached = False

    def __init__(self, call: Any, fleet: Any, inbox: Any, *_: Any, copy: Any, revive: Any) -> None:
        self.call, self.fleet, self.inbox = call, fleet, inbox
        self.watch = JobView(frozenset([0]))
        self.copy = copy

    def start(self, *_: Any) -> None: ...

    def run(self) -> None:
        raise Survivors("node1: 1 process is left", "")

    def copy_piece(self, piece: LogPiece) -> None:
        self.copy.write(piece.log, piece.offset, piece.data)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The signals that came: one Ctrl+C, which has stopped the job."""
    made = signals._Count()
    made.ints, made.job = 1, "J"
    monkeypatch.setattr(signals, "count", made)
    return made


def end(folder: Path, monkeypatch: pytest.MonkeyPatch, rest: Callable[..., Iterator[LogPiece]]) -> list[Any]:
    """Follow the job to its end with --fetch-logs; the orders that were ended."""
    ended: list[Any] = []
    unused = dict.fromkeys(("detach", "json", "all_ranks"), False)
    given = {"log_dir": str(folder), "fetch_logs": True, "rank": "", **unused}
    order: Any = SimpleNamespace(cluster=cluster_of(["node1"]), secrets={}, ended=ended.append)
    monkeypatch.setattr(run, "FollowSession", Session)
    monkeypatch.setattr(follow_session, "read_remaining_logs", rest)
    nothing: Any = None
    engine: Any = SimpleNamespace(fleet=None, cancel=None, capabilities=known_engines.capabilities("ssh"))
    with pytest.raises(Survivors):
        run._follow_started(
            Call(SimpleNamespace(**given)), order, engine, nothing, plan_of(cluster_of(["node1"])), True
        )
    return ended


@pytest.mark.usefixtures("count")
def test_logs_are_copied_where_processes_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rest(*args: Any) -> Iterator[LogPiece]:
        args[-1]()  # the Ctrl+C that has stopped the job does not end the copy
        yield PIECE

    assert len(end(tmp_path, monkeypatch, rest)) == 1
    assert (tmp_path / "workerlog.0").read_text() == "text"
    assert "logs on this machine: 1 file in" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ints", "terms", "hups"])
def test_a_signal_ends_the_copy(
    kind: str, count: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rest(*args: Any) -> Iterator[LogPiece]:
        setattr(count, kind, getattr(count, kind) + 1)
        args[-1]()
        yield PIECE

    end(tmp_path, monkeypatch, rest)
    assert "warning: not all logs were copied: " in capsys.readouterr().err
    assert not (tmp_path / "workerlog.0").exists()


@pytest.mark.usefixtures("count")
def test_an_error_of_this_machine_ends_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = []

    def rest(*_: Any) -> Iterator[LogPiece]:
        for number in range(3):
            sent.append(number)
            yield LogPiece(f"log/{'x' * 300}", 0, b"text")

    end(tmp_path, monkeypatch, rest)
    assert sent == [0]
    assert "logs on this machine: 0 files in" in capsys.readouterr().err


class Agents:
    """A fleet of two nodes, whose agents answer and then send what the test puts into `inbox`."""

    agents = {0: SimpleNamespace(dead=None), 1: SimpleNamespace(dead=None)}

    def ask(self, requests: dict[int, Any], **_: Any) -> Gathered[Any]:
        return Gathered(dict.fromkeys(requests, {}), {})

    def name(self, node: int) -> str:
        return f"node{node}"


def test_a_node_that_sends_only_heartbeats_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_logs, "STALL", 0.3)
    fleet: Any = Agents()
    inbox, known = Inbox(), JobView(frozenset([0, 1]))
    inbox.put(0, {"type": "end", "orphan": False}, b"")

    def beat() -> None:
        for _ in range(10):
            time.sleep(0.05)
            inbox.put(1, {"type": "beat", "t": 0.0}, b"")

    beats = threading.Thread(target=beat)
    beats.start()
    checks: list[None] = []
    with pytest.raises(Unreachable, match="nothing moved for 0.3 s") as caught:
        list(read_logs.read_remaining_logs(fleet, inbox, "J", known, lambda: checks.append(None)))
    assert caught.value.node == "node1" and checks
    beats.join()


def test_a_home_folder_in_log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    copy = follow_session.copy_of_logs(Call(SimpleNamespace(log_dir="~/logs")), "J")
    assert copy is not None and copy.folder == tmp_path / "logs/JOBJ"
