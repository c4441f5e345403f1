"""The verdict states which processes failed by themselves, which were stopped, and the error with the exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from clustertool.errors import ClustertoolError, Interrupted, JobFailed, NodeLost, Survivors, Terminated, TimedOut
from clustertool.model.job.events import JobStatus, ProcessStatus
from clustertool.model.job.outcome import Failure, Key, Outcome, same_error
from clustertool.model.roles import ROLES, word
from clustertool.watch.waits import advice, blocked, coordinator_lost

_REASONS = 3  # different ones why nodes have no connection


def abort_line(status: JobStatus, outcome: Outcome) -> str:
    """The line that fleetrun users grep for."""
    if not outcome.culprits:
        return ""
    role = outcome.culprits[0][0]
    ranks = sorted(rank for name, rank in outcome.culprits if name == role)
    total, name = len(status.of(role)), word(role)
    return (
        f"ABORT!!! Out of all {total} {name}s, the {name} process with rank=[{','.join(map(str, ranks))}] was aborted. "
        "Please check its log."
    )


def victims_line(status: JobStatus, outcome: Outcome) -> str:
    """Victims by role and rank, apart from the culprits."""
    if not outcome.victims or outcome.state not in ("failed", "lost"):
        return ""
    parts = []
    for role in ROLES:
        ranks = sorted(rank for name, rank in outcome.victims if name == role)
        if ranks:
            parts.append(f"{word(role)} {ranges(ranks)}")
    return "stopped because of it (victims): " + "; ".join(parts)


def ranges(numbers: Iterable[int]) -> str:
    """0-3,7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def errors(status: JobStatus, outcome: Outcome) -> list[list[ProcessStatus]]:
    """The processes that failed by themselves, those with the same error together, the first failure first."""
    found: dict[Any, list[ProcessStatus]] = {}
    for process in filter(None, map(status.processes.get, outcome.culprits if outcome.state == "failed" else ())):
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


def brief(status: JobStatus, outcome: Outcome) -> str:
    """The failed processes without the error, which was printed before; "" for an outcome that has no such form."""
    if outcome.state == "lost":
        return outcome.reason.partition(": ")[0]
    guilty = culprit(status, outcome)
    if guilty is None:
        return ""
    first = f"{word(guilty.role)} {guilty.rank} on {status.nodes[guilty.node].name or f'node {guilty.node}'}"
    if len(outcome.culprits) == 1:
        return f"{first} failed"
    roles = [role for role, _ in outcome.culprits]
    counts = ", ".join(
        f"{roles.count(role)} {word(role)}{'s' * (roles.count(role) > 1)}" for role in dict.fromkeys(roles)
    )
    same = " with the same error" if len(errors(status, outcome)) == 1 else ""
    return f"{counts} failed{same}, first {first}"


def culprit(status: JobStatus, outcome: Outcome) -> ProcessStatus | None:
    key: Key | None = outcome.culprits[0] if outcome.state == "failed" and outcome.culprits else None
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
    if outcome.state == "succeeded":
        return None
    if outcome.state == "failed":
        return JobFailed(outcome.reason, outcome.code)
    if outcome.state == "stopped":
        return _stopped(outcome)
    reasons = [coordinator_lost(status), outcome.reason, *blocked(status)[:_REASONS]]
    what, fix = "; ".join(filter(None, reasons)), advice(status)
    if outcome.state == "timeout":
        error: ClustertoolError = TimedOut(what, fix)
    else:
        error = NodeLost(what, fix or "check that machine; the job has ended on the others")
    ends = r";" if outcome.state == "timeout" else r"[:;(]"
    error.brief = re.split(ends, reasons[0] or outcome.reason, maxsplit=1)[0].strip()
    return error


def _stopped(outcome: Outcome) -> ClustertoolError:
    kinds: dict[int, type[ClustertoolError]] = {130: Interrupted, 143: Terminated}
    if outcome.code in kinds:
        return kinds[outcome.code](outcome.reason)
    error = Terminated(outcome.reason)
    error.code = outcome.code or 143
    return error
