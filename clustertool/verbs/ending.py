"""How a job ended, told once: the verdict, the culprit's last lines, the victims; then the error whose code we exit with."""

from __future__ import annotations

import contextlib
from typing import Any

from clustertool.errors import ClustertoolError, JobFailed
from clustertool.plan.paths import JobPaths
from clustertool.reach.fleet import Fleet
from clustertool.verbs.call import Call
from clustertool.watch import verdict
from clustertool.watch.clean import harmless
from clustertool.watch.excerpt import excerpt
from clustertool.watch.job import Watch

_TAIL = 20
_SEARCHED = 400  # lines from the end in which a traceback is looked for


def tell(call: Call, fleet: Fleet, watch: Watch, hide: Any) -> ClustertoolError | None:
    """Show the verdict; the error of this job, None for success."""
    from clustertool.show.prefix import prefix

    status, outcome = watch.status, watch.status.outcome
    if outcome is not None and outcome.state == "failed":
        guilty = verdict.culprit(status, outcome)
        call.terminal.note(verdict.abort_line(status, outcome))
        call.terminal.error(outcome.reason)
        if guilty is not None:
            log = JobPaths.log(guilty.role, guilty.rank, guilty.attempt)
            text = _last_lines(fleet, status.job, guilty.node, log)
            call.terminal.note(f"last lines of {guilty.role} {guilty.rank} ({watch.name(guilty.node)}, {log}):")
            who = prefix(guilty.role, guilty.rank, watch.name(guilty.node))
            for line in excerpt(text.removesuffix("\n").split("\n"), _TAIL) if text else ():
                call.terminal.note(who + harmless(hide(line)))
    if outcome is not None:
        victims = verdict.victims_line(status, outcome)
        if victims:
            call.terminal.note(victims)
    error = verdict.error_of(status)
    if isinstance(error, JobFailed):
        error.told = True
    return error


def _last_lines(fleet: Fleet, job: str, node: int, log: str) -> str:
    """Best effort: the verdict stands without them."""
    with contextlib.suppress(ClustertoolError):
        if node in fleet.agents:
            answer = fleet.agents[node].ask({"q": "tail", "job": job, "log": log, "lines": _SEARCHED}, timeout=5.0)
            return str(answer["text"])
    return ""
