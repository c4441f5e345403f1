"""inv status prints the state of a job from the nodes' own records, process by process, with its verdict."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from clustertool.fleet.fleet import Fleet
from clustertool.model.job.node_status import NodeStatus
from clustertool.model.job.rank_places import unpack
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.agent_answers import StatusAnswer
from clustertool.model.wire.messages import STATUS
from clustertool.show.status_view import rank_note, start_text, status_tables
from clustertool.verbs import load_config
from clustertool.verbs.jobs import attach_to, doubt, fleet_of
from clustertool.verbs.verb import Call, role_of
from clustertool.watch.waits import advice, blocked, waits


def status(call: Call) -> None:
    """Show the state of one job, per process and per node."""
    role = role_of(call.given.role) if call.given.role else ""
    cluster = load_config.cluster(call, start_local=False)
    with fleet_of(cluster) as fleet:
        job = attach_to(fleet, call.given.job)["id"]
        answers = ask_status(fleet, job)
        doubt(fleet, job, answers)
        found = as_dict(answers)
        if role:
            found["processes"] = [process for process in found["processes"] if process["role"] == role]
        if call.json:
            call.answer(found)
        else:
            status_tables(found, call.terminal)


def ask_status(fleet: Fleet, job: str) -> dict[int, StatusAnswer]:
    """What the nodes know of one job."""
    return fleet.ask_all(STATUS({"job": job}))


def read(answers: Mapping[int, StatusAnswer]) -> JobStatus:
    """All nodes' events -> JobStatus; the lead's node first, since its events name the others.

    A node has the number with which it was asked (its number in the job, after attach_to), whatever number its answer has.
    """
    found = JobStatus(plan=_plan(answers))
    for index, answer in sorted(answers.items()):
        for event in answer["events"]:
            found.apply(index, event)
        node = found.nodes.setdefault(index, NodeStatus(index))
        last = max((float(event["t"]) - node.skew for event in answer["events"]), default=0.0)
        heartbeat = answer["heartbeat"]
        moved = last if heartbeat is None else time.time() - heartbeat
        found.probed(node, answer["supervised"], str(answer.get("unknown", "")), heartbeat, moved)
        for role, rank, epoch, step, output in answer["output"]:
            process = found.processes.get((str(role), int(rank)))
            if process is not None and process.node == index:
                process.epoch, process.step, process.output = epoch, step, float(output) - node.skew
    found.settle(answers)
    return found


def _plan(answers: Mapping[int, StatusAnswer]) -> dict[tuple[str, int], int] | None:
    """The node of each rank, as most nodes have it: one node cannot add ranks. None if no node has it (older records)."""
    headers = [
        event for _, answer in sorted(answers.items()) for event in answer["events"][:1] if event["type"] == "job"
    ]
    votes = Counter(
        json.dumps([event["places"], len(event.get("nodes", ()))]) for event in headers if event.get("places")
    )
    if not votes:
        return None
    places, nodes = json.loads(votes.most_common(1)[0][0])
    return {(role, rank): node for role, rank, node in unpack(places, nodes)}


def as_dict(answers: Mapping[int, StatusAnswer]) -> dict[str, Any]:
    """The documented JSON of `inv status --json`."""
    found = read(answers)
    waited = blocked(found) if found.outcome and found.outcome.state in (JobState.LOST, JobState.TIMEOUT) else []
    usage: dict[tuple[int, int], tuple[float, int]] = {}
    for index, answer in answers.items():
        for pid, used in answer["usage"].items():
            usage[index, int(pid)] = used
    part = found.part
    start = [start_text(part.start)] if part.state is JobState.STARTING else []
    processes = []
    for key in sorted(found.processes):
        process = found.processes[key]
        mine = usage.get((process.node, process.pid)) if process.state.alive else None
        age = max(time.time() - process.since, 0.1)
        extra = {"cpu": round(100 * mine[0] / age, 1) if mine else None, "memory": mine[1] if mine else None}
        processes.append({**process.as_dict(), "note": rank_note(process), **extra})
    return {
        "job": found.job,
        "state": part.state,
        "mode": found.mode,
        "owner": found.owner,
        "created": found.created,
        "command": found.command,
        "attempt": found.attempt,
        "processes": processes,
        "nodes": [found.nodes[node].as_dict() for node in sorted(found.nodes)],
        "waits": waited or [wait.text for wait in waits(found, time.time())] or start,
        "advice": advice(found) if waited else "",
        "outcome": found.outcome.as_dict() if found.outcome else None,
    }
