"""When the coordinator has the ranks of a job sampled, and what it makes of the answers."""

from __future__ import annotations

from clustertool.model.job.hang import MOVES, WAITS, RankTrace
from clustertool.node.supervisor.coordinator.hang_watch import HangWatch


def a_trace(rank: int, doing: str = WAITS, stack: str = "a") -> RankTrace:
    return RankTrace("trainer", rank, doing, "", stack, "wait (train.py:1)")


def quiet(watch: HangWatch, now: float, *seconds: float) -> None:
    for node, since in enumerate(seconds):
        watch.note_quiet(node, since, now)


def answered(watch: HangWatch, now: float, *doing: str) -> object:
    """What the watch finds when the nodes have answered with one rank each."""
    for node, what in enumerate(doing):
        assert watch.turn(now, frozenset()) == (False, None)
        watch.note_traces(node, watch.number, [a_trace(node, what, f"place {node > 0}")])
    return watch.turn(now, frozenset())[1]


def test_a_hang_is_found_once() -> None:
    watch = HangWatch(60.0, {0, 1, 2}, {0, 1, 2})
    quiet(watch, 100.0, 50.0, 70.0, 90.0)
    assert watch.turn(109.0, frozenset()) == (False, None), "node 0 has been quiet for 59 s"
    assert watch.turn(110.0, frozenset()) == (True, None)
    found = answered(watch, 112.0, WAITS, WAITS, WAITS)
    assert found is not None and [one.rank for one in found.hang.named] == [0]  # type: ignore[attr-defined]
    assert found.quiet == {0: 62.0, 1: 82.0, 2: 102.0}  # type: ignore[attr-defined]
    assert watch.turn(1000.0, frozenset()) == (False, None), "it is said once"
    quiet(watch, 1000.0, 0.0)
    assert watch.turn(1059.0, frozenset())[0] is False
    assert watch.turn(1060.0, frozenset())[0] is True


def test_ranks_that_move_are_sampled_again_later() -> None:
    watch = HangWatch(60.0, {0, 1}, {0, 1})
    quiet(watch, 0.0, 0.0, 0.0)
    assert watch.turn(60.0, frozenset())[0]
    assert answered(watch, 63.0, MOVES, WAITS) is None
    quiet(watch, 100.0, 100.4, 99.6)
    assert not watch.turn(119.0, frozenset())[0] and watch.turn(120.1, frozenset())[0]
    assert watch.number == 2


def test_nodes_that_do_not_answer() -> None:
    """Without the samples of all there is no verdict; lost nodes are not waited for."""
    watch = HangWatch(60.0, {0, 1}, {0, 1})
    quiet(watch, 0.0, 0.0, 0.0)
    assert watch.turn(60.0, frozenset())[0]
    watch.note_traces(0, 1, [a_trace(0)])
    watch.note_traces(1, 0, [a_trace(1)])
    assert watch.turn(74.0, frozenset()) == (False, None)
    assert watch.turn(75.0, frozenset()) == (False, None), "it gives up"
    assert watch.turn(121.0, frozenset())[0], "and tries again"
    watch.note_traces(0, 2, [a_trace(0)])
    watch.note_traces(0, 2, [a_trace(0, MOVES)])
    assert watch.turn(122.0, frozenset({1}))[1] is None, "one that is lost ends the job"


def test_nothing_before_all_nodes_have_reported() -> None:
    watch = HangWatch(60.0, {0, 1}, {0, 1})
    quiet(watch, 0.0, 0.0)
    assert watch.turn(1000.0, frozenset()) == (False, None)
    quiet(watch, 1000.0, 900.0, 900.0)
    assert watch.turn(1000.0, frozenset())[0]
    watch.begin()
    assert watch.turn(1000.0, frozenset()) == (False, None)
