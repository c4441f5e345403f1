"""What each node recorded of a job becomes one entry: running or unknown first, then a verdict, then a lost coordinator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from clustertool.actions.find_jobs import is_certain, merge_answers


def part(node: int, state: str, code: int | None = None, reason: str = "") -> dict[str, Any]:
    return {
        "id": "J",
        "node": node,
        "state": state,
        "code": code,
        "reason": reason,
        "created": 1.0,
        "owner": "ann",
        "mode": "collective",
        "command": "c",
        "nodes": ["n0", "n1", "n2"],
    }


GUESS = part(0, "lost")  # its supervisor is gone, and it recorded no verdict
LEFT = part(1, "lost", 75, "no message from the coordinator")
FAILED = part(2, "failed", 3, "trainer 0 failed")


@pytest.mark.parametrize(
    ("parts", "state", "code"),
    [
        ([GUESS, LEFT], "lost", 75),
        ([GUESS, LEFT, FAILED], "failed", 3),
        ([GUESS], "lost", None),
        ([LEFT, part(2, "running")], "running", None),
        ([FAILED, part(1, "unknown", reason="spec.json is empty")], "unknown", None),
    ],
)
def test_state_code_and_reason_are_of_one_part_in_any_order(
    parts: list[dict[str, Any]], state: str, code: int | None
) -> None:
    for order in itertools.permutations(parts):
        (job,) = merge_answers({at: {"jobs": [one]} for at, one in enumerate(order)})
        assert (job["state"], job["code"]) == (state, code)
        assert job["reason"] in [one["reason"] for one in parts if one["state"] == state]


def test_a_job_lasts_from_the_first_start_to_the_last_end_of_its_nodes() -> None:
    times = [{"started": 12.0, "ended": 30.0}, {"started": 11.0, "ended": 31.0}, {}]
    ended = [part(node, "failed", 3) | one for node, one in enumerate(times)]
    (job,) = merge_answers({at: {"jobs": [one]} for at, one in enumerate(ended)})
    assert (job["started"], job["ended"]) == (11.0, 31.0)
    ended[2]["state"], ended[2]["code"] = "running", None
    (job,) = merge_answers({at: {"jobs": [one]} for at, one in enumerate(ended)})
    assert (job["started"], job["ended"]) == (11.0, None), "one node still runs"


@pytest.mark.parametrize(
    ("id", "asked", "state", "typed", "expected"),
    [
        ("2026-a", "", "succeeded", "2026-a", True),
        ("2026-a", "", "running", "2026", False),
        ("X", "X", "running", "X", True),
        ("X-2", "X", "running", "X", True),
        ("X", "X", "succeeded", "X", False),  # a node that is late may have X-2
        ("X", "X", "running", "", False),
        ("2026-a", "", "running", "", False),
    ],
)
def test_when_a_stop_need_not_wait_for_nodes_that_are_late(
    id: str, asked: str, state: str, typed: str, expected: bool
) -> None:
    (job,) = merge_answers(
        {0: {"jobs": [{**part(0, state, 0 if state == "succeeded" else None), "id": id, "asked": asked}]}}
    )
    assert is_certain(job, typed) is expected
