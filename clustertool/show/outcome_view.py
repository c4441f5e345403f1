"""The end of a job in sentences: which ranks failed or were stopped, and what a stop did on each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState, StopState
from clustertool.model.job.stop_result import StopResult
from clustertool.model.roles import ROLES, role_name
from clustertool.show.table import gather
from clustertool.show.terminal import Terminal
from clustertool.watch.verdict import culprit, errors

_TEXTS = {
    StopState.CLEAN: "clean",
    StopState.ENDED_ALREADY: "ended already",
    StopState.NEVER_STARTED: "clean (never started here)",
    StopState.UNDONE: "clean, nothing was started",
}


def stop_text(result: StopResult) -> str:
    """One node's result."""
    if result.state is StopState.SURVIVORS:
        return "survivors: " + ", ".join(result.survivors)
    if result.state is StopState.UNKNOWN:
        return f"unknown, still running? {result.why}"
    if result.state is StopState.NO_ANSWER:
        return f"did not answer: {result.why}" if result.why else "did not answer"
    waits = ", but its supervisor waits for another node" if result.waits else ""
    return f"{_TEXTS[result.state]}{waits}"


def show_results(results: Mapping[str, StopResult], terminal: Terminal) -> None:
    """The result of each node by its name, equal ones under folded names."""
    for names, text in gather({name: stop_text(result) for name, result in results.items()}):
        terminal.note(f"{names}: {text}")


def abort_line(status: JobStatus, outcome: Outcome) -> str:
    """The line that fleetrun users grep for."""
    if not outcome.culprits:
        return ""
    role = outcome.culprits[0][0]
    ranks = sorted(rank for name, rank in outcome.culprits if name == role)
    total, name = len(status.of(role)), role_name(role)
    return (
        f"ABORT!!! Out of all {total} {name}s, the {name} process with rank=[{','.join(map(str, ranks))}] was aborted. "
        "Please check its log."
    )


def victims_line(status: JobStatus, outcome: Outcome) -> str:
    """Victims by role and rank, apart from the culprits."""
    if not outcome.victims or outcome.state not in (JobState.FAILED, JobState.LOST):
        return ""
    parts = []
    for role in ROLES:
        ranks = sorted(rank for name, rank in outcome.victims if name == role)
        if ranks:
            parts.append(f"{role_name(role)} {ranges(ranks)}")
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


def brief(status: JobStatus, outcome: Outcome) -> str:
    """The failed processes without the error, which was printed before; "" for an outcome that has no such form."""
    if outcome.state is JobState.LOST:
        return outcome.brief
    guilty = culprit(status, outcome)
    if guilty is None:
        return ""
    first = f"{role_name(guilty.role)} {guilty.rank} on {status.nodes[guilty.node].name or f'node {guilty.node}'}"
    if len(outcome.culprits) == 1:
        return f"{first} failed"
    roles = [role for role, _ in outcome.culprits]
    counts = ", ".join(
        f"{roles.count(role)} {role_name(role)}{'s' * (roles.count(role) > 1)}" for role in dict.fromkeys(roles)
    )
    same = " with the same error" if len(errors(status, outcome)) == 1 else ""
    return f"{counts} failed{same}, first {first}"
