"""The limits of time of a job: each one asks for one stop."""

from __future__ import annotations

from clustertool.model.job.state_names import JobState
from clustertool.node.supervisor.coordinator.coordinator_server import JobLimits


def none() -> str:
    return ""


def test_a_job_without_limits_has_no_end() -> None:
    assert list(JobLimits(0.0, 0.0, 100.0).stops_due(1e9, none)) == []


def test_the_time_limit_passes_once_and_names_what_the_job_waits_for() -> None:
    limits = JobLimits(60.0, 0.0, 100.0)
    assert list(limits.stops_due(160.0, none)) == []
    (stop,) = limits.stops_due(160.1, lambda: "node1")
    assert (stop.code, stop.kind) == (124, JobState.TIMEOUT)
    assert stop.by == "the job exceeded its time limit (--timeout 60 s); it waited for node1"
    assert stop.brief == "the job exceeded its time limit (--timeout 60 s)"
    assert list(limits.stops_due(1e9, none)) == []


def test_the_lease_begins_again_with_each_laptop() -> None:
    limits = JobLimits(0.0, 30.0, 100.0)
    limits.attached(120.0)
    assert list(limits.stops_due(149.0, none)) == []
    (stop,) = limits.stops_due(151.0, none)
    assert (stop.code, stop.by) == (143, "no laptop was attached for 31 s (--lease)")
    limits.attached(152.0)
    assert list(limits.stops_due(1e9, none)) == []


def test_both_limits_may_pass_at_once() -> None:
    assert [stop.code for stop in JobLimits(10.0, 5.0, 0.0).stops_due(20.0, none)] == [124, 143]
