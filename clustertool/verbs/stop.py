"""inv stop ends a job on every node, from any laptop, and proves that none of its processes is alive."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from clustertool.errors import (
    ClustertoolError,
    PreflightError,
    Survivors,
    Unreachable,
    UsageError,
    as_one,
    raise_all,
)
from clustertool.fleet.fleet import Fleet
from clustertool.model.job.state_names import OUTCOMES, JobState, StopState
from clustertool.model.job.stop_result import CLEAN, read_result
from clustertool.model.planning import requests
from clustertool.model.wire.agent_answers import JobsAnswer, StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.show.errors import exit_json
from clustertool.show.outcome_view import stop_text
from clustertool.show.table import fold, gather
from clustertool.ssh.parallel import each
from clustertool.verbs import load_config
from clustertool.verbs.jobs import ask_jobs, choose, fleet_of, listings, merged, where
from clustertool.verbs.verb import Call

_LAG = 2.0  # seconds without a new node after which the nodes that are there are asked to stop
_LISTING = 10.0  # seconds that a node has to list its jobs
_SECONDS = 30.0  # that the stop of a job may take beyond the grace
_WIDTH = 1000  # requests at a time: nodes end several jobs at once
Stopped = StopAnswer | ClustertoolError  # what a node answers to a stop, or why there is no answer


def stop(call: Call) -> None:
    """End a job on all nodes and verify that no process is left."""
    if call.given.all and call.given.job:
        raise UsageError("--all and --job together", "give one of them")
    cluster = load_config.cluster(call, start_local=False)
    grace = _grace(call, cluster.grace)
    with fleet_of(cluster, whole=not call.given.job, lag=_LAG) as fleet:
        first = _at_once(call, fleet, grace)
        fleet.rest()
        known = ask_jobs(fleet, call.given.job, _LISTING)
        wanted = (
            list(first)
            if first and not call.given.all
            else list({**first, **dict.fromkeys(_wanted(call, fleet, known))})
        )
        if call.given.dry or not wanted:
            nothing = "nothing to stop" + " on the nodes that answered" * bool(fleet.failed)
            call.terminal.line(f"would stop: {', '.join(wanted)}" if wanted else nothing)
            if call.json:
                done = exit_json(as_one(list(fleet.failed.values())), "tool")
                call.answer({"would_stop": wanted} if call.given.dry else {"jobs": {}, "exit": done})
            return
        answers = stop_jobs(fleet, wanted, grace, call.given.force, known)
        for job, nodes in first.items():
            answers[job].update({name: answer for name, answer in nodes.items() if read_result(answer, job) == CLEAN})
        _tell(call, answers, fleet.silent if call.given.job else fleet.failed)


def _at_once(call: Call, fleet: Fleet, grace: float) -> dict[str, dict[str, Stopped]]:
    """Stop on the nodes that are there while others still log in: {job: its nodes' answers}.

    {} where the others may decide which job is meant, for --dry, and if no node is late.
    """
    late = [fleet.name(node) for node in fleet.late]
    if not late or call.given.dry:
        return {}
    known = ask_jobs(fleet, call.given.job, _LISTING)
    jobs = unfinished(known)
    if not call.given.all:  # as _wanted() chooses: the one that --job names, or the only one that may run
        jobs = [job["id"] for job in merged(known) if call.given.job or job["part"].may_run]
    if not call.given.all and jobs != [call.given.job]:
        hosts = fleet.cluster.hosts
        jobs = [
            job for job in jobs if len(jobs) == 1 and set(late) <= set(where(listings(known)[job], known, hosts)[1])
        ]
    if jobs:
        call.terminal.note(f"{fold(late)}: still logging in; stopping on the other nodes now")
    return stop_jobs(fleet, jobs, grace, call.given.force, known)


def _grace(call: Call, default: float) -> float:
    text = call.given.grace
    try:
        grace = float(text) if text else default
    except ValueError:
        grace = -1.0
    if grace < 0:
        raise UsageError(f"--grace {text!r}", "a number of seconds")
    return grace


def _wanted(call: Call, fleet: Fleet, known: Mapping[int, JobsAnswer]) -> list[str]:
    """`known`: the nodes' answers about their jobs."""
    if call.given.all:
        return unfinished(known)
    if call.given.job:
        return [choose(fleet, known, call.given.job)["id"]]
    if not any(job["part"].may_run for job in merged(known)):
        return []
    return [choose(fleet, known, "", running=True)["id"]]


def unfinished(known: Mapping[int, JobsAnswer]) -> list[str]:
    """Jobs that may have processes: those that have not ended, and lost ones."""
    return [job["id"] for job in merged(known) if job["state"] is JobState.LOST or job["state"] not in OUTCOMES]


def stop_job(fleet: Fleet, job: str, grace: float, force: bool) -> dict[str, Stopped]:
    """Each of the job's nodes by name -> its answer, or why there is none."""
    return stop_jobs(fleet, [job], grace, force, ask_jobs(fleet, job, _LISTING))[job]


def stop_jobs(
    fleet: Fleet, jobs: Sequence[str], grace: float, force: bool, known: Mapping[int, JobsAnswer]
) -> dict[str, dict[str, Stopped]]:
    """Stop all jobs at once: {job: {name of each of its nodes: its answer, or why there is none}}.

    `known`: the nodes' answers about their jobs. A node that answered is asked to stop what it listed. One that could not list
    its jobs is asked to stop all. This takes `grace` + _SECONDS in all, however many jobs a node lists.
    """
    listed = listings(known)
    queue: list[
        tuple[int, str, int]
    ] = []  # first one job of each node, then the next one of each: no list delays the others
    for agent in fleet.agents:
        of_agent = jobs if agent not in known else [job for job in jobs if agent in listed.get(job, ())]
        queue += [(turn, job, agent) for turn, job in enumerate(of_agent)]
    gathered = _send(fleet, [(job, agent) for _, job, agent in sorted(queue, key=lambda one: one[0])], grace, force)
    ours = {host.name: host.index for host in fleet.cluster.hosts}
    found = {}
    for job in jobs:
        places, names = where(listed.get(job, {}), known, fleet.cluster.hosts)
        nodes = {name: places.get(node, ours.get(name, -1)) for node, name in enumerate(names)} or ours
        found[job] = {name: _answer(fleet, known, gathered, job, agent) for name, agent in nodes.items()}
    return found


def _send(fleet: Fleet, queue: Sequence[tuple[str, int]], grace: float, force: bool) -> dict[tuple[str, int], Stopped]:
    """{(job, agent): its answer to the stop, or the error in its place}.

    A node that was silent before is sent the request, and nothing waits for its answer.
    """
    how: StopHow = {"by": "inv stop", "code": 143, "grace": grace, "force": force}
    seconds = grace + _SECONDS
    end = time.monotonic() + seconds
    silent = {agent for agent, error in fleet.failed.items() if isinstance(error, Unreachable)}

    def one(item: tuple[str, int]) -> StopAnswer:
        job, agent = item
        left = 0.0 if agent in silent else round(max(0.0, end - time.monotonic()), 1)
        try:
            return fleet.ask_one(agent, requests.stop(job, how), left)
        except Unreachable as error:
            raise (fleet.failed[agent] if agent in silent else error) from None

    gathered = each(queue, one, width=min(_WIDTH, len(queue)), timeout=seconds + 1, check=fleet.check)
    found: dict[int, Stopped] = {**gathered.failed, **gathered.ok}
    return {queue[at]: answer for at, answer in found.items()}


def _answer(
    fleet: Fleet,
    known: Mapping[int, JobsAnswer],
    gathered: Mapping[tuple[str, int], Stopped],
    job: str,
    agent: int,
) -> Stopped:
    """What an agent answered about a job. One that did not list the job has nothing of it."""
    if (job, agent) in gathered:
        return gathered[job, agent]
    if agent in known:
        return {"jobs": {}}
    return fleet.failed.get(agent, Unreachable("is no host of conf.py (any more)"))


def _tell(call: Call, answers: Mapping[str, Mapping[str, Stopped]], failed: Mapping[int, ClustertoolError]) -> None:
    """The result per node and job; 76 for survivors, 69 for nodes that did not answer or cannot know.

    `failed`: nodes that did not list their jobs.
    """
    results = {job: {name: read_result(one, job) for name, one in nodes.items()} for job, nodes in answers.items()}
    table = {job: {name: stop_text(one) for name, one in nodes.items()} for job, nodes in results.items()}
    errors: list[ClustertoolError] = []
    for job, nodes in table.items():
        for names, text in gather(nodes):
            call.terminal.line(f"job {job}: {names}: {text}")
        for name, text in nodes.items():
            state = results[job][name].state
            if state is StopState.SURVIVORS:
                errors.append(Survivors(f"job {job}: {text}", "inv stop --force tries again", name))
            elif state is StopState.NO_ANSWER:
                why = answers[job][name]
                fix = "its processes may still run there: stop again when the node is back"
                fix = f"{why.fix}; {fix}" if isinstance(why, ClustertoolError) and why.fix else fix
                errors.append(Unreachable(f"job {job}: {text}", fix, name))
            elif state is StopState.UNKNOWN:
                errors.append(PreflightError(f"job {job}: {text}", "check the node that is named there", name))
    named = {error.node for error in errors}
    errors += [error for error in failed.values() if error.node not in named]
    errors = [error for error in errors if isinstance(error, Survivors)] or errors
    if call.json:
        call.answer({"jobs": table, "exit": exit_json(as_one(errors), "tool")})
    raise_all(errors)
