"""What each node recorded of a job becomes one entry: running or unknown first, then a verdict, then a lost coordinator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from clustertool.verbs.jobs import merged


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
        (job,) = merged({at: {"jobs": [one]} for at, one in enumerate(order)})
        assert (job["state"], job["code"]) == (state, code)
        assert job["reason"] in [one["reason"] for one in parts if one["state"] == state]
