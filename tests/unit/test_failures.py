"""What a follower prints about failures: causes first, each once, identical errors together, in any order of the events."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest

from clustertool.errors import JobFailed, NodeLost
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Outcome
from clustertool.model.shape import read
from clustertool.show import job_text
from clustertool.show.error_text import exit_json, show_error
from clustertool.show.terminal import RankLines, Terminal
from clustertool.watch import news
from clustertool.watch.job_view import JobView
from clustertool.watch.news import News

Event = dict[str, Any]
ENDING = "ending the job on all nodes"


def header(node: int, nodes: int = 4) -> Event:
    place = [{"role": "trainer", "rank": node, "local_rank": 0, "endpoint": "", "log": f"log/workerlog.{node}"}]
    return {
        "t": 1.0,
        "type": "job",
        "id": "J",
        "node": node,
        "nodes": [f"n{n}" for n in range(nodes)],
        "created": 1.0,
        "owner": "ann",
        "mode": "collective",
        "command": "",
        "processes": place,
    }


def failure(
    rank: int,
    t: float = 5.0,
    code: int = 1,
    signal: int = 0,
    error: int = 77,
    attempt: int = 0,
    consequence: bool = False,
) -> Event:
    return {
        "t": t,
        "type": "exited",
        "role": "trainer",
        "rank": rank,
        "code": code,
        "signal": signal,
        "stopped": False,
        "note": "",
        "error": error,
        "attempt": attempt,
        "consequence": consequence,
    }


def ending(*culprits: int, why: str = "trainer 0 on n0 ended with exit code 1") -> Event:
    named = {"why": why, "culprits": [["trainer", rank] for rank in culprits], "attempt": 0} if culprits else {}
    return {"t": 5.1, "type": "phase", "name": "ending", "end": "failed", **named}


class Follower:
    """What a follower prints. Its clock moves by hand."""

    def __init__(self) -> None:
        self.watch = JobView(frozenset(range(4)))
        self.now = 0.0
        self.printed: list[str] = []
        self._at = itertools.count()
        for node in range(4):
            self.take(node, header(node))

    def take(self, node: int, *events: Event) -> None:
        frame = {"type": "events", "node": node, "at": next(self._at), "events": list(events)}
        self._print(self.watch.take(node, frame, b"", self.now))

    def wait(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self._print(self.watch.take_due(self.now))

    def end(self) -> list[str]:
        self._print(self.watch.take_rest())
        return self.printed

    def _print(self, items: list[Any]) -> None:
        self.printed += [job_text.news_text(item) for item in items if isinstance(item, News)]


ORDERS = list(itertools.permutations([(0, ending(0)), (0, failure(0)), (1, failure(1)), (3, failure(3))]))


@pytest.mark.parametrize("order", ORDERS[::4])
def test_identical_errors_of_one_moment_are_one_report_before_its_consequence(order: list[tuple[int, Event]]) -> None:
    follower = Follower()
    for node, event in order:
        follower.take(node, event)
    assert follower.end() == ["3 trainers failed with the same error, first trainer 0 on n0: exit code 1", ENDING]


def test_the_first_failure_is_the_one_that_the_coordinator_knew_first() -> None:
    """By its node's clock trainer 3 failed a moment earlier, and its event came first."""
    follower = Follower()
    follower.take(3, failure(3, t=4.9, error=8))
    follower.take(0, ending(0), failure(0))
    assert follower.end() == [
        "trainer 0 on n0 ended with exit code 1",
        "trainer 3 on n3 ended with exit code 1",
        ENDING,
    ]


def test_without_the_coordinators_order_causes_are_before_consequences() -> None:
    follower = Follower()
    follower.take(3, failure(3, t=4.9, error=8, consequence=True))
    follower.take(0, failure(0))
    follower.take(1, failure(1, error=7, consequence=True))
    followed = "trainers 3 and 1 failed after it (connection lost)"
    assert follower.end() == ["trainer 0 on n0 ended with exit code 1", followed]


