"""A program's speed, read from the lines it prints."""

from __future__ import annotations

import pytest

from clustertool.model.job.progress import StepRate


def speed(*lines: tuple[float, int], now: float | None = None) -> float | None:
    rate = StepRate()
    for t, step in lines:
        rate.feed(step, t)
    return rate.compute(lines[-1][0] if now is None else now)


def test_rate() -> None:
    assert speed((0.0, 10)) is None
    assert speed((0.0, 10), (1.0, 10)) is None
    assert speed((0.0, 10), (2.0, 30)) == pytest.approx(10.0)
    assert speed((0.0, 10), (2.0, 30), (4.0, 30), now=4.0) == pytest.approx(
        10.0
    )  # between two lines nothing has changed


def test_a_program_that_stands_still_gets_slower() -> None:
    assert speed((0.0, 10), (2.0, 30), now=18.0) == pytest.approx(20 / 18)


def test_a_program_that_hangs_has_the_speed_0() -> None:
    assert speed((0.0, 10), (2.0, 30), now=33.0) == 0.0
    assert speed((0.0, 10), (60.0, 11), now=140.0), "a step a minute may take a while"


def test_only_the_last_half_minute_counts() -> None:
    slow = [(float(t), t) for t in range(60)]
    fast = [(60.0 + t, 60 + 10 * t) for t in range(1, 41)]
    found = speed(*slow, *fast)
    assert found == pytest.approx(10.0, rel=0.02)


def test_another_epoch_begins_anew() -> None:
    assert speed((0.0, 900), (1.0, 1000), (2.0, 1)) is None
    assert speed((0.0, 900), (1.0, 1000), (2.0, 1), (3.0, 6)) == pytest.approx(5.0)
