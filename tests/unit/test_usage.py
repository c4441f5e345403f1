"""Which usage lines stay, and how many become few."""

from __future__ import annotations

import json

import pytest

from clustertool.model.job.usage import fewer, last, lines_to_keep, mean, rates, read_lines

DAY = 86_400.0


def grow(seconds: float, every: float = 2.0, batch: int = 1000) -> list[float]:
    """The times that are in the file after a job of that length, thinned out after each `batch` lines as the recorder does."""
    times: list[float] = []
    fresh = 0
    for n in range(int(seconds / every)):
        times.append(n * every)
        fresh += 1
        if fresh == batch:
            fresh, now = 0, times[-1]
            times = [times[index] for index in lines_to_keep(times, now)]
    return times


@pytest.mark.parametrize("days", [0.1, 1, 5, pytest.param(30, marks=pytest.mark.chaos)])
def test_a_job_without_end_has_a_bounded_file(days: float) -> None:
    times = grow(days * DAY)
    assert len(times) < 6000
    assert times[0] == 0.0
    assert times[-1] > days * DAY - 4.0
    for before, after in zip(times, times[1:]):
        assert after - before <= max(2.1, (times[-1] - before) / 50), "old lines are too far apart"


def test_what_is_new_stays_whole() -> None:
    times = [float(n) for n in range(400)]
    assert lines_to_keep(times, 400.0) == list(range(400))


def test_torn_and_foreign_lines_are_skipped() -> None:
    data = b'{"t":1,"r":[]}\n{"t":2,"r\n[1]\n7\n{"x":3}\n{"t":"?"}\n{"t":4,"r":[]}'
    assert [line["t"] for line in read_lines(data)] == [1, 4]
    assert list(read_lines(json.dumps({"t": 5}).encode())) == [{"t": 5}]


def test_fewer_folds_each_column_its_own_way() -> None:
    rows = [(float(t), float(t), float(t % 10), 1.0) for t in range(101)]
    found = fewer(rows, 10, last, max, mean)
    assert len(found) == 11
    assert found[0] == rows[0]
    assert found[-1] == (100.0, 100.0, 9.0, 1.0)
    assert [row[2] for row in found[1:]] == [9.0] * 10
    assert all(a[0] < b[0] for a, b in zip(found, found[1:]))


@pytest.mark.parametrize("count", [0, 1, 2, 11])
def test_few_rows_stay_as_they_are(count: int) -> None:
    rows = [(float(t), 1.0) for t in range(count)]
    assert fewer(rows, 10, last) == rows


def test_rows_of_one_moment_are_one() -> None:
    assert fewer([(1.0, float(n)) for n in range(20)], 5, last) == [(1.0, 0.0), (1.0, 19.0)]


def test_rates_are_exact_whatever_was_thinned_out() -> None:
    rows = [(float(t), t * 0.5) for t in range(100)]
    assert {rate for _, rate in rates(fewer(rows, 7, last))} == {0.5}


def test_a_sum_that_fell_begins_anew() -> None:
    assert rates([(0.0, 5.0), (1.0, 6.0), (2.0, 0.5), (2.0, 0.5), (3.0, 1.5)]) == [(1.0, 1.0), (2.0, 0.0), (3.0, 1.0)]