def test_lost_connections_wait_for_their_cause_and_follow_it() -> None:
    """The cause comes 1.5 s later, and a further consequence when both have been printed."""
    follower = Follower()
    follower.take(3, failure(3, t=4.9, error=8, consequence=True))
    follower.wait(1.5)
    assert not follower.printed
    follower.take(0, failure(0))
    follower.wait()
    follower.take(1, failure(1, error=8, consequence=True))
    assert follower.end() == [
        "trainer 0 on n0 ended with exit code 1",
        "trainer 3 on n3 failed after it (connection lost)",
        "trainer 1 on n1 failed after it (connection lost)",
    ]


def test_lost_connections_without_a_cause_are_failures_as_others() -> None:
    follower = Follower()
    for rank in (3, 1):
        follower.take(rank, failure(rank, t=5.0 - rank, error=8, consequence=True))
    follower.wait(2.5)
    assert follower.printed == ["2 trainers failed with the same error, first trainer 3 on n3: exit code 1"]


def test_the_failures_wait_for_the_coordinator_which_names_them_half_a_second_later() -> None:
    follower = Follower()
    follower.take(3, failure(3, error=8))
    follower.take(0, failure(0))
    follower.wait(0.6)
    follower.take(0, ending(0, 3))
    follower.wait(0.5)
    assert follower.printed == [
        "trainer 0 on n0 ended with exit code 1",
        "trainer 3 on n3 ended with exit code 1",
        ENDING,
    ]


def test_a_failure_whose_event_never_comes_is_reported_by_the_coordinator() -> None:
    follower = Follower()
    follower.take(0, ending(2, why="trainer 2 on n2 ended with signal 11 (segmentation fault)"))
    assert not follower.printed
    follower.wait()
    assert follower.printed == ["trainer 2 on n2 ended with signal 11 (segmentation fault)", ENDING]
    follower.take(2, failure(2, code=0, signal=11))  # it comes after all
    assert follower.end() == follower.printed[:2]


def test_later_failures_with_the_same_error_are_counted() -> None:
    follower = Follower()
    follower.take(1, failure(1))
    follower.wait()
    follower.take(2, failure(2))
    follower.take(3, failure(3))
    follower.wait()
    follower.take(0, failure(0, code=2))
    assert follower.end() == [
        "trainer 1 on n1 ended with exit code 1",
        "2 more trainers failed with the same error as trainer 1",
        "trainer 0 on n0 ended with exit code 2",
    ]


def test_failures_of_two_attempts_are_two_reports() -> None:
    follower = Follower()
    follower.take(1, failure(1))
    follower.take(0, {"t": 6.0, "type": "restart", "attempt": 1, "pause": 1.0}, failure(0, attempt=1))
    assert follower.end() == [
        "trainer 1 on n1 ended with exit code 1",
        "attempt 1 begins in 1 s",
        "trainer 0 on n0 ended with exit code 1",
    ]


def test_an_ending_before_the_next_attempt_says_so() -> None:
    follower = Follower()
    follower.take(0, {"t": 5.1, "type": "phase", "name": "ending"})
    follower.take(0, {"t": 5.2, "type": "restart", "attempt": 1, "pause": 1.0})
    assert follower.end() == ["ending attempt 0 on all nodes", "attempt 1 begins in 1 s"]


def test_without_failures_nothing_waits() -> None:
    follower = Follower()
    follower.take(0, ending())
    assert follower.printed == [ENDING]


def test_records_of_an_older_version_are_read() -> None:
    follower = Follower()
    old = failure(2)
    del old["error"]
    follower.take(2, old)
    follower.take(0, {"t": 5.1, "type": "phase", "name": "ending", "end": "failed"})
    assert follower.end() == ["trainer 2 on n2 ended with exit code 1", ENDING]


# -- the verdict --------------------------------------------------------------------------------------------------------


def decided(state: str, culprits: list[int], reason: str) -> Event:
    return {
        "t": 6.0,
        "type": "verdict",
        "state": state,
        "code": 1 if state == "failed" else 75,
        "source": "job",
        "reason": reason,
        "culprits": [["trainer", rank] for rank in culprits],
        "victims": [],
        "node": culprits[0],
        "brief": reason.partition(":")[0],
    }


