"""inv jobs lists the jobs of the nodes, newest first. inv status shows one job, process by process, with its verdict.

Both read the nodes' own records. The other verbs open the nodes of existing jobs with this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from clustertool.actions import find_jobs, load_config
from clustertool.actions.read_status import as_dict, unrecorded_dict
from clustertool.engines import base
from clustertool.engines.base import Engine
from clustertool.errors import ClustertoolError, raise_all
from clustertool.fleet.agent_client import Sink
from clustertool.fleet.fleet import LAG, Fleet
from clustertool.model.config.folded_names import fold
from clustertool.model.job.state_names import JobState, NodeState
from clustertool.model.wire.messages import STATUS
from clustertool.show.status_view import jobs_table, start_text, status_tables
from clustertool.verbs.verb import Call, role_of
from clustertool.watch.sanitize import harmless


def jobs(call: Call) -> None:
    """Print the jobs of all nodes, or answer with JSON.

    Without --json, while nodes still log in, the jobs of the others are printed first, and all of them again later.
    """
    with engine_of(call, lag=None if call.json else LAG) as engine:
        _show_jobs(call, engine)
        if _wait_for_late(call, engine.fleet):
            _show_jobs(call, engine)


def _wait_for_late(call: Call, fleet: Fleet) -> bool:
    """Wait for nodes that still log in, with a note of their names, and check whether one of them is connected then."""
    late = fleet.late
    if late:
        call.terminal.note(f"{fold(map(fleet.name, late))}: still logging in")
        fleet.wait_for_late()
    return bool(fleet.agents.keys() & set(late))


def _show_jobs(call: Call, engine: Engine) -> None:
    """Ask the nodes that are connected for their jobs, and print the table with notes, or answer with JSON.

    Also warns of processes of jobs that have no supervisor or no record any more.
    """
    fleet = engine.fleet
    answers = find_jobs.ask_jobs(fleet, call.given.job)
    find_jobs.warn_of_remains(engine, answers)
    found = find_jobs.merge_answers(answers, find_jobs.ask_engine(engine, answers, call.given.job))
    if call.json:
        away = {fleet.name(node): e.what for node, e in fleet.failed.items()}
        call.answer({"jobs": [_as_json(job) for job in found], "unreachable": away})
        return
    jobs_table(found, call.terminal, time.time())
    for job in found:
        if job["state"] is JobState.UNKNOWN:
            call.terminal.warn(find_jobs.unknown_end(job["id"], job["reason"]).what)
        elif job["queued"] is not None:
            call.terminal.note(f"job {job['id']}: {find_jobs.state_text(job['queued'])}")
        elif job["state"] is JobState.STARTING:
            call.terminal.note(f"job {job['id']}: {start_text(job['part'].start)}")


def read_join_log(engine: Engine, job: str) -> tuple[str, list[str]]:
    """Return the place of the engine's log of a job's start, and its lines without secrets; ("", []) without an answer."""
    try:
        place, lines = engine.join_log(job)
    except ClustertoolError:
        return "", []
    hide = load_config.mask_known_secrets(engine.fleet.cluster)
    return place, [harmless(hide(line)) for line in lines]


def show_join_log(call: Call, log: tuple[str, Sequence[str]]) -> None:
    """Print the result of read_join_log() as notes."""
    place, lines = log
    if lines:
        call.terminal.note(f"last lines of {place}:")
    for line in lines:
        call.terminal.note(f"  {line}")


def _as_json(job: find_jobs.ListedJob) -> dict[str, object]:
    """Build the fields of a job in the JSON answer, with the reason of its state, and the times of a queued one."""
    part, about = job["part"], job["queued"]
    found = {name: value for name, value in job.items() if name not in ("part", "asked", "known", "queued")}
    queue = {} if about is None else {"queue": {"since": about.since or None, "expected": about.expected or None}}
    return {**found, "reason": part.reason or start_text(part.start), **queue}


@contextmanager
def open_engine(
    call: Call, sink: Sink | None = None, lag: float | None = None, newest: bool = False
) -> Iterator[Engine]:
    """Return a context manager that yields the engine of the selected cluster, connected to its agents, for jobs that exist.

    sink: gets the frames of agents. lag: see Fleet.open. newest: without --job, the verb is about the newest job, whose stored
    hosts replace a missing conf.py.
    """
    selection = call.selection
    if newest and selection.job is None:
        selection = replace(selection, job="")
    cluster = load_config.cluster(call, selection, start_local=False)
    with base.engine_of(cluster)(cluster, call, sink) as engine:
        engine.open(lag, selection.job or "", newest)
        yield engine


@contextmanager
def engine_of(call: Call, whole: bool = True, lag: float | None = None, newest: bool = False) -> Iterator[Engine]:
    """Return a context manager that yields the engine as open_engine() does, and at its end raises the errors of nodes.

    whole=False: only the errors of nodes that have logged in and did not answer, for a verb that does not need all nodes. lag,
    newest: see open_engine().
    """
    with open_engine(call, lag=lag, newest=newest) as engine:
        yield engine
        raise_all(list((engine.fleet.failed if whole else engine.fleet.silent).values()))


# -- one job -----------------------------------------------------------------------------------------------------------


def status(call: Call) -> None:
    """Print the status of a job, or answer with JSON.

    While nodes still log in, it is printed first without them, and again later. With --json it does not wait for nodes that the
    job has lost.
    """
    role = role_of(call.given.role) if call.given.role else ""
    with engine_of(call, lag=LAG, newest=True) as engine:
        lost = _show_job(call, engine, role)
        fleet = engine.fleet
        if call.json and lost.issuperset(map(fleet.name, fleet.late)):  # one document has what is known of them
            fleet.give_up()
        elif _wait_for_late(call, fleet):
            _show_job(call, engine, role)


def _show_job(call: Call, engine: Engine, role: str) -> set[str]:
    """Ask the connected nodes of a job and its engine, and print its status or answer with JSON.

    Returns the names of its lost nodes.
    """
    fleet = engine.fleet
    listed = find_jobs.attach_to(engine, call.given.job, queued=True)
    job = listed["id"]
    if not find_jobs.has_records(listed):
        found = unrecorded_dict(listed)
    else:
        answers = fleet.ask_all(STATUS({"job": job}))
        find_jobs.record_unknown_end(fleet, listed, answers)
        found = as_dict(answers, find_jobs.engine_proof(fleet, listed))
    pods = engine.pods(job)
    if pods:
        found["pods"] = [pod.as_dict() for pod in pods]
        found["holds_output"] = found["outcome"] is not None and engine.holds_output(job)
    ended = found["outcome"] is not None and not found["processes"]
    place, lines = read_join_log(engine, job) if ended else ("", [])
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
