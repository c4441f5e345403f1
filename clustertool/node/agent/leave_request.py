"""A request to release this node from an elastic job: its supervisor passes it on, and the next epoch begins without it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.node.jobs import supervisor_client
from clustertool.node.jobs.queries import record_of
from clustertool.node.jobs.records import Record
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import LeaveAnswer
    from clustertool.model.wire.agent_requests import LeaveRequest
    from clustertool.model.wire.supervisor_messages import SupervisorRequest

_PATIENCE = 10.0  # seconds for a supervisor to accept the request
_POLL = 0.1


def leave(context: NodeContext, request: LeaveRequest) -> LeaveAnswer:
    """Release this node. Returns when it has left, at most after `seconds`.

    Raises NotFound, PreflightError, UsageError, and what the supervisor answers.
    """
    record, until = record_of(context, request["job"]), time.monotonic() + request["seconds"]
    key = record.key()
    if "code" in request and key is not None and key.coordinates:
        raise UsageError(f"this node coordinates job {record.job}", "stop the job")
    _release(record, request["by"], request.get("code", 0), until)
    while time.monotonic() < until:
        if not record.supervised():
            return {"left": has_left(record)}
        time.sleep(_POLL)
    return {"left": False}


def _release(record: Record, by: str, code: int, until: float) -> None:
    """Return when the supervisor has taken the request. Between two epochs there is none: the next one is waited for."""
    command = cast("SupervisorRequest", {"type": "leave", "by": by, "code": code})
    answered_at = time.monotonic()
    while True:
        if not record.supervised():
            raise NotFound(
                f"job {record.job} does not run here", f"{PROGRAM} status --job {record.job} shows its nodes"
            )
        try:
            if supervisor_client.ask(record.paths, command, _PATIENCE) is not None:
                return
            if time.monotonic() - answered_at > _PATIENCE:  # it takes less where a supervisor follows the member
                what = f"the supervisor of job {record.job} does not answer"
                raise PreflightError(what, f"try again, or end the job: {PROGRAM} stop --job {record.job}")
        except NotFound:
            answered_at = time.monotonic()
            if answered_at > until:
                raise
        time.sleep(_POLL)


def has_left(record: Record) -> bool:
    """Check whether the node was released, and has not joined again."""
    last = ""
    for event in record.events():
        if event.get("type") in ("left", "supervisor"):
            last = str(event["type"])
    return last == "left"
