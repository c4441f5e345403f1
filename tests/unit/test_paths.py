"""Paths on a node are the contract's: users and their scripts know them by heart."""

from __future__ import annotations

import pytest

from clustertool.model.paths import JobPaths, base, releases

PATHS = JobPaths("/jobs", "x")


@pytest.mark.parametrize(
    "role, rank, attempt, path",
    [
        ("trainer", 3, 0, "log/workerlog.3"),
        ("pserver", 0, 0, "log/serverlog.0"),
        ("heter", 1, 0, "log/heterlog.1"),
        ("trainer", 3, 2, "log/attempt2/workerlog.3"),
        ("pserver", 0, 1, "log/attempt1/serverlog.0"),
    ],
)
def test_logs(role: str, rank: int, attempt: int, path: str) -> None:
    assert JobPaths.log(role, rank, attempt) == path


def test_the_first_log_of_a_role_has_its_old_name() -> None:
    assert [JobPaths.first_log(role) for role in ("trainer", "pserver")] == ["log/train.log", "log/server.log"]


def test_a_jobs_directory() -> None:
    assert (PATHS.dir, PATHS.of("log", "a")) == ("/jobs/JOBx", "/jobs/JOBx/log/a")


def test_the_job_in_a_directory() -> None:
    placed = JobPaths.at("/jobs/node3/JOBa-1")
    assert (placed.base, placed.job, placed.dir) == ("/jobs/node3", "a-1", "/jobs/node3/JOBa-1")


def test_what_is_ours_lies_in_one_folder() -> None:
    ours = [
        PATHS.events,
        PATHS.spec,
        PATHS.seen,
        PATHS.growth,
        PATHS.control,
        PATHS.shards("trainer", 1),
        PATHS.shards("pserver", 1),
    ]
    assert all(path.startswith("/jobs/JOBx/.clustertool/") for path in ours)
    assert len(set(ours)) == len(ours)


def test_nodes_that_share_their_root_have_folders_of_their_own() -> None:
    assert (base("/jobs", 3, False), base("/jobs", 3, True)) == ("/jobs", "/jobs/node3")
    assert releases("/jobs") == "/jobs/.clustertool/releases"
