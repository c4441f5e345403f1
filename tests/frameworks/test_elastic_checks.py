"""The checks of elastic trainings refuse what they are there to find: two epochs that live at once, and lost steps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.frameworks.elastic_training import LATE, STEPS, ElasticTraining, Epoch, Life


class Written(ElasticTraining):
    """Ranks that have written these lives. `epochs`: through the data, at the end."""

    def __init__(self, *lives: Life, epochs: int = 2) -> None:
        self.epochs = epochs
        self._lives = lives

    def lives(self) -> dict[tuple[str, int], Epoch]:
        keys = sorted({(life.job, life.attempt) for life in self._lives})
        return {key: Epoch(tuple(life for life in self._lives if (life.job, life.attempt) == key)) for key in keys}


def life(attempt: int, node: int, began: float, end: float, first: int = 1, last: int = STEPS * 2) -> Life:
    """It lived from `began` to `end`, and made these steps, all at its end."""
    steps = tuple((end, number) for number in range(first, last + 1))
    return Life("job", attempt, node, node, 2, began, (began, end), steps)


ONE_AFTER_THE_OTHER = (life(0, 0, 10, 20), life(0, 1, 10, 19), life(1, 1, 20.1, 30))


def test_epochs_that_follow_each_other_pass() -> None:
    Written(*ONE_AFTER_THE_OTHER).check_lives({})


@pytest.mark.parametrize("end", [20.2, 35.0], ids=["a little", "to the end"])
def test_a_rank_that_lives_into_the_next_epoch_is_found(end: float) -> None:
    lives = Written(life(0, 0, 10, end), *ONE_AFTER_THE_OTHER[1:])
    with pytest.raises(AssertionError, match=re.escape("('job', 0), node 0, and ('job', 1), node 1, lived")):
        lives.check_lives({})


@pytest.mark.parametrize("began", [10, 15])
def test_two_halves_are_found(began: float) -> None:
    with pytest.raises(AssertionError, match="at the same time"):
        Written(life(1, 0, 10, 20), life(2, 1, began, 20)).check_lives({})


def test_a_rank_that_begins_after_a_later_epoch_is_found() -> None:
    with pytest.raises(AssertionError, match="at the same time"):
        Written(life(0, 0, 10, 11), life(0, 1, 30, 35), life(1, 0, 20, 40)).check_lives({})


THAWED = 40.0  # when a machine goes on that was frozen


def thawed(late: float) -> Written:
    """A rank of the first epoch lives for so many seconds after that."""
    old = life(0, 0, 10, 19)._replace(lived=(10, 19, THAWED + late))
    return Written(old, *ONE_AFTER_THE_OTHER[1:])


def test_a_machine_that_was_frozen_has_half_a_second() -> None:
    thawed(LATE - 0.1).check_lives({0: THAWED})
    with pytest.raises(AssertionError, match="after the machine went on"):
        thawed(LATE + 0.1).check_lives({0: THAWED})


@pytest.mark.parametrize(
    ("lives", "text"),
    [
        ((life(0, 0, 0, 1, 1, STEPS), life(1, 0, 2, 3, 1, STEPS * 2)), "begins with 1"),
        ((life(0, 0, 0, 1, 1, STEPS * 2), life(1, 0, 2, 3, STEPS * 3 + 1, STEPS * 4)), "begins with 37"),
        ((life(0, 0, 0, 1, 1, STEPS + 4), life(1, 0, 2, 3, STEPS + 3, STEPS * 2)), f"begins with {STEPS + 3}"),
    ],
    ids=["from zero", "steps are missing", "not at a checkpoint"],
)
def test_an_epoch_goes_on_after_the_newest_checkpoint(lives: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        Written(*lives).check_steps()


def test_the_last_step_is_reached() -> None:
    Written(life(0, 0, 0, 1), epochs=2).check_steps()
    with pytest.raises(AssertionError):
        Written(life(0, 0, 0, 1), epochs=3).check_steps()
