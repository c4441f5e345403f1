"""What engines with a queue have in common in a run request: refused options, typed settings, the command for lists of jobs."""

from __future__ import annotations

import shlex

from clustertool.engines.job_request import RunRequest
from clustertool.errors import UsageError
from clustertool.model.config.job import JobSpec
from clustertool.model.job.job_names import FRESH

USUAL = ("python3", "-u", "train.py")  # what trainers run where no command is given
_COMMAND = 200  # characters of a command that are shown


def refuse_options(request: RunRequest) -> None:
    """Raises UsageError for options that have no meaning for a job that waits in a queue."""
    wish = request.wish
    options = (("--resume", wish.resume not in ("", FRESH)), ("--wait", wish.wait), ("--skip-bad", wish.skip_bad))
    for option, given in options:
        if given:
            raise UsageError(f"{option} is not possible with the engine {request.cluster.engine}", "leave it out")


def refuse_lease(spec: JobSpec, fix: str) -> None:
    """Raises UsageError for --lease. fix: what limits a job in its place."""
    if spec.policy.lease:
        raise UsageError("--lease needs a command that follows the job, and a queued job starts without one", fix)


def typed_settings(request: RunRequest) -> dict[str, object]:
    """The settings of the command line, by their names in the settings."""
    typed = dict(request.wish.settings)
    if request.options.nnodes:
        typed["nodes"] = request.options.nnodes
    return typed


def shown_command(spec: JobSpec) -> str:
    """The trainers' command in lists of jobs, cut."""
    return shlex.join(spec.trainer.command or USUAL)[:_COMMAND]
