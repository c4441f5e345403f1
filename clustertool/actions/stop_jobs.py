"""This module stops jobs on all nodes, and proves per node that no process of them is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from clustertool.actions import find_jobs
from clustertool.engines.base import Engine, EngineState
from clustertool.errors import ClustertoolError, PreflightError, Survivors, Unreachable
from clustertool.fleet.fleet import LAG, Fleet, not_listed
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state_names import OUTCOMES, JobState, StopState
from clustertool.model.job.stop_result import read_result
from clustertool.model.wire.agent_answers import JobsAnswer, StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import stop_request
from clustertool.show.job_text import stop_text
from clustertool.ssh.parallel import ParallelWork

LISTING = 10.0  # seconds that a node has to list its jobs
_SECONDS = 30.0  # that the stop of a job may take beyond the grace
_WIDTH = 1000  # requests at a time: nodes end several jobs at once
Stopped = StopAnswer | ClustertoolError  # what a node answers to a stop, or why there is no answer
ByJob = dict[str, dict[str, Stopped]]  # {job: {name of a node: its answer}}


def stop_how(by: str, grace: float, force: bool = False) -> StopHow:
    """Build the parameters of a stop.

    by: what stops the job, for its records. grace: seconds between TERM and KILL. force: KILL at once, and do not leave a
    coordinator that waits for another node.
    """
    return {"by": by, "code": 143, "grace": grace, "force": force}


def unfinished_jobs(known: Mapping[int, JobsAnswer], about: find_jobs.Described | None = None) -> list[str]:
    """List the ids of jobs that may have processes: without an outcome, or LOST and not proved to have ended by their engine.

    about: what the engine knows, see merge_answers().
    """
    found = []
    for job in find_jobs.merge_answers(known, about or {}):
        proved = job["known"] is not None and job["known"].state is EngineState.ENDED
        if job["state"] not in OUTCOMES or (job["state"] is JobState.LOST and not proved):
            found.append(job["id"])
    return found


def stop_jobs(
    fleet: Fleet,
    jobs: Sequence[str],
    how: StopHow,
    known: Mapping[int, JobsAnswer],
    before: ByJob | None = None,
    early: Callable[[ByJob], None] = lambda answers: None,
) -> ByJob:
    """Send all stops at once, and return {job: {name of each of its nodes: its answer, or the error in place of one}}.

    known: the nodes' answers about their jobs. A node that answered is asked to stop those that it listed, any other node to
    stop all of `jobs`. This takes at most the grace and 30 s in all, however many jobs a node lists.

    before: what an earlier request has returned; nodes that have answered that they are clean are not asked again. early: gets
    the answers that are there when no further one has come for 2 s.
    """
    listed, before = find_jobs.summaries_by_job(known), before or {}
    came = {fleet.name(agent) for agent in known}
    done = {job: _select_clean(job, nodes, came) for job, nodes in before.items()}
    queue: list[tuple[int, str, int]] = []  # first one job of each node, then the next: no list delays the others
    for agent in fleet.agents:
        of_agent = jobs if agent not in known else [job for job in jobs if agent in listed.get(job, ())]
        queue += [(turn, job, agent) for turn, job in enumerate(of_agent) if fleet.name(agent) not in done.get(job, ())]
    ours = {host.name: host.index for host in fleet.own_names()}

    def answers(gathered: Mapping[tuple[str, int], Stopped], complete: bool) -> ByJob:
        """Sort answers by job and node, with those from before. complete: with an error for each node without an answer."""
        found = {}
        for job in jobs:
            places, names = find_jobs.locate_nodes(listed.get(job, {}), known, fleet.own_names())
            nodes = {name: places.get(node, ours.get(name, -1)) for node, name in enumerate(names)} or ours
            absent = not_listed([fleet.cluster.hosts[agent] for agent in places.values()])
            found[job] = of_job = dict[str, Stopped]()
            for name, agent in nodes.items():
                if (job, agent) in gathered:
                    of_job[name] = gathered[job, agent]
                elif complete:  # a node that answered, and did not list the job, has nothing to stop
                    of_job[name] = {"jobs": {}} if agent in known else fleet.failed.get(agent, absent)
            of_job.update(done.get(job, {}))
        return found

    queue.sort(key=lambda one: one[0])
    work = [(job, agent) for _, job, agent in queue]
    return answers(_send_stops(fleet, work, how, lambda gathered: early(answers(gathered, False))), True)


def only_engine_can_end(engine: Engine, about: find_jobs.Described, job: str) -> bool:
    """Check whether only the engine can end a job: it is queued, or the agents do not run on its nodes."""
    return not engine.capabilities.live_channels or (job in about and about[job].state is EngineState.QUEUED)


def stop_now(engine: Engine, job: str, how: StopHow) -> dict[str, Stopped]:
    """Stop the job with this id, and return {name of each of its nodes: its answer, or the error in place of one}.

    If only the engine can end it, engine.cancel() does so; {} if that has asked no node. If the fleet was opened with a lag,
    nodes that have answered are stopped before the late ones have logged in. Raises NotFound if no such job is found, or the
    errors of nodes that did not answer instead, and the error of engine.cancel().
    """
    fleet = engine.fleet
    first: ByJob = {}
    if fleet.late:
        first = stop_jobs(fleet, [job], how, find_jobs.ask_jobs(fleet, job, LISTING))
    fleet.wait_for_late()
    known = find_jobs.ask_jobs(fleet, job, LISTING)
    about = find_jobs.ask_engine(engine, known, job)
    find_jobs.choose_job(fleet, known, job, exact=True, known=about)
    if only_engine_can_end(engine, about, job):
        return dict(engine.cancel(job, how))
    return stop_jobs(fleet, [job], how, known, first)[job]


def _select_clean(job: str, answers: Mapping[str, Stopped], came: Collection[str]) -> dict[str, Stopped]:
    """Select the answers that report a clean stop, whose nodes need not be asked again.

    Not selected, and so asked again, is a coordinator that waits for another node, if a node that gave no answer then answers
    now. came: the names of the nodes that answer now.
    """
    results = {name: read_result(answer, job) for name, answer in answers.items()}
    again = any(result.state is StopState.NO_ANSWER and name in came for name, result in results.items())
    clean = [name for name, one in results.items() if one.state is StopState.CLEAN and not (one.waits and again)]
    return {name: answers[name] for name in clean}


def _send_stops(
    fleet: Fleet,
    queue: Sequence[tuple[str, int]],
    how: StopHow,
    early: Callable[[Mapping[tuple[str, int], Stopped]], None],
) -> dict[tuple[str, int], Stopped]:
    """Send a stop for each (job, agent) in parallel, and return {(job, agent): its answer, or the error in place of one}.

    It takes at most the grace and 30 s. A node that was silent before is sent the request without a wait for its answer, and
    keeps its error. early: gets the answers that are there when no further one has come for 2 s.
    """
    seconds = how["grace"] + _SECONDS
    end = time.monotonic() + seconds
    silent = {agent for agent, error in fleet.failed.items() if isinstance(error, Unreachable)}

    def one(item: tuple[str, int]) -> StopAnswer:
        job, agent = item
        left = 0.0 if agent in silent else round(max(0.0, end - time.monotonic()), 1)
        try:
            return fleet.ask_one(agent, stop_request(job, how), left)
        except Unreachable as error:
            raise (fleet.failed[agent] if agent in silent else error) from None

    work = ParallelWork(queue, one, min(_WIDTH, len(queue)))

    def found() -> dict[tuple[str, int], Stopped]:
        """Return what there is of each stop, an error for one without an answer so far."""
        gathered = work.gathered(seconds + 1)
        answers: dict[int, Stopped] = {**gathered.failed, **gathered.ok}
        return {queue[at]: answer for at, answer in answers.items()}

    try:
        work.wait(seconds + 1, fleet.check, LAG)
        pending = {queue[at] for at in work.pending()}
        if pending:
            early({item: answer for item, answer in found().items() if item not in pending})
            work.wait(max(0.0, end + 1 - time.monotonic()), fleet.check)
    finally:
        work.abandon()
    return found()


def failures(
    answers: Mapping[str, Mapping[str, Stopped]], failed: Mapping[int, ClustertoolError]
) -> list[ClustertoolError]:
    """List the errors of a stop: those for survivors; if there are none, those of nodes that did not answer or do not know.

    failed: the errors of nodes that did not list their jobs.
    """
    errors: list[ClustertoolError] = []
    for job, nodes in answers.items():
        for name, answer in nodes.items():
            result = read_result(answer, job)
            text = f"job {job}: {stop_text(result)}"
            if result.state is StopState.SURVIVORS:
                errors.append(Survivors(text, f"{PROGRAM} stop --job {job} --force tries again", name))
            elif result.state is StopState.NO_ANSWER:
                fix = "its processes may still run there: stop again when the node is back"
                fix = f"{answer.fix}; {fix}" if isinstance(answer, ClustertoolError) and answer.fix else fix
                errors.append(Unreachable(text, fix, name))
            elif result.state is StopState.UNKNOWN:
                errors.append(PreflightError(text, "check the node that is named there", name))
    named = {error.node for error in errors}
    errors += [error for error in failed.values() if error.node not in named]
    return [error for error in errors if isinstance(error, Survivors)] or errors
