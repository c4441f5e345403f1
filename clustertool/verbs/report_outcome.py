"""This module prints how a job ended: failed ranks, the last lines of each different error, stopped ranks, the exit code.

What was printed while the job ran is not printed again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clustertool.actions.read_logs import last_lines
from clustertool.actions.read_status import error_of
from clustertool.errors import ClustertoolError, Interrupted, JobFailed, NodeLost, NotFound, Terminated
from clustertool.fleet.fleet import Fleet
from clustertool.model.finding import pip_name
from clustertool.model.hints import PROGRAM
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.masking import Hide
from clustertool.model.paths import JobPaths
from clustertool.show.errors import reason
from clustertool.show.job_text import abort_line, brief, remains_text, victims_line
from clustertool.show.prefix import prefix
from clustertool.verbs.follow_session import FollowSession
from clustertool.verbs.verb import Call
from clustertool.watch import verdict

_NO_MODULE = re.compile(r"No module named '?(\w+)'?$")  # of a name with a dot the package is there
_ERRORS = 3  # different errors with their last lines


def tell(call: Call, fleet: Fleet, follow: FollowSession, hide: Hide) -> ClustertoolError | None:
    """Show the verdict; the error of this job, None for success."""
    return _with_remains(call, follow, _verdict(call, fleet, follow, hide))


def _verdict(call: Call, fleet: Fleet, follow: FollowSession, hide: Hide) -> ClustertoolError | None:
    """Show what failed, with the last lines. Returns the error of the job, None for success."""
    watch = follow.watch
    status, outcome = watch.status, watch.status.outcome
    error = error_of(status)
    if outcome is None:
        return error
    printed = watch.printed(outcome)
    if outcome.state is JobState.FAILED:
        call.terminal.note(abort_line(status, outcome))
        if not printed:
            call.terminal.error(outcome.reason)
        for alike in verdict.errors(status, outcome)[:_ERRORS]:
            lines = _show_last_lines(call, fleet, follow, hide, alike)
            if error is not None and not error.fix:
                error.fix = _missing_module(lines, follow.watch.status.name(alike[0].node), fleet.cluster.job_python)
    victims = victims_line(outcome)
    if victims:
        call.terminal.note(victims)
    if isinstance(error, (Interrupted, Terminated)):
        call.terminal.error(f"the job was stopped: {outcome.reason}")
        error.printed, error.brief = True, outcome.reason
    elif isinstance(error, JobFailed) or (isinstance(error, NodeLost) and printed):
        error.printed, error.brief = True, brief(status, outcome)
    return error


def _with_remains(call: Call, follow: FollowSession, error: ClustertoolError | None) -> ClustertoolError | None:
    """Add to the last line what may still run."""
    if not follow.left:
        return error
    text = remains_text(follow.watch.status.job, follow.left)
    if error is None:
        call.terminal.warn(text)
    else:
        error.brief = f"{error.brief or reason(error)}; {text}"
        error.what = f"{error.what}; {text}"
    return error


def _show_last_lines(
    call: Call, fleet: Fleet, follow: FollowSession, hide: Hide, alike: Sequence[ProcessStatus]
) -> Sequence[str]:
    """Show those of the first of several processes with the same error, unless they are on the screen. Returns the lines."""
    first, name = alike[0], follow.watch.status.name(alike[0].node)
    log = JobPaths.log(first.role, first.rank, first.attempt)
    if isinstance(fleet.failed.get(first.node), NotFound):
        call.terminal.note(f"the log of {first.role} {first.rank} is on {name}: {log}")
        return ()
    lines = last_lines(fleet, follow.watch.status.job, first, hide)
    about = f"last lines of {first.role} {first.rank} ({name}, {log})"
    if not lines:
        call.terminal.note(f"no {about}: it has printed nothing, or its node does not answer")
        return lines
    if follow.lines.on_screen(first.role, first.rank, lines):
        call.terminal.note(f"{about}: see above")
        return lines
    call.terminal.note(f"{about}:")
    for line in lines:
        call.terminal.note(prefix(first.role, first.rank, name) + line)
    return lines


def _missing_module(lines: Sequence[str], node: str, python: str) -> str:
    """Make the fix where the last lines of a process name a module that its interpreter does not have, else "".

    python: what python3 is for jobs of this machine, "" on other nodes.
    """
    names = (match[1] for match in map(_NO_MODULE.search, reversed(lines)) if match)
    name = next(names, "")
    if not name:
        return ""
    if python:
        return f"python3 is {python}: activate the environment that has {name}, or install {pip_name(name)} in this one"
    where = f"for python3 on {node}, or have PRELUDE in conf.py activate the environment that has it"
    return f"install {pip_name(name)} {where}; {PROGRAM} check compares the nodes"
