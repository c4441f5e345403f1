"""Whether the attempts of a job make progress, by the steps that its ranks have printed."""

from __future__ import annotations

import pytest

from clustertool.model.job.job_steps import JobSteps


@pytest.mark.parametrize(
    ("printed", "highest", "steady"),
    [
        ([], None, True),
        ([(None, 5), (None, 5), (None, 7)], (None, 7), True),
        ([(1, 900), (2, 10)], (2, 10), True),
        ([(2, 900), (2, 10)], (2, 900), False),
        ([(None, 900), (None, 10)], (None, 900), False),
        ([(None, 900), (3, 1000)], (3, 1000), True),
        ([(1, 900), (None, 10)], (1, 900), False),
    ],
    ids=["nothing", "steps", "epochs", "back", "bars of epochs", "an epoch is not always printed", "two counters"],
)
def test_the_latest_step_of_an_attempt(
    printed: list[tuple[float | None, float]], highest: tuple[float | None, float] | None, steady: bool
) -> None:
    found = JobSteps().add(printed)
    assert (found.highest, found.steady) == (highest, steady)


def test_steps_of_two_nodes() -> None:
    one, other = (JobSteps().add([(None, step)]) for step in (5, 3))
    assert one.add([other.highest]) == other.add([one.highest]) == one == one.add([None, (2, None)])
    assert not one.add([other.highest], steady=False).steady


def test_failures_in_a_row_without_a_later_step() -> None:
    steps = JobSteps().next_attempt(failed=True)
    assert steps.failures == 0, "no step was read"
    steps = steps.add([(None, 5)]).next_attempt(failed=True)
    assert steps.next_attempt(failed=True).next_attempt(failed=True).failures == 3
    assert steps.next_attempt(failed=True).next_attempt(failed=False).failures == 2, "nodes have changed"
    later = steps.next_attempt(failed=True).add([(None, 6)])
    assert later.failures == 0
    assert later.next_attempt(failed=False).failures == 1
    assert steps.describe() == "1 restart in a row without a later step than step 5"
    assert steps.add([(0.25, 1e6)]).describe().endswith(" step 1000000 of epoch 0.25")
