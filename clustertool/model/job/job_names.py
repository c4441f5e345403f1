"""A user names a job by its id, the beginning of its id, the id that was asked for, or its name."""

from __future__ import annotations

from typing import Callable, List, Sequence, Tuple, TypeVar

Job = TypeVar("Job")

NEWEST, FRESH = "@newest", "none"  # in place of the job that --resume names


def can_mean(text: str, job: str, asked: str, name: str) -> bool:
    """Check whether `text` is the beginning of the job's id, or a complete name of the job.

    asked: the id of --job-id, name: the job's name, or "".
    """
    return job.startswith(text) or is_named(text, job, asked, name)


def is_named(text: str, job: str, asked: str, name: str) -> bool:
    """Check whether `text` is the job's id, the id that was asked for, or its name. Of several jobs the newest one is meant.

    The first job that --job-id X has started is X-1 too, since X is the newest one of them.
    """
    return text in (job, asked, name) or (bool(asked) and asked == job and text == f"{asked}-1")


def find_meant(text: str, jobs: Sequence[Job], names: Callable[[Job], Tuple[str, str, str]]) -> List[Job]:
    """Select the jobs that `text` means: the first one of which it is a complete name, else all whose ids it begins.

    `jobs`: the newest first. names: id, asked and name of a job.
    """
    named = [job for job in jobs if is_named(text, *names(job))][:1]
    return named or [job for job in jobs if can_mean(text, *names(job))]
