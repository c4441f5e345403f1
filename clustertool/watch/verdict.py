"""The verdict states which processes failed by themselves, those with the same error together."""

from __future__ import annotations

from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Outcome, alike
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState


def errors(status: JobStatus, outcome: Outcome) -> list[list[ProcessStatus]]:
    """List the processes that failed by themselves, those with the same error together, the first failure first.

    Those that failed after another one because its connection was lost are left out.
    """
    culprits = [key for key in outcome.culprits if key not in outcome.followed]
    culprits = culprits if outcome.state is JobState.FAILED else []
    groups = alike(status.processes[key].failure() for key in culprits if key in status.processes)
    return [[status.processes[failure.role, failure.rank] for failure in group] for group in groups]


def culprit(status: JobStatus, outcome: Outcome) -> ProcessStatus | None:
    return status.processes.get(outcome.culprits[0]) if outcome.state is JobState.FAILED and outcome.culprits else None