@pytest.mark.parametrize(
    "failures, brief",
    [
        ((failure(2),), "trainer 2 on n2: exit code 1"),
        (({**failure(2), "note": "KeyError: 'x'"},), "trainer 2 on n2: KeyError: 'x'"),
        ((failure(2, code=0, signal=11),), "trainer 2 on n2: segmentation fault (signal 11)"),
        ((failure(2), failure(1)), "2 trainers failed with the same error, first trainer 2 on n2: exit code 1"),
        ((failure(2), failure(1, code=3)), "2 trainers failed, first trainer 2 on n2: exit code 1"),
    ],
)
def test_the_exit_line_names_the_failed_and_its_error(failures: tuple[Event, ...], brief: str) -> None:
    follower = Follower()
    for event in failures:
        follower.take(event["rank"], event)
    follower.take(0, decided("failed", [event["rank"] for event in failures], "why"))
    follower.end()
    status, outcome = follower.watch.status, follower.watch.status.outcome
    assert outcome is not None and follower.watch.printed(outcome)
    assert job_text.brief(status, outcome) == brief
    assert len(news.failed_by_themselves(status, outcome)) == len(
        {(event["code"], event["signal"]) for event in failures}
    )


def test_a_lost_node_is_printed_once() -> None:
    follower = Follower()
    follower.take(0, {"t": 5.0, "type": "lost", "node": 2, "why": "no heartbeat for 10 s"})
    follower.take(0, decided("lost", [2], "node n2 is lost: no heartbeat for 10 s"))
    status, outcome = follower.watch.status, follower.watch.status.outcome
    assert outcome is not None and follower.watch.printed(outcome)
    assert job_text.brief(status, outcome) == "node n2 is lost"
    assert not follower.watch.printed(read(Outcome, {**decided("lost", [2], "node n3 is lost: silent"), "node": 3}))


def test_what_was_printed_already_is_not_printed_with_the_exit() -> None:
    err = io.TextIOWrapper(io.BytesIO(), "utf-8")
    error = NodeLost("node n2 is lost: no heartbeat for 10 s", "look at it")
    error.printed, error.brief = True, "node n2 is lost"
    show_error(error, Terminal(out=io.TextIOWrapper(io.BytesIO(), "utf-8"), err=err, environ={}))
    err.flush()
    assert err.buffer.getvalue().decode().splitlines() == [
        "  fix: look at it",
        "clustertool: exit 75 (tool): node n2 is lost",
    ]  # type: ignore[attr-defined]
    assert exit_json(error)["reason"] == "node n2 is lost: no heartbeat for 10 s"
    assert exit_json(JobFailed("why", 3))["reason"] == "why"


def test_what_may_still_run_is_named_by_rank_and_node() -> None:
    left = {"n1": [("trainer", 2), ("trainer", 0), ("trainer", 1), ("pserver", 1)], "n2": []}
    text = "pserver 1, trainer 0-2 on n1 and processes on n2 may still run"
    assert job_text.remains_text("J", left) == f"{text}: {PROGRAM} stop --job J"


def test_victims_are_folded() -> None:
    outcome = read(Outcome, {**decided("failed", [3], "why"), "victims": [["trainer", rank] for rank in (0, 1, 2, 5)]})
    assert job_text.victims_line(outcome) == "stopped by clustertool because of it (victims): trainer 0-2,5"


def test_last_lines_that_are_on_the_screen_are_known() -> None:
    terminal = Terminal(out=io.TextIOWrapper(io.BytesIO(), "utf-8"), environ={})
    lines = RankLines(terminal, hide=lambda line: line.replace("key", "***"))
    lines.show("trainer", 0, "n0", ["step 1", "Traceback", "  key \x1b", "Error"])
    lines.show("trainer", 1, "n1", ["step 2"] * 30)
    assert lines.on_screen("trainer", 0, ["Traceback", "  *** \\x1b", "Error"])
    assert not lines.on_screen("trainer", 0, ["Traceback", "  *** \\x1b"]), "not the last ones"
    assert not lines.on_screen("trainer", 0, [])
    lines.show("trainer", 1, "n1", ["step 3"] * 9)
    assert not lines.on_screen("trainer", 0, ["Traceback", "  *** \\x1b", "Error"]), "scrolled away"
