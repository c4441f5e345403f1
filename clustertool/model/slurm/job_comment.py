"""The comment of a Slurm job, or the name of a step, states which job of the tool it runs."""

from __future__ import annotations

from typing import Tuple

from clustertool.model.paths import is_job_id

_MARK = "clustertool "  # before the job id


def comment(job_id: str, root_dir: str = "") -> str:
    """Write the comment of the Slurm job of a job. root_dir: of a job that is submitted by hand."""
    return _MARK + job_id + f" {root_dir}" * bool(root_dir)


def job_of_comment(text: str) -> str:
    """Read the id of the job with this comment, "" if another program or the user has written it."""
    return _of_comment(text)[0]


def by_hand(text: str, root_dir: str) -> bool:
    """Check whether the comment is that of a job that was submitted by hand, with its records below root_dir."""
    return _of_comment(text)[1] == root_dir


def _of_comment(text: str) -> Tuple[str, str]:
    """Read the id of a job, and its ROOT_DIR where the comment has it."""
    job, _, root_dir = text[len(_MARK) :].partition(" ") if text.startswith(_MARK) else ("", "", "")
    return (job, root_dir) if is_job_id(job) else ("", "")
