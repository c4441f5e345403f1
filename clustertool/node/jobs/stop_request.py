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
    from clustertool.model.wire.agent_requests import AttachedRequest, SignalRequest, StopRequest
    from clustertool.model.wire.supervisor_messages import AttachedNotice, StopCommand
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
    """Stop the jobs that the request names, orphans too. Return an answer for each, also after an unexpected error."""
    found: Dict[str, JobStop] = {}
    for record in queries.records_and_orphans(node, request):
        try:
            found[record.job] = stop(record, request["by"], request["code"], request["grace"], request["force"])
        except Exception as error:  # noqa: BLE001 - one job's records must not hide another's
            found[record.job] = {"state": StopState.UNKNOWN, "survivors": [], "why": queries.bug(error)}
    return {"jobs": found}


def attached(node: NodeContext, request: AttachedRequest) -> Answer:
    """Send the supervisor the notice of a laptop that follows the job; ignore that the supervisor may have ended."""
    notice: AttachedNotice = {"type": "attached", "laptop": request["laptop"], "notified": request["notified"]}
    supervisor_client.order(queries.record_of(node, request["job"]).paths, notice, _NOTICE)
    return {}


def signal_ranks(node: NodeContext, request: SignalRequest) -> Answer:
    """Send a signal for ranks to the supervisor of a job, which sends it to its ranks; ignore other signals.

    Does nothing if no supervisor lives.
    """
    if request["number"] in FOR_RANKS:
        for supervisor in queries.record_of(node, request["job"]).caretakers(None, ("supervisor",)):
            processes.signal_one(supervisor, request["number"])
    return {}


def lives(record: Record) -> bool:
    """Check whether a process of a job lives here; supervisor and guard count until they have recorded the job's end.

    Raises PreflightError if this cannot be known.
    """
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
    """Stop a job on this node, by its supervisor or else without it. Return the state, and survivors or a reason.

    by, code: what stops it, and the job's exit code. The states: clean, survivors, ended already, unknown. With "waits": True
    only a coordinator lives that still has to inform another node, as it does when that one is back; `force` ends that too.
    "unknown" comes with `why`: processes may be alive that could not be searched.
    """
    grace = 0.0 if force else grace
    end = time.monotonic() + _REACTION + grace + _WORKING + _LEAVING
    if record.trouble or (record.other_machine() and not record.own().clean):
        return _unknown_answer(record)
    if record.other_machine():
        return _ALREADY
    if record.blank():
        return _answer([])
    with _Left(record) as left:
        if not left.search.living():
            if record.unknown():
                return _unknown_answer(record)
            if left.key is not None:  # supervisor and guard were killed
                left.sweep().remove_session()
            if not record.own().clean:
                containers = left.sweep().remove_containers()
                if containers:
                    return _answer(containers)
            return _recorded_answer(record) if _just_stopped(record) else _ALREADY
        how: StopCommand = {"type": "stop", "by": by, "code": code, "grace": grace, "force": grace == 0}
        accepted = _order_stop(left, how)
        done = accepted and left.supervisor is not None and _wait_for_end(record, left.supervisor, grace)
        if not done and record.own().step != "ended":  # by itself, meanwhile
            return _take_over(left, by, grace)
        if _wait_for_caretakers(left.caretakers, end):
            return _recorded_answer(record)
        if left.coordinates and not force:
            return {**_recorded_answer(record), "waits": True}
        return _take_over(left, by, 0.0)


def _order_stop(left: _Left, how: StopCommand) -> bool:
    """Send the order to stop to the supervisor, and return whether it has accepted it.

    In an elastic job it has no socket for a moment between two epochs: repeats the order for up to 3 s.
    """
    end = time.monotonic() + _REACTION
    while not supervisor_client.order(left.record.paths, how, _REACTION, left.responsive):
        comes_back = "lead" in left.record.header and left.supervisor is not None and _can_react(left.supervisor)
        if not comes_back or left.record.own().step == "ended" or time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True


def _unknown_answer(record: Record) -> JobStop:
    """Build the answer that it is not known whether the job runs, with the reason."""
    return {"state": StopState.UNKNOWN, "survivors": [], "why": record.unknown()}


