"""The verdict on a job without progress, from samples of its ranks: which rank does not go on, or that it may go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

import pytest

from clustertool.model.job.hang import DEBUGGED, MOVES, RUNS, WAITS, Hang, describe, judge, trace
from clustertool.model.job.stacks import Frame, ProcessSample, ThreadStack

TRAIN, LIBRARY = "/w/train.py", "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
Place = Union[tuple[str, int], str]
ALL_REDUCE, NEXT_BATCH, BARRIER = ("all_reduce", 88), ("next_batch", 41), ("barrier", 90)


def sample(rank: int, place: Place = ALL_REDUCE, **given: Any) -> ProcessSample:
    """A rank, or a child of it, at a moment: in a library's function that a line of train.py calls, or in the debugger."""
    if isinstance(place, str):
        frames = (Frame("interaction", place, 300), Frame("step", TRAIN, 5))
    else:
        frames = (Frame("wait", LIBRARY, 2900), Frame(place[0], LIBRARY, 2700), Frame("step", TRAIN, place[1]))
    values = {"role": "trainer", "pid": 100 + rank, "child": False, "command": "python3", "folder": "/w", "state": "S"}
    threads = (ThreadStack("", frames, 1),)
    return ProcessSample(**{**values, "note": "", "threads": threads, "rank": rank, **given})


def rounds(*ranks: Callable[[int], Sequence[ProcessSample]]) -> list[list[ProcessSample]]:
    """Three rounds of samples, from a function of each rank that gets the number of the round."""
    return [[one for rank in ranks for one in rank(number)] for number in range(3)]


def verdict(*ranks: Callable[[int], Sequence[ProcessSample]], again: bool = False) -> str:
    found = judge(trace(rounds(*ranks), 2.0), again)
    nodes = {("trainer", number): f"node{number}" for number in range(len(ranks))}
    return describe(found, nodes, {("trainer", 1): "14:02"}) if found else ""


def waits(rank: int, place: Place = ALL_REDUCE, **given: Any) -> Callable[[int], Sequence[ProcessSample]]:
    return lambda number: [sample(rank, place, **given)]


def moves(rank: int) -> Callable[[int], Sequence[ProcessSample]]:
    return lambda number: [sample(rank, ("evaluate", 10 + number))]


def runs(rank: int, place: Place = ("matmul", 7)) -> Callable[[int], Sequence[ProcessSample]]:
    return lambda number: [sample(rank, place, cpu=1.9 * number, state="R")]


def with_child(rank: int, *children: ProcessSample) -> Callable[[int], Sequence[ProcessSample]]:
    """A rank that waits for its next batch. children: the loader's process in each round."""
    return lambda number: [sample(rank, NEXT_BATCH), children[min(number, len(children) - 1)]]


def loader(rank: int, **given: Any) -> ProcessSample:
    return sample(rank, ("get", 60), child=True, pid=200 + rank, command="pt_data_worker", **given)


