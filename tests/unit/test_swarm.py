"""Sources: every node is reached from every other in few steps, and none gets more requests than others."""

from __future__ import annotations

import pytest

from clustertool.model.dispatch.topology import bits, degree, numbers, sources


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100, 200])
def test_every_node_is_reached_from_every_other_in_few_steps(count: int) -> None:
    near = {me: sources(count, me)[: degree(count)] for me in range(count)}
    for start in range(count):
        here, steps = {start}, 0
        while len(here) < count:
            here |= {me for me in near if here & set(near[me])}
            steps += 1
            assert steps <= 9, f"a piece at node {start} of {count}"


@pytest.mark.parametrize("count", [8, 16, 64, 200])
def test_no_node_is_the_source_of_many(count: int) -> None:
    asked = [node for me in range(count) for node in sources(count, me)[: degree(count)]]
    assert max(asked.count(node) for node in range(count)) <= degree(count) + 2


@pytest.mark.parametrize("count", range(1, 20))
def test_in_the_end_everybody_may_be_asked(count: int) -> None:
    for me in range(count):
        assert sorted([me, *sources(count, me)]) == list(range(count))


@pytest.mark.parametrize("some", [set(), {0}, {3, 4}, {0, 99}, set(range(100))])
def test_sets_of_numbers_are_written_as_hex(some: set[int]) -> None:
    assert numbers(bits(some), 100) == some


def test_what_is_no_set_is_refused() -> None:
    for wrong in ("x", "", "f" * 40):
        with pytest.raises(ValueError):
            numbers(wrong, 100)
