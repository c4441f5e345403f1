"""inv status prints the state of a job from the nodes' own records, process by process, with its verdict."""

from __future__ import annotations

import time

from clustertool.actions.find_jobs import attach_to, doubt, proof, recorded
from clustertool.actions.read_status import as_dict, unrecorded_dict
from clustertool.engines.base import Engine
from clustertool.fleet.fleet import LAG
from clustertool.model.config.folded_names import fold
from clustertool.model.job.state_names import NodeState
from clustertool.model.wire.messages import STATUS
from clustertool.show.status_view import status_tables
from clustertool.verbs.jobs import engine_of, join_log, show_join_log
from clustertool.verbs.verb import Call, role_of


def status(call: Call) -> None:
    role = role_of(call.given.role) if call.given.role else ""
    with engine_of(call, lag=LAG, newest=True) as engine:
        lost = _show(call, engine, role)
        late = engine.fleet.late
        if call.json and lost.issuperset(map(engine.fleet.name, late)):  # one document has what is known of them
            engine.fleet.give_up()
        elif late:
            call.terminal.note(f"{fold(map(engine.fleet.name, late))}: still logging in")
            engine.fleet.rest()
        if engine.fleet.agents.keys() & set(late):
            _show(call, engine, role)


def _show(call: Call, engine: Engine, role: str) -> set[str]:
    """Show what the nodes that are there have answered. Return the names of those that are recorded as lost."""
    fleet = engine.fleet
    listed = attach_to(engine, call.given.job, queued=True)
    job = listed["id"]
    if not recorded(listed):
        found = unrecorded_dict(listed)
    else:
        answers = fleet.ask_all(STATUS({"job": job}))
        doubt(fleet, listed, answers)
        found = as_dict(answers, proof(fleet, listed))
    pods = engine.pods(job)
    if pods:
        found["pods"] = [pod.as_dict() for pod in pods]
        found["holds_output"] = found["outcome"] is not None and engine.holds_output(job)
    ended = found["outcome"] is not None and not found["processes"]
    place, lines = join_log(engine, job) if ended else ("", [])
    if lines:
        found["join_log"] = {"place": place, "lines": lines}
    if role:
        found["processes"] = [process for process in found["processes"] if process["role"] == role]
    if call.json:
        call.answer(found)
    else:
        status_tables(found, call.terminal, time.time())
        show_join_log(call, (place, lines))
    return {node["name"] for node in found["nodes"] if node["state"] == NodeState.LOST}
