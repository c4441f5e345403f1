"""This module prints how a job ended: failed ranks, the last lines of each different error, stopped ranks, the exit code.

What was printed while the job ran is not printed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from clustertool.errors import ClustertoolError, JobFailed, NodeLost
from clustertool.fleet.fleet import Fleet
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import JobPaths
from clustertool.model.wire.messages import TAIL
from clustertool.show.outcome_view import abort_line, brief, victims_line
from clustertool.show.prefix import prefix
from clustertool.verbs.follow_session import FollowSession
from clustertool.verbs.verb import Call
from clustertool.watch import verdict
from clustertool.watch.excerpt import excerpt
from clustertool.watch.sanitize import harmless

_TAIL = 20
_ERRORS = 3  # different errors with their last lines
_SEARCHED = 400  # lines from the end that are searched for a traceback


def tell(call: Call, fleet: Fleet, follow: FollowSession, hide: Callable[[str], str]) -> ClustertoolError | None:
    """Show the verdict; the error of this job, None for success."""
    watch = follow.watch
    status, outcome = watch.status, watch.status.outcome
    error = verdict.error_of(status)
    if outcome is None:
        return error
    printed = watch.printed(outcome)
    if outcome.state is JobState.FAILED:
        call.terminal.note(abort_line(status, outcome))
        if not printed:
            call.terminal.error(outcome.reason)
        for alike in verdict.errors(status, outcome)[:_ERRORS]:
            _show_last_lines(call, fleet, follow, hide, alike)
    victims = victims_line(status, outcome)
    if victims:
        call.terminal.note(victims)
    if isinstance(error, JobFailed) or (isinstance(error, NodeLost) and printed):
        error.printed, error.brief = True, brief(status, outcome)
    return error


def _show_last_lines(
    call: Call, fleet: Fleet, follow: FollowSession, hide: Callable[[str], str], alike: Sequence[ProcessStatus]
) -> None:
    """Of the first of several processes with the same error, unless they are the last lines on the screen."""
    first, name = alike[0], follow.watch.name(alike[0].node)
    log = JobPaths.log(first.role, first.rank, first.attempt)
    text = _last_lines(fleet, follow.watch.status.job, first.node, log)
    lines = [harmless(hide(line)) for line in excerpt(text.removesuffix("\n").split("\n"), _TAIL)] if text else []
    about = f"last lines of {first.role} {first.rank} ({name}, {log})"
    if follow.lines.on_screen(first.role, first.rank, lines):
        call.terminal.note(f"{about}: see above")
        return
    call.terminal.note(f"{about}:")
    for line in lines:
        call.terminal.note(prefix(first.role, first.rank, name) + line)


def _last_lines(fleet: Fleet, job: str, node: int, log: str) -> str:
    """Best effort: the verdict is valid without them."""
    with contextlib.suppress(ClustertoolError):
        if node in fleet.agents:
            answer = fleet.agents[node].ask(TAIL({"job": job, "log": log, "lines": _SEARCHED}), timeout=5.0)
            return str(answer["text"])
    return ""
