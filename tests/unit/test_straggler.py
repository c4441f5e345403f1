"""Who is behind, by the rules that the page shows."""

from __future__ import annotations

from clustertool.watch.straggler import RankPace, estimate_step, find_stragglers


def pace(rank: int, speed: float = 2.0, length: float = 100.0, every: float = 2.0, **given: object) -> RankPace:
    """Steps are printed every so often from the start to the end."""
    progress = tuple((t * every, t * every * speed) for t in range(1, int(length / every) + 1))
    values = {
        "role": "trainer",
        "start": 0.0,
        "end": length,
        "progress": progress,
        "unit": "step",
        "cores": 1.0,
        **given,
    }
    return RankPace(rank=rank, **values)  # type: ignore[arg-type]


def names(*paces: RankPace) -> list[int]:
    return sorted(rank for _, rank in find_stragglers(paces))


def test_no_rank_is_behind() -> None:
    assert names(*(pace(rank) for rank in range(4))) == []
    assert names(pace(0)) == []
    assert names() == []


def test_a_slow_rank_is_behind_the_median() -> None:
    found = find_stragglers([pace(0), pace(1), pace(2, speed=1.0), pace(3)])
    assert found == {("trainer", 2): "at step 100 where the median is 200"}


def test_it_is_compared_when_the_first_one_ended() -> None:
    """A rank that crashed early was level with the others then: it is a culprit, no straggler."""
    assert names(pace(0), pace(1, length=50.0), pace(2)) == []
    assert names(pace(0), pace(1, length=50.0), pace(2, speed=1.0)) == [2]


def test_a_rank_that_hangs_is_behind_though_it_was_fast() -> None:
    stuck = pace(1, length=30.0)
    hanging = RankPace("trainer", 1, 0.0, 100.0, stuck.progress, "step", 1.0)
    assert names(pace(0), hanging, pace(2)) == [1]


def test_lines_far_apart_are_not_behind() -> None:
    """Each prints a step every 20 seconds, at other moments: what the last line says is up to 20 s old."""
    early = pace(0, length=100.0, every=20.0)
    late = RankPace(
        "trainer", 1, 0.0, 100.0, tuple((t - 15.0, 2.0 * (t - 15.0)) for t, _ in early.progress), "step", 1.0
    )
    assert names(early, late, pace(2)) == []


def test_a_short_job_is_not_judged_by_a_moment() -> None:
    """20 % behind after 10 s is 2 s: less than a check of the log is apart."""
    assert names(pace(0, length=10.0), pace(1, length=10.0, speed=1.6), pace(2, length=10.0)) == []


def test_cpu_far_below_the_median() -> None:
    quiet = [pace(rank, progress=(), unit="", cores=cores) for rank, cores in enumerate((1.0, 0.3, 0.9))]
    assert find_stragglers(quiet) == {("trainer", 1): "used 0.30 cores where the median is 0.90"}


def test_where_all_are_idle_no_rank_is_marked() -> None:
    assert names(*(pace(rank, progress=(), unit="", cores=cores) for rank, cores in enumerate((0.01, 0.0, 0.01)))) == []


def test_the_one_for_whom_the_others_wait() -> None:
    """In lockstep all are at one step; who works while the others wait is the slow one."""
    found = find_stragglers([pace(0, cores=0.4), pace(1, cores=1.0), pace(2, cores=0.4)])
    assert list(found) == [("trainer", 1)]
    assert "wait for it" in found["trainer", 1]


def test_log_counts_only_without_steps() -> None:
    silent = [pace(rank, progress=(), unit="", log_size=size) for rank, size in enumerate((9000, 9000, 1000))]
    assert names(*silent) == [2]
    assert names(*(pace(rank, log_size=size) for rank, size in enumerate((9000, 9000, 1000)))) == []
    only_first = [pace(rank, progress=(), unit="", log_size=size) for rank, size in enumerate((9000, 0, 0))]
    assert names(*only_first) == []


def test_roles_and_units_are_not_mixed() -> None:
    assert names(pace(0), pace(0, role="heter", speed=1.0), pace(0, role="pserver", cores=0.1)) == []
    epochs = pace(2, speed=0.01, unit="epoch")
    assert names(pace(0), pace(1), epochs) == []


def test_only_printed_steps_are_shown() -> None:
    """A rank printed step 8 and hung. At its pace it would be at step 14 by now; nothing of that is shown."""
    hung = RankPace("trainer", 11, 0.0, 60.0, tuple((2.0 * t, float(t)) for t in range(1, 9)), "step", 1.0)
    others = [pace(rank, speed=1.0, length=60.0, every=7.0) for rank in range(3)]
    assert find_stragglers([*others, hung]) == {("trainer", 11): "at step 8 where the median is 56"}


def test_reached_between_and_after_lines() -> None:
    curve = ((10.0, 100.0), (20.0, 200.0))
    assert estimate_step(curve, 15.0) == 150.0
    assert estimate_step(curve, 20.0) == 200.0
    assert estimate_step(curve, 25.0) == 250.0
    assert estimate_step(curve, 999.0) == 350.0  # a gap and a half, and no further
    assert estimate_step(curve, 5.0) == 0.0