def _just_stopped(record: Record) -> bool:
    """Check whether the job has ended as stopped in the last 5 s: then this stop has reached another node before.

    That node's supervisor has informed the coordinator.
    """
    own = record.last()
    stopped = own.ended is not None and own.ended.state is JobState.STOPPED
    return stopped and time.time() - own.ended_at < _SAME


class _Left:
    """What there is of a job on this node: supervisor and guard if they live, and a search that finds the rest.

    As a context manager it opens the job's directory. job: its descriptor, -1 where a program has removed that or its marker.
    """

    def __init__(self, record: Record) -> None:
        """Read the job's mark, supervisor and living caretakers from its records."""
        self.record = record
        self.key = record.key()
        self.coordinates = self.key is not None and self.key.coordinates
        self.job = -1
        own = record.own()
        self.supervisor = record.process("supervisor", own)
        self.caretakers = record.caretakers(own, CARETAKERS)

    def __enter__(self) -> _Left:
        """Open the job's directory, if it exists, and prepare the search with the recorded processes and the mark."""
        with contextlib.suppress(NotFound):
            self.job = files.open_job_dir(self.record.paths.dir)
        # Without a supervisor of this boot they are of another boot, and so are their numbers.
        known = descendants.recorded(self.job) if self.supervisor else []
        self.search = JobSearch([*known, *self.caretakers], self.key.mark if self.key else "")
        return self

    def sweep(self) -> Sweep:
        """Create the Sweep that ends the job without its supervisor.

        Its modules are imported only now: no healthy job needs them, and they are half of what a stop would import.
        """
        made = cast("Type[Sweep]", node_context.load_on_demand("jobs.termination:Sweep"))
        container = self.record.container() if self.key else None
        return made(self.search.known, self.search.mark, container, self.record.main_processes())

    def responsive(self) -> bool:
        """Check whether the supervisor lives and is not stopped; True also if it is not known which process it is."""
        return self.supervisor is None or _can_react(self.supervisor)

    def __exit__(self, *_: object) -> None:
        if self.job >= 0:
            os.close(self.job)


def _answer(survivors: Sequence[str]) -> JobStop:
    """Build the answer "survivors" with their descriptions, or "clean" if there are none."""
    return {"state": StopState.SURVIVORS if survivors else StopState.CLEAN, "survivors": list(survivors)}


def _can_react(supervisor: Process) -> bool:
    """Check whether a supervisor lives and is not stopped by a signal."""
    return processes.alive(supervisor) and not processes.stopped(supervisor)


def _wait_for_end(record: Record, supervisor: Process, grace: float) -> bool:
    """Wait until the supervisor has recorded that nothing lives; return False if it does not react, or is too late.

    It has 3 s to begin, and then the grace and 10 s.
    """
    start, verdict, size = time.monotonic(), "", -1
    while _can_react(supervisor):
        if record.size() != size:  # all events of a long job take a while
            size, verdict = record.size(), record.own().step
        if verdict in ("clean", "ended"):
            return True
        waited = time.monotonic() - start
        if waited > (grace + _WORKING if verdict == "stopping" else _REACTION):
            return False
        time.sleep(_pause(waited))
    return record.own().step in ("clean", "ended")


def _wait_for_caretakers(caretakers: Sequence[Process], end: float) -> bool:
    """Wait until supervisor and guard have ended; return False if they have not by `end`.

    A coordinator ends after all other nodes are clean or lost.
    """
    start = time.monotonic()
    while any(processes.alive(process) for process in caretakers):
        now = time.monotonic()
        if now > end:
            return False
        time.sleep(_pause(now - start))
    return True


def _pause(waited: float) -> float:
    """Return the seconds until the next check: a tenth of those that were waited, from 0.02 to 0.25.

    So an answer is late by a tenth of its time, and waiting needs little CPU time.
    """
    return min(max(_POLL, waited / 10), _LONGEST)


def _recorded_answer(record: Record) -> JobStop:
    """Build the answer from the survivors that the job's events name."""
    return _answer(record.own().survivors)


def _take_over(left: _Left, by: str, grace: float) -> JobStop:
    """End a job whose supervisor is dead or frozen: kill supervisor and guard, end all processes, and remove containers.

    Returns "clean", or "survivors" with what is left; without a mark "unknown". Records the loss of the supervisor, which `by`
    found, if no end is recorded, and with a mark what is left. The supervisor is ended first, so that nothing is started again.
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
