"""The verdict in words: who failed first and why, who is only a victim; and the error whose code the command exits with."""

from __future__ import annotations

from clustertool.errors import ClustertoolError, Interrupted, JobFailed, NodeLost, Survivors, Terminated, TimedOut
from clustertool.plan.events import JobStatus, ProcessStatus
from clustertool.plan.outcome import Key, Outcome
from clustertool.plan.roles import ROLES, word
from clustertool.watch.waits import blocked, suspects


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
            parts.append(f"{word(role)} {','.join(map(str, ranks))}")
    return "stopped because of it (victims): " + "; ".join(parts)


def culprit(status: JobStatus, outcome: Outcome) -> ProcessStatus | None:
    key: Key | None = outcome.culprits[0] if outcome.state == "failed" and outcome.culprits else None
    return status.processes.get(key) if key else None


def survivors(status: JobStatus) -> dict[str, list[str]]:
    """Node name -> what still lived after the stop."""
    return {node.name or f"node {node.index}": node.survivors for node in status.nodes.values() if node.survivors}


def error_of(status: JobStatus) -> ClustertoolError | None:
    """None for success, else the error whose code the contract names."""
    left = survivors(status)
    if left:
        what = "; ".join(f"{name}: {', '.join(found)}" for name, found in left.items())
        return Survivors(f"processes survived the stop: {what}", "look at them on the node; inv stop --force tries again")
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
    what, where = "; ".join([outcome.reason, *blocked(status)]), suspects(status)
    fix = f"a firewall on {where} may block incoming connections; run `clustertool check`" if where else ""
    if outcome.state == "timeout":
        return TimedOut(what, fix)
    return NodeLost(what, fix or "look at that machine; the job has ended on the others")


def _stopped(outcome: Outcome) -> ClustertoolError:
    kinds: dict[int, type[ClustertoolError]] = {130: Interrupted, 143: Terminated}
    if outcome.code in kinds:
        return kinds[outcome.code](outcome.reason)
    error = Terminated(outcome.reason)
    error.code = outcome.code or 143
    return error
