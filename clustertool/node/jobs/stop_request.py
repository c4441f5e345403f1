"""A stop asks the supervisor, and then ends this job's processes on the node until none is alive."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Dict, Sequence, Type, cast

from clustertool.errors import NotFound, PreflightError
from clustertool.model.hints import PROGRAM
from clustertool.model.job.caretakers import CARETAKERS
from clustertool.model.job.state_names import JobState, StopState
from clustertool.model.rank_signals import FOR_RANKS
from clustertool.node.jobs import descendants, queries, records, supervisor_client
from clustertool.node.jobs.descendants import JobSearch
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system import node_context, processes
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, JobStop, StopAnswer
    from clustertool.model.wire.agent_requests import JobRequest, SignalRequest, StopRequest
    from clustertool.model.wire.supervisor_messages import StopCommand
    from clustertool.node.jobs.termination import Sweep

_REACTION = 3.0  # seconds that a supervisor on a busy machine may take to react
_NOTICE = 1.0  # seconds for a notice, which comes once a second
_WORKING = 10.0  # and to end processes that resist KILL, after the grace; or to call a silent node lost
_LEAVING = 3.0  # and to get the coordinator's verdict when all is clean
_SAME = 5.0  # and to learn of one stop in two ways
_POLL, _LONGEST = 0.02, 0.25
_FIX = "end its processes on that node by hand; then remove its directory, and run {program} clean --job {job}"
_ALREADY: JobStop = {"state": StopState.ENDED_ALREADY, "survivors": []}


def stop_jobs(node: NodeContext, request: StopRequest) -> StopAnswer:
    """Stop the jobs, and return each job's answer. A job with unusable records does not keep the others running."""
    found: Dict[str, JobStop] = {}
    for record in queries.records_and_orphans(node, request):
        try:
            found[record.job] = stop(record, request["by"], request["code"], request["grace"], request["force"])
        except Exception as error:  # noqa: BLE001 - one job's records must not hide another's
            found[record.job] = {"state": StopState.UNKNOWN, "survivors": [], "why": queries.bug(error)}
    return {"jobs": found}


def attached(node: NodeContext, request: JobRequest) -> Answer:
    """Report to the supervisor that a laptop follows the job, for --lease. The supervisor may have ended."""
    supervisor_client.order(queries.record_of(node, request["job"]).paths, {"type": "attached"}, _NOTICE)
    return {}


def signal_ranks(node: NodeContext, request: SignalRequest) -> Answer:
    """Send a signal for ranks to the supervisor of a job, which passes it on to its own. The job may have ended."""
    if request["number"] in FOR_RANKS:
        for supervisor in queries.record_of(node, request["job"]).caretakers(None, ("supervisor",)):
            processes.signal_one(supervisor, request["number"])
    return {}


def lives(record: Record) -> bool:
    """Check whether anything of a job lives here, its supervisor included. Raises PreflightError where this cannot be known."""
    why = record.unknown()
    if why:
        raise PreflightError(f"job {record.job} is not removed: {why}", _FIX.format(program=PROGRAM, job=record.job))
    if record.other_machine() or record.blank():  # it has ended there, or never started
        return False
    with _Left(record) as left:
        living = left.search.living()
        if record.last().ended is not None:  # supervisor and guard are about to leave then
            living = [process for process in living if process not in left.caretakers]
        return bool(living)


def remove_containers(record: Record) -> None:
    """Remove the containers of a job of which no process lives. Raises PreflightError if one is left."""
    with _Left(record) as left:
        containers = left.sweep().remove_containers()
    if containers:
        what = f"job {record.job} is not removed: {', '.join(containers)}"
        raise PreflightError(what, _FIX.format(program=PROGRAM, job=record.job).replace("processes", "containers"))


def stop(record: Record, by: str, code: int, grace: float, force: bool) -> JobStop:
    """Stop a job here: {"state": "clean" | "survivors" | "ended already" | "unknown", "survivors": [...]} for this node.

    With "waits": True only a coordinator is alive that still has to inform another node, as it does when that one is back;
    `force` ends that too. "unknown" comes with `why`: processes may be alive that could not be searched.
    """
    grace = 0.0 if force else grace
    end = time.monotonic() + _REACTION + grace + _WORKING + _LEAVING
    if record.trouble or (record.other_machine() and not record.own().clean):
        return _unknown(record)
    if record.other_machine():
        return _ALREADY
    if record.blank():
        return _answer([])
    with _Left(record) as left:
        if not left.search.living():
            if record.unknown():
                return _unknown(record)
            if left.key is not None:  # supervisor and guard were killed
                left.sweep().remove_session()
            if not record.own().clean:
                containers = left.sweep().remove_containers()
                if containers:
                    return _answer(containers)
            return _clean(record) if _just_stopped(record) else _ALREADY
        how: StopCommand = {"type": "stop", "by": by, "code": code, "grace": grace, "force": grace == 0}
        accepted = _order(left, how)
        done = accepted and left.supervisor is not None and _ends(record, left.supervisor, grace)
        if not done and record.own().step != "ended":  # by itself, meanwhile
            return _take_over(left, by, grace)
        if _leave(left.caretakers, end):
            return _clean(record)
        if left.coordinates and not force:
            return {**_clean(record), "waits": True}
        return _take_over(left, by, 0.0)


