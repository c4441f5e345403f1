"""The places of all ranks survive their packing in a job of any shape; no row makes more ranks than a job can have."""

from __future__ import annotations

import random
from typing import Any

import pytest

from clustertool.model.job.rank_places import pack, unpack

SHAPES = {
    "equal nodes": [("trainer", rank, rank // 8) for rank in range(8000)],
    "nodes of different sizes": [
        ("trainer", rank, node) for rank, node in enumerate([0] * 4 + [1] + [2] * 4 + [3] * 4)
    ],
    "an order of its own": [("trainer", rank, node) for rank, node in enumerate([3, 0, 0, 2, 1, 3])],
    "several roles": [
        ("pserver", 0, 1),
        ("pserver", 1, 0),
        *(("trainer", rank, rank) for rank in range(3)),
        ("heter", 0, 2),
    ],
    "none": [],
}


@pytest.mark.parametrize("name", SHAPES)
def test_round_trip(name: str) -> None:
    places = list(SHAPES[name])
    random.Random(1).shuffle(places)
    assert sorted(unpack(pack(places), 1000)) == sorted(places)


def test_a_job_of_1000_equal_nodes_is_one_row() -> None:
    assert pack(SHAPES["equal nodes"]) == [("trainer", 0, 0, 8, 1000)]


@pytest.mark.parametrize(
    "row",
    [
        ["trainer", 0, 0, 1 << 40, 1 << 40],
        ["trainer", 0, 0, 100_001, 1],
        ["trainer", -1, 0, 1, 1],
        ["trainer", 0, -1, 1, 1],
        ["trainer", 0, 0, -1, -1],
        ["trainer", 0, 0, 0, 1],
        ["trainer", 0, 3, 1, 2],
        ["nurse", 0, 0, 1, 1],
    ],
)
def test_what_no_job_can_have_is_left_out(row: list[Any]) -> None:
    assert list(unpack([["trainer", 0, 0, 1, 1], row, ["trainer", 5, 0, 1, 1]], 4)) == [("trainer", 0, 0)]
