"""The verdict states which processes failed by themselves, what survived, and the error with the exit code."""

from __future__ import annotations

from typing import Any

from clustertool.errors import ClustertoolError, Interrupted, JobFailed, NodeLost, Survivors, Terminated, TimedOut
from clustertool.model.job.outcome import Failure, Key, Outcome, same_error
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.watch.waits import advice, blocked, coordinator_lost

_REASONS = 3  # different ones why nodes have no connection


def errors(status: JobStatus, outcome: Outcome) -> list[list[ProcessStatus]]:
    """The processes that failed by themselves, those with the same error together, the first failure first."""
    found: dict[Any, list[ProcessStatus]] = {}
    for process in filter(
        None, map(status.processes.get, outcome.culprits if outcome.state is JobState.FAILED else ())
    ):
        failure = Failure(
            process.role,
            process.rank,
            "",
            process.code or 0,
            process.signal,
            process.note,
            process.error,
            process.attempt,
        )
        found.setdefault(same_error(failure), []).append(process)
    return list(found.values())


def culprit(status: JobStatus, outcome: Outcome) -> ProcessStatus | None:
    key: Key | None = outcome.culprits[0] if outcome.state is JobState.FAILED and outcome.culprits else None
    return status.processes.get(key) if key else None


def survivors(status: JobStatus) -> dict[str, list[str]]:
    """Node name -> what still lived after the stop."""
    return {node.name or f"node {node.index}": node.survivors for node in status.nodes.values() if node.survivors}


def error_of(status: JobStatus) -> ClustertoolError | None:
    """None for success, else the error with the exit code of the contract."""
    left = survivors(status)
    if left:
        what = "; ".join(f"{name}: {', '.join(found)}" for name, found in left.items())
        return Survivors(f"processes survived the stop: {what}", "check them on the node; inv stop --force tries again")
    outcome = status.outcome
    if outcome is None:
        return NodeLost(
            "the job ended without a verdict: its lead is gone", "inv status and inv logs show what the nodes recorded"
        )
    if outcome.state is JobState.SUCCEEDED:
        return None
    if outcome.state is JobState.FAILED:
        return JobFailed(outcome.reason, outcome.code)
    if outcome.state is JobState.STOPPED:
        return _stopped(outcome)
    reasons = [coordinator_lost(status), outcome.reason, *blocked(status)[:_REASONS]]
    what, fix = "; ".join(filter(None, reasons)), advice(status)
    if outcome.state is JobState.TIMEOUT:
        error: ClustertoolError = TimedOut(what, fix)
    else:
        error = NodeLost(what, fix or "check that machine; the job has ended on the others")
    error.brief = reasons[0] or outcome.brief
    return error


def _stopped(outcome: Outcome) -> ClustertoolError:
    kinds: dict[int, type[ClustertoolError]] = {130: Interrupted, 143: Terminated}
    if outcome.code in kinds:
        return kinds[outcome.code](outcome.reason)
    error = Terminated(outcome.reason)
    error.code = outcome.code or 143
    return error
