"""From the nodes' answers to one story: lives, curves, blame; what a program printed is masked and harmless."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.show.job_text import news_text
from clustertool.watch.report_model import Span, progress_curve
from tests.unit.reports import BEGAN, answers, story_of


def lives(*events: dict[str, Any], supervised: bool = False, now: float = 100.0) -> list[Span]:
    """The spans of trainer 0 on a node of its own."""
    given = answers(1, 1, crash=False)
    head = [event for event in given[0]["events"] if event["type"] in ("job", "supervisor")]
    given[0]["events"] = head + [
        {"role": "trainer", "rank": 0, "t": BEGAN + event.pop("at"), **event} for event in events
    ]
    given[0].update(supervised=supervised, now=BEGAN + now)
    return [Span(round(s.start, 3), round(s.end, 3), s.state, s.attempt) for s in story_of(given).ranks[0].spans]


def started(at: float, attempt: int = 0) -> dict[str, Any]:
    return {"type": "started", "at": at, "pid": 9, "start": 1, "attempt": attempt, "log": "log/workerlog.0"}


def exited(at: float, code: int = 0, attempt: int = 0, **given: Any) -> dict[str, Any]:
    return {
        "type": "exited",
        "at": at,
        "code": code,
        "signal": 0,
        "stopped": False,
        "note": "",
        "attempt": attempt,
        **given,
    }


@pytest.mark.parametrize(
    "end, state",
    [
        (exited(9.0), "done"),
        (exited(9.0, 3), "failed"),
        (exited(9.0, signal=9), "failed"),
        (exited(9.0, signal=15, stopped=True), "stopped"),
        ({"type": "supervisor-lost", "at": 9.0, "why": "killed"}, "stopped"),
    ],
)
def test_how_a_life_ends(end: dict[str, Any], state: str) -> None:
    assert lives(started(1.0), dict(end)) == [Span(1.0, 9.0, state, 0)]


def test_restarts_are_lives_of_their_own() -> None:
    found = lives(started(1.0), exited(2.0, 1), started(4.0, 1), exited(9.0, attempt=1))
    assert found == [Span(1.0, 2.0, "failed", 0), Span(4.0, 9.0, "done", 1)]


def test_frozen_and_thawed() -> None:
    found = lives(started(1.0), {"type": "frozen", "at": 3.0}, {"type": "thawed", "at": 5.0}, exited(9.0))
    assert found == [Span(1.0, 3.0, "running", 0), Span(3.0, 5.0, "frozen", 0), Span(5.0, 9.0, "done", 0)]


def test_a_command_that_could_not_start() -> None:
    assert lives(exited(1.0, 127)) == [Span(1.0, 1.0, "failed", 0)]


def test_while_it_runs_it_runs_until_now() -> None:
    assert lives(started(1.0), supervised=True, now=50.0) == [Span(1.0, 50.0, "running", 0)]


def test_a_node_that_the_coordinator_gave_up() -> None:
    given = answers(2, 1, crash=False)
    given[0]["events"].append({"type": "lost", "t": BEGAN + 40.0, "node": 1, "why": "no heartbeat"})
    given[1]["supervised"] = False
    spans = story_of(given).ranks[1].spans
    assert [(span.state, round(span.end)) for span in spans] == [("lost", 40)]


def test_blame() -> None:
    story = story_of(answers(2, 2))
    assert story.state == "failed"
    assert story.culprit == ("trainer", 1)
    assert story.last_lines == ["step=1", "last words of 1"]
    assert set(story.victims) == {("trainer", 0), ("trainer", 2), ("trainer", 3)}
    assert {rank.rank: rank.behind for rank in story.ranks if rank.behind} == {
        2: "at step 900 where the median is 1,800"
    }
    assert story.length == pytest.approx(600.5)


def test_use() -> None:
    (first, *_) = story_of(answers(1, 2, length=100.0)).ranks
    assert first.usage.cpu == 50.0
    assert first.usage.memory == 1 << 30  # the kernel's peak is above what any sample had
    assert {round(cores, 6) for _, cores in first.usage.cores} == {0.5}
    node = story_of(answers(1, 2, length=100.0)).nodes[0]
    assert {round(busy, 6) for _, busy in node.busy} == {0.5}
    assert {used for _, used in node.used} == {0.125}


def test_cards() -> None:
    given = answers(1, 1)
    given[0]["cards"] = [{"index": 3, "total": 80e9, "rows": [(BEGAN + 1, 50.0, 4e9), (BEGAN + 2, 100.0, 8e9)]}]
    (card,) = story_of(given).nodes[0].cards
    assert (card.index, card.total, card.busy, card.used) == (
        3,
        80e9,
        [(1.0, 0.5), (2.0, 1.0)],
        [(1.0, 4e9), (2.0, 8e9)],
    )


def test_what_programs_print_is_masked_and_harmless() -> None:
    given = answers(1, 2)
    given[0]["tails"] = [["trainer", rank, "key=hunter2\n\x1b[31mred\u202e\n"] for rank in range(2)]
    given[0]["plan"]["processes"][0]["command"] = "train --key hunter2"
    given[0]["events"][-1]["reason"] = "hunter2 is wrong"
    story = story_of(given, ("hunter2",))
    assert "hunter2" not in repr(story)
    assert "\x1b" not in repr([story.last_lines, story.ranks]).replace("\\x1b", "")
    assert story.last_lines == ["key=***", "\\x1b[31mred\\u202e"]
    assert story.ranks[0].command == "train --key ***"
    assert story.outcome and story.outcome.reason == "*** is wrong"


def test_a_node_that_did_not_answer() -> None:
    given = answers(3, 2)
    del given[1]
    story = story_of(given)
    assert [node.state for node in story.nodes] == ["ended", "unknown", "ended"]
    assert [rank.rank for rank in story.ranks] == [0, 1, 4, 5], (
        "records of an older version name the ranks of their node only"
    )
    story = story_of(given, places=[["trainer", 0, 0, 2, 3]])
    assert [(rank.rank, rank.state) for rank in story.ranks][2:4] == [(2, "unknown"), (3, "unknown")]
    assert (story.ranks[2].how, story.ranks[2].spans, story.ranks[2].recorded) == (
        "last step unknown, last output unknown",
        (),
        False,
    )


def test_a_lost_rank_whose_node_does_not_answer_is_shown_with_what_the_coordinator_knew_of_it() -> None:
    given = answers(3, 1, crash=False)
    del given[2]
    known = [["trainer", 2, None, 54.0, BEGAN + 30.0]]
    given[0]["events"].append({"type": "lost", "t": BEGAN + 40.0, "node": 2, "why": "no heartbeat", "ranks": known})
    story = story_of(given, places=[["trainer", 0, 0, 1, 3]])
    lost = story.ranks[2]
    assert (lost.state, lost.how, lost.output, lost.recorded) == (
        "lost",
        "last step 54, last output +30.00 s",
        30.0,
        False,
    )
    assert [(span.start, span.end, span.state) for span in lost.spans] == [(30.0, 40.0, "lost")]
    assert story.nodes[2].state == "lost"
    assert not lost.behind


def test_a_rank_of_a_node_that_crashed_and_came_back_is_lost_since_its_last_sign() -> None:
    given = answers(2, 1, crash=False)
    given[1].update(supervised=False, heartbeat=None)
    lost = story_of(given).ranks[1]
    assert lost.state == "lost"
    assert [(span.state, round(span.end, 2)) for span in lost.spans] == [("lost", 0.2)]
    given = answers(4, 1, crash=False)
    given[2].update(supervised=False, heartbeat=None)
    assert not any(rank.behind for rank in story_of(given).ranks), (
        "trainer 2 was the slow one; it is lost, and no straggler"
    )


def test_since_when_a_rank_has_printed_nothing() -> None:
    given = answers(1, 2, length=100.0, crash=False)
    given[0]["output"] = [["trainer", 0, None, 8.0, BEGAN + 76.0], ["trainer", 1, None, 300.0, BEGAN + 159.0]]
    ranks = story_of(given).ranks
    assert [rank.output for rank in ranks] == [76.0, 159.0]
    assert [rank.end for rank in ranks] == [160.0, 160.0]


def test_what_happened_in_the_order_of_time() -> None:
    given = answers(2, 1, crash=False)
    given[1]["events"].append({"t": BEGAN + 9.0, "type": "frozen", "role": "trainer", "rank": 1})
    given[1]["events"].append({"t": BEGAN + 12.0, "type": "disk", "full": True, "root": "/home\x1b"})
    given[0]["events"].append({"t": BEGAN + 10.0, "type": "restart", "attempt": 1, "pause": 2.0})
    in_use = {"devices": [0, 3], "used": 12_000_000_000, "seconds": 60.0}
    given[1]["events"].append({"t": BEGAN + 13.0, "type": "memory-in-use", **in_use})
    story = story_of(given)
    assert [(t, story.clean(news_text(news))) for t, news in story.news] == [
        (9.0, "trainer 1 on node1 was stopped by a signal (SIGSTOP)"),
        (10.0, "attempt 1 begins in 2 s"),
        (12.0, "node1: the disk of /home\\x1b is full: what is printed now is lost"),
        (
            13.0,
            "node1: ended processes still use 12.0 GB of its devices: the next ones start when they are free, "
            "after 60 s at the latest",
        ),
    ]


def test_a_clock_that_is_off_is_reported() -> None:
    given = answers(3, 1)
    given[2]["now"] += 90.0
    assert [note for note in story_of(given).notes if "clock of node2 differs by +90 s" in note]
    assert not story_of(answers(3, 1)).notes


def test_progress_in_steps_or_epochs() -> None:
    assert progress_curve([(1.0, 0.0, 5.0), (2.0, 1.0, 9.0)]) == ([(1.0, 5.0), (2.0, 9.0)], "step")
    assert progress_curve([(1.0, 0.0, 5.0), (2.0, 1.0, 0.0)]) == ([(1.0, 0 + 5 / 6), (2.0, 1.0)], "epoch")
    assert progress_curve([(1.0, 0.5, None)]) == ([(1.0, 0.5)], "epoch")
    assert progress_curve([(1.0, None, 5.0), (2.0, None, 1.0)]) == ((), "")
    assert progress_curve([]) == ((), "")


def test_records_of_before_there_was_usage() -> None:
    given = answers(2, 2)
    for answer in given.values():
        answer["machine"] = {"cores": 0, "total": 0, "rows": []}
        for rank in answer["ranks"]:
            rank.update(rows=[], progress=[])
        answer["plan"] = {}
    story = story_of(given)
    assert story.culprit == ("trainer", 1)
    assert story.state == "failed"