STOPPED = "stopped by a signal (SIGSTOP)"
CASES = {
    "another collective": (
        [waits(0), waits(1, BARRIER), waits(2)],
        "2 of 3 ranks wait in all_reduce (train.py:88); trainer 1 on node1 is in barrier (train.py:90) since 14:02",
    ),
    "a loader's process that waits, too": (
        [waits(0), with_child(1, loader(1)), waits(2)],
        "2 of 3 ranks wait in all_reduce (train.py:88); trainer 1 on node1 is in next_batch (train.py:41) since 14:02",
    ),
    "a loader's process that has ended": (
        [waits(0), with_child(1, loader(1, state="Z", threads=(), note="has ended, and was not waited for")), waits(2)],
        "2 of 3 ranks wait in all_reduce (train.py:88); trainer 1 on node1: process 201 (pt_data_worker) has ended, "
        "and was not waited for since 14:02",
    ),
    "SIGSTOP": (
        [waits(0), waits(1, state="T", threads=(), note=STOPPED), waits(2)],
        f"2 of 3 ranks wait in all_reduce (train.py:88); trainer 1 on node1: {STOPPED} since 14:02",
    ),
    "a rank that swaps": (
        [waits(0), waits(1, threads=(), note="swaps: most of its memory is not in RAM"), waits(2)],
        "2 of 3 ranks wait in all_reduce (train.py:88); trainer 1 on node1: swaps: most of its memory is not in RAM "
        "since 14:02",
    ),
    "all for one that is none of them": (
        [waits(0), waits(1), waits(2)],
        "all 3 ranks wait in all_reduce (train.py:88)",
    ),
    "two, each elsewhere": (
        [waits(0), waits(1, BARRIER)],
        "trainer 0 on node0 is in all_reduce (train.py:88), trainer 1 on node1 is in barrier (train.py:90) since 14:02",
    ),
    "a rank alone": ([waits(0, ("acquire", 12))], "trainer 0 on node0 waits in acquire (train.py:12)"),
    "a loop in C at first": ([waits(0), runs(1), waits(2)], ""),
    "evaluation of all": ([moves(0), moves(1)], ""),
    "compilation of all": ([runs(0), runs(1)], ""),
    "evaluation of rank 0": ([moves(0), waits(1), waits(2)], ""),
    "most compute": ([runs(0), runs(1), waits(2)], ""),
    "a slow disk": ([waits(0), lambda n: [sample(1, NEXT_BATCH, io=n << 20)]], ""),
    "a child that computes": ([waits(0), with_child(1, loader(1), loader(1, cpu=1.0), loader(1, cpu=2.0))], ""),
    "a child that was started meanwhile": ([waits(0), with_child(1, loader(1), loader(1)._replace(pid=300))], ""),
    "a disk that answers late": ([waits(0), lambda n: [sample(1, NEXT_BATCH, state="DDS"[n])]], None),
    "a breakpoint": ([waits(0), waits(1, "/v/lib/python3.11/pdb.py")], ""),
}


@pytest.mark.parametrize("case", list(CASES))
def test_verdict(case: str) -> None:
    ranks, expected = CASES[case]
    found = verdict(*ranks)
    if expected is None:
        assert "blocked" not in found
    else:
        assert found == expected


def test_a_loop_in_c_after_twice_the_time() -> None:
    assert verdict(waits(0), runs(1), waits(2), again=True) == (
        "2 of 3 ranks wait in all_reduce (train.py:88); trainer 1 on node1 runs in matmul (train.py:7) without progress "
        "since 14:02"
    )
    assert not verdict(runs(0), runs(1), waits(2), again=True)


def test_what_ranks_do() -> None:
    ranks = (waits(0), moves(1), runs(2), waits(3, "/v/lib/python3.11/pdb.py"))
    assert [one.doing for one in trace(rounds(*ranks), 2.0)] == [WAITS, MOVES, RUNS, DEBUGGED]


def test_many_ranks_are_not_listed() -> None:
    ranks = [waits(n, BARRIER if n < 5 else ALL_REDUCE) for n in range(32)]
    text = verdict(*ranks)
    assert text.startswith("27 of 32 ranks wait in all_reduce (train.py:88); trainer 0 on node0 is in barrier")
    assert text.endswith(", 2 more") and text.count(" is in ") == 3


def test_a_rank_that_was_not_sampled_each_time_is_left_out() -> None:
    found = trace([[sample(0)], [sample(0), sample(1)]], 2.0)
    assert [one.rank for one in found] == [0] and trace([], 2.0) == []
    assert judge([], True) is None


def test_pservers_are_named_for_their_causes_and_where_all_wait() -> None:
    pserver = {"role": "pserver", "pid": 7}
    healthy = lambda n: [sample(0, ("serve", 3), **pserver)]  # noqa: E731
    text = verdict(waits(0), waits(1), healthy)
    assert text.startswith("all 2 ranks wait") and "; pserver 0 is in serve" in text
    stopped = lambda n: [sample(0, state="T", note=STOPPED, threads=(), **pserver)]  # noqa: E731
    found = judge(trace(rounds(waits(0), stopped), 2.0), False)
    assert isinstance(found, Hang) and [one.role for one in found.named] == ["pserver"]
