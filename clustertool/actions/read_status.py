"""This module reads the state of a job from the nodes' own records, process by process, with its verdict."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from clustertool.actions.find_jobs import ListedJob, lost_nodes_error, state_text
from clustertool.engines.base import Description, EngineState
from clustertool.errors import ClustertoolError, Interrupted, JobFailed, NodeLost, Survivors, Terminated, TimedOut
from clustertool.model.container.job_container import container_of
from clustertool.model.hints import PROGRAM
from clustertool.model.job.node_status import NodeStatus
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.rank_places import unpack
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.shape import to_plain
from clustertool.model.wire.agent_answers import StatusAnswer
from clustertool.model.wire.event_types import Event, JobEvent
from clustertool.show.job_text import (
    blocked_text,
    firewall_text,
    hang_text,
    loss_text,
    resume_text,
    trouble_text,
    wait_text,
)
from clustertool.show.status_view import rank_note, start_text
from clustertool.watch.rank_metrics import find_wrong_losses, job_progress, newest_rows, read_rows
from clustertool.watch.waits import find_blocked, find_firewall, find_waits, lost_coordinator

StatusJson = dict[str, Any]  # the documented answer of `status --json`
_REASONS = 3  # different ones why nodes have no connection


def read(answers: Mapping[int, StatusAnswer], known: Description | None = None) -> JobStatus:
    """Build the status of a job from the nodes' answers: their events, heartbeats and last output, and what the engine knows.

    The coordinator's events are applied first, since they name the other nodes. A node has the number with which it was asked,
    whatever number its answer has. known: see find_jobs.engine_proof().
    """
    found = JobStatus(plan=_nodes_by_rank(answers))
    for index, answer in sorted(answers.items()):
        for event in answer["events"]:
            found.apply(index, event)
        node = found.nodes.setdefault(index, NodeStatus(index))
        last = max((float(event["t"]) - node.skew for event in answer["events"]), default=0.0)
        heartbeat = answer["heartbeat"]
        moved = last if heartbeat is None else time.time() - heartbeat
        supervised, unknown = answer["supervised"], str(answer.get("unknown", ""))
        if unknown and known is not None:
            supervised, unknown = known.state is EngineState.RUNNING, ""
        found.probed(node, supervised, unknown, heartbeat, moved)
        for role, rank, epoch, step, output in answer["output"]:
            process = found.processes.get((str(role), int(rank)))
            if process is not None and process.node == index:
                process.epoch, process.step, process.output = epoch, step, float(output) - node.skew
    over = any(node.ended is not None for node in found.nodes.values())
    if known is not None and known.gone(over):
        found.end_by_engine(known.why, known.since or time.time())
    if known is not None:
        found.cause = known.cause
    found.settle(answers)
    return found


def _nodes_by_rank(answers: Mapping[int, StatusAnswer]) -> dict[tuple[str, int], int] | None:
    """Read the node of each rank from the headers of the first epoch, as most nodes have it, so no node can add ranks.

    None if no node has it (older records).
    """
    headers = filter(None, (_header_with_places(answer["events"]) for _, answer in sorted(answers.items())))
    votes = Counter(json.dumps([event["places"], len(event.get("nodes", ()))]) for event in headers)
    if not votes:
        return None
    places, nodes = json.loads(votes.most_common(1)[0][0])
    return {(role, rank): node for role, rank, node in unpack(places, nodes)}


def _header_with_places(events: Iterable[Event]) -> JobEvent | None:
    """Return the first job header of the first epoch that has the places of ranks, None without any."""
    for event in events:
        if event["type"] == "job" and event.get("places") and not event.get("epoch"):
            return event
    return None


def unrecorded_dict(job: ListedJob) -> StatusJson:
    """Build the JSON of `status --json` for a job of which no node has a record, from what its engine knows.

    "queue" has the reason and times of one that is queued or runs; else it has "outcome", "ended" and "reason" of its end.
    """
    known = job["queued"]
    about = {name: job[name] or "" for name in ("name", "owner", "command")}
    found = {**as_dict({}), **about, "job": job["id"], "state": job["state"], "created": job["created"] or 0.0}
    if known is None:
        ended = job["code"] is not None and Outcome(job["state"], job["code"], "tool", job["reason"]).as_dict()
        return {**found, "outcome": ended or None, "ended": job["ended"], "reason": job["reason"]}
    times = {"since": known.since or None, "expected": known.expected or None}
    return {**found, "waits": [state_text(known)], "queue": {"reason": known.reason, **times}}


def as_dict(answers: Mapping[int, StatusAnswer], known: Description | None = None) -> StatusJson:
    """Build the documented JSON of `status --json` from the nodes' answers. known: see find_jobs.engine_proof()."""
    found = read(answers, known)
    waited = find_blocked(found) if found.outcome and found.outcome.state in (JobState.LOST, JobState.TIMEOUT) else []
    usage = {(node, int(pid)): used for node, answer in answers.items() for pid, used in answer["usage"].items()}
    part = found.part
    start = [start_text(part.start)] if part.state is JobState.STARTING else []
    rows = newest_rows(found, read_rows(found, answers))
    processes = []
    for key in sorted(found.processes):
        process = found.processes[key]
        mine = usage.get((process.node, process.pid)) if process.state.alive else None
        age = max(time.time() - process.since, 0.1)
        extra = {"cpu": round(100 * mine[0] / age, 1) if mine else None, "memory": mine[1] if mine else None}
        numbers = to_plain(rows[key][-1].numbers) if key in rows else {}
        processes.append({**process.as_dict(), "note": rank_note(process), **extra, "metrics": numbers})
    container = container_of(event for answer in answers.values() for event in answer["events"])
    return {
        "job": found.job,
        "name": found.title,
        "state": part.state,
        "mode": found.mode,
        "owner": found.owner,
        "created": found.created,
        "started": found.started or None,
        "ended": found.ended if found.outcome and found.ended else None,
        "command": found.command,
        "container": container.as_dict() if container else None,
        "attempt": found.attempt,
        "progress": job_progress(found.processes.values(), rows),
        "warnings": [*map(hang_text, filter(None, [found.hang])), *map(loss_text, find_wrong_losses(rows))],
        "epochs": [to_plain(epoch) for epoch in found.epochs],
        "processes": processes,
        "nodes": [{**node.as_dict(), "why": trouble_text(node.trouble)} for _, node in sorted(found.nodes.items())],
        "waits": [*map(blocked_text, waited)] or [*map(wait_text, find_waits(found, time.time()))] or start,
        "advice": (firewall_text(find_firewall(found)) if waited else "") or resume_text(found),
        "outcome": found.outcome.as_dict() if found.outcome else None,
        "reason": "" if found.outcome else found.engine_end,
    }