def _order(left: _Left, how: StopCommand) -> bool:
    """Order the stop, and return whether the supervisor has accepted it.

    In an elastic job it has no socket for a moment between two epochs.
    """
    end = time.monotonic() + _REACTION
    while not supervisor_client.order(left.record.paths, how, _REACTION, left.responsive):
        comes_back = "lead" in left.record.header and left.supervisor is not None and _runs(left.supervisor)
        if not comes_back or left.record.own().step == "ended" or time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True


def _unknown(record: Record) -> JobStop:
    return {"state": StopState.UNKNOWN, "survivors": [], "why": record.unknown()}


def _just_stopped(record: Record) -> bool:
    """Check whether this stop has arrived before: it reached another node first, whose supervisor informed the coordinator."""
    own = record.last()
    stopped = own.ended is not None and own.ended.state is JobState.STOPPED
    return stopped and time.time() - own.ended_at < _SAME


class _Left:
    """What there is of a job on this node: supervisor and guard if they live, and a search that finds the rest.

    `job`: the descriptor of its directory, -1 where a program has removed that or its marker.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.key = record.key()
        self.coordinates = self.key is not None and self.key.coordinates
        self.job = -1
        own = record.own()
        self.supervisor = record.process("supervisor", own)
        self.caretakers = record.caretakers(own, CARETAKERS)

    def __enter__(self) -> _Left:
        with contextlib.suppress(NotFound):
            self.job = files.open_job_dir(self.record.paths.dir)
        # Without a supervisor of this boot they are of another boot, and so are their numbers.
        known = descendants.recorded(self.job) if self.supervisor else []
        self.search = JobSearch([*known, *self.caretakers], self.key.mark if self.key else "")
        return self

    def sweep(self) -> Sweep:
        """Create what ends the job without its supervisor.

        No healthy job needs its modules, half of what a stop would import.
        """
        made = cast("Type[Sweep]", node_context.load_on_demand("jobs.termination:Sweep"))
        container = self.record.container() if self.key else None
        return made(self.search.known, self.search.mark, container, self.record.main_processes())

    def responsive(self) -> bool:
        """Check whether the supervisor can answer; also if it is not known which process it is."""
        return self.supervisor is None or _runs(self.supervisor)

    def __exit__(self, *_: object) -> None:
        if self.job >= 0:
            os.close(self.job)


def _answer(survivors: Sequence[str]) -> JobStop:
    return {"state": StopState.SURVIVORS if survivors else StopState.CLEAN, "survivors": list(survivors)}


def _runs(supervisor: Process) -> bool:
    return processes.alive(supervisor) and not processes.stopped(supervisor)


def _ends(record: Record, supervisor: Process, grace: float) -> bool:
    """Wait for the supervisor, and return whether it has read the request and has ended everything in time."""
    start, verdict, size = time.monotonic(), "", -1
    while _runs(supervisor):
        if record.size() != size:  # all events of a long job take a while
            size, verdict = record.size(), record.own().step
        if verdict in ("clean", "ended"):
            return True
        waited = time.monotonic() - start
        if waited > (grace + _WORKING if verdict == "stopping" else _REACTION):
            return False
        time.sleep(_pause(waited))
    return record.own().step in ("clean", "ended")


def _leave(caretakers: Sequence[Process], end: float) -> bool:
    """Wait until supervisor and guard have left: after the verdict, and the coordinator after all others are clean or lost."""
    start = time.monotonic()
    while any(processes.alive(process) for process in caretakers):
        now = time.monotonic()
        if now > end:
            return False
        time.sleep(_pause(now - start))
    return True


def _pause(waited: float) -> float:
    """Compute the seconds until the next check: an answer is late by a tenth of its time, and waiting needs little CPU time."""
    return min(max(_POLL, waited / 10), _LONGEST)


def _clean(record: Record) -> JobStop:
    """Answer that nothing of the job lives, or what the supervisor named."""
    return _answer(record.own().survivors)


def _take_over(left: _Left, by: str, grace: float) -> JobStop:
    """End a job whose supervisor is dead or frozen. It is ended first, so that nothing is started again; its children follow.

    A coordinator on another node records this node as lost after its timeout: the key to inform it is on no disk.
    """
    left.search.living()
    for process in left.caretakers:
        processes.signal_one(process, signal.SIGKILL)
    sweep = left.sweep()
    survivors = sweep.end(grace)
    if left.record.own().step != "ended":
        records.record_loss(left.job, f"{by} found that it does not respond")
    if left.key is None:
        why = "what is known of it was ended, but its records are damaged"
        return {"state": StopState.UNKNOWN, "survivors": survivors, "why": why}
    sweep.remove_session()
    records.record_clean(left.job, survivors)
    return _answer(survivors)
