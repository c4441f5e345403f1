"""Pieces of several nodes come out in the order of their times, with one piece a node in memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

from clustertool.watch.lines import merge_by_time


def log(node: int, t: float | None, text: str = "") -> tuple[int, dict[str, Any], bytes]:
    header: dict[str, Any] = {"type": "log"}
    if t is not None:
        header["t"] = t
    return node, header, text.encode()


def run(lanes: dict[int, list[Any]]) -> list[Any]:
    lanes = {node: [*frames, (node, {"type": "end"}, b"")] for node, frames in lanes.items()}
    readers = {node: iter(frames) for node, frames in lanes.items()}
    return [frame for frame in merge_by_time(lanes, lambda node: next(readers[node])) if frame[1]["type"] == "log"]


def test_every_interleaving_of_sorted_lanes_is_sorted() -> None:
    for seed in range(50):
        dice = random.Random(seed)
        lanes = {node: [log(node, t) for t in sorted(dice.random() for _ in range(20))] for node in range(5)}
        times = [header["t"] for _, header, _ in run(lanes)]
        assert times == sorted(times)
        assert len(times) == 100


def test_nothing_is_lost_and_a_nodes_own_order_stays() -> None:
    lanes = {0: [log(0, 5.0, "a"), log(0, 1.0, "b"), log(0, None, "c")], 1: [log(1, 2.0, "d"), log(1, None, "e")]}
    output = [payload.decode() for _, _, payload in run(lanes)]
    assert sorted(output) == list("abcde")
    assert [s for s in output if s in "abc"] == list("abc")
    assert output.index("d") < output.index("a")


def test_a_heartbeat_has_a_time_and_it_is_no_logs() -> None:
    lanes = {0: [(0, {"type": "beat", "t": 1e9}, b""), log(0, 1.0, "x")], 1: [log(1, 2.0, "y")]}
    assert [payload for _, _, payload in run(lanes)] == [b"x", b"y"]


def test_one_frame_a_node_is_asked_for_ahead() -> None:
    asked: list[int] = []
    endless = {node: itertools.count() for node in range(3)}

    def following(node: int) -> Any:
        asked.append(node)
        return log(node, float(next(endless[node])))

    frames = merge_by_time(range(3), following)
    for _ in range(30):
        next(frames)
    assert len(asked) <= 30 + 3