def error_of(status: JobStatus) -> ClustertoolError | None:
    """Convert the end of a job to an error with the exit code of the contract; None for success.

    Survivors, if a node has some, has priority. Then NodeLost with the engine's reason and code (status.cause) counts, if the
    outcome is LOST or missing; else the outcome, and NodeLost if it is missing.
    """
    left = [node for node in status.nodes.values() if node.survivors]
    if left:
        what = "; ".join(f"{status.name(node.index)}: {', '.join(node.survivors)}" for node in left)
        fix = f"check them on the node; {PROGRAM} stop --job {status.job} --force tries again"
        return Survivors(f"processes survived the stop: {what}", fix)
    outcome = status.outcome
    if status.cause is not None and (outcome is None or outcome.state is JobState.LOST):
        return lost_nodes_error(*status.cause)
    if outcome is None:
        fix = f"{PROGRAM} status --job {status.job} shows what the nodes recorded"
        return NodeLost(f"the job ended without a verdict: {status.engine_end or 'its coordinator is gone'}", fix)
    if outcome.state is JobState.SUCCEEDED:
        return None
    if outcome.state is JobState.FAILED:
        failed = JobFailed(outcome.reason, outcome.code)
        failed.source = outcome.source
        return failed
    if outcome.state is JobState.STOPPED:
        stopped = Interrupted(outcome.reason) if outcome.code == 130 else Terminated(outcome.reason)
        stopped.code = outcome.code or 143
        return stopped
    coordinator = lost_coordinator(status)
    lost = f"{status.name(coordinator.index)}: {trouble_text(coordinator.trouble)}" if coordinator is not None else ""
    reasons = [lost, outcome.reason, *map(blocked_text, find_blocked(status)[:_REASONS])]
    what, fix = "; ".join(filter(None, reasons)), firewall_text(find_firewall(status)) or resume_text(status)
    if outcome.state is JobState.TIMEOUT:
        error: ClustertoolError = TimedOut(what, fix)
    else:
        error = NodeLost(what, fix or "check that machine; the job has ended on the others")
    error.brief = lost or outcome.brief
    return error
