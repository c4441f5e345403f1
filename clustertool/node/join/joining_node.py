"""This machine's own part in joining: it probes itself, places the job, prepares its supervisor, and takes all of that back."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Callable, FrozenSet, List, NamedTuple, Optional, Set

from clustertool.errors import ClustertoolError, InternalError
from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.joining.join_offers import Offer
from clustertool.model.joining.join_plan import probe_of
from clustertool.model.quantities import whole
from clustertool.model.wire.coordinator_messages import Incarnation
from clustertool.node.agent import launch
from clustertool.node.join.bundle_content import BundleContent
from clustertool.node.join.child_task import PULL_END, UNDO, ChildTask, place_task, probe_task
from clustertool.node.join.epoch_store import StoreMeeting, Won
from clustertool.node.join.join_engine import engine_of
from clustertool.node.join.join_report import JoinReport
from clustertool.node.join.member_record import MemberRecord, events_in, outcome_of
from clustertool.node.join.pods.output_volume import link_output
from clustertool.node.join.pods.workspace_upload import WorkspaceUpload
from clustertool.node.join.workspace_relay import WorkspaceRelay
from clustertool.node.storage import files
from clustertool.node.supervisor.allocation import End, Origin
from clustertool.node.supervisor.notifier import end_senders
from clustertool.node.supervisor.supervisor import Supervisor
from clustertool.node.system import prctl, processes
from clustertool.node.system.child_signals import EndRequest
from clustertool.node.system.process_clock import boottime

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.agent_requests import PlaceRequest
    from clustertool.model.wire.join_messages import PlaceOrder
    from clustertool.model.wire.spec_types import Spec

_PROBE_END = 0.5  # seconds; a probe has nothing to take back
_MOST_ATTEMPTS = 99_999  # a program of the job can damage its records


class OrderResult(NamedTuple):
    """The result of an order: its error if it failed, the facts of a probe, the port of a relay."""

    error: Optional[ClustertoolError] = None
    facts: object = None
    port: int = 0


def own_incarnation() -> Incarnation:
    """Return the boot id, the pid and the start time of this process."""
    return Incarnation(processes.boot_id(), *processes.this_process())


class JoiningNode:
    """This machine in a job that it joins. It executes one order at a time: probe() or place(), then turn() until the result.

    A member of an elastic job has one object for all epochs, and calls begin() before each of them. `umask`: that of the ranks.
    `bundle`: what may contain the workspace. spec: of the order to place, None before it.

    Of an elastic job: record: while no supervisor is prepared, None before the first one. job_began: when the first gathering
    began, by CLOCK_BOOTTIME here. store: of epochs, by which members meet, None without one, and where only the coordinator
    knows the job so far. known: the highest attempt that it has been in, -1 if none. lost: members that were lost and have not
    joined again. fix: what a user does if no coordinator is found.

    And of its present epoch: end: how it has ended, None if the job is over. won: the epoch that this member has taken in the
    store. resigned: it does not coordinate its epoch any more, and joins that of another one. comes_back: the engine may start
    the job again after this end.
    """

    def __init__(self, join: JoinFile, report: JoinReport, umask: int, bundle: Optional[BundleContent]) -> None:
        self.report = report
        self._umask = umask
        self._bundle = bundle
        self.root = files.resolve(join.own.root_dir or join.cluster.root_dir)
        self.record: Optional[MemberRecord] = None
        self._paused: Optional[MemberRecord] = None  # while a supervisor has the same events file and the same socket
        self.job_began = boottime()
        self.store: Optional[StoreMeeting] = None
        self.known = -1
        self.lost: FrozenSet[int] = frozenset()
        self.fix = ""
        self.begin(join)

    def begin(self, join: JoinFile) -> None:
        """Reset the object for a job to join, or for the next epoch: nothing is placed or prepared, and no end is known."""
        self.join = join
        self.allocation = engine_of(join).allocation(join)
        self.upload = WorkspaceUpload(self.root, join)
        self.relay = WorkspaceRelay(join.identity, self.root)
        self._busy: Optional[ChildTask] = None  # what works now
        self._placed: Optional[ChildTask] = None  # what keeps the job placed
        self.spec: Optional[Spec] = None
        self._supervisor: Optional[Supervisor] = None
        self.end: Optional[EpochEnd] = None
        self.won: Optional[Won] = None
        self.resigned = False
        self.comes_back = False

    @property
    def name(self) -> str:
        """The name of this machine: from its own settings, else the host name."""
        return self.join.own.name or socket.gethostname()

    def offer(self, address: str, index: Optional[int]) -> Offer:
        """Build the first message to the coordinator: number, version, process, address and name of this machine.

        address: of this machine, on the way to the coordinator. A machine that has been in an epoch adds job and attempt.
        """
        join, me = self.join, own_incarnation()
        job = join.identity.job_id if self.known >= 0 else ""
        return Offer(index, join.nnodes, join.version, join.code, me, address, self.name, job, self.known)

    def leave_allocation(self, end: End) -> None:
        """Leave the engine's allocation, as the last action, and report as a warning what went wrong.

        Before that, wait for the processes that send notifications.
        The engine may start the job again then, and need not wait for a lost node.
        """
        end_senders()  # an engine ends all processes of the job with this one
        wrong = self.allocation.leave(end)
        if wrong:
            self.report.warning(wrong)

    def all_have_joined(self) -> None:
        """Remove the bundle of an engine's job, unless the engine may start its machines again, or the job is elastic."""
        if not (self.join.of_engine.keep_bundle or self.join.job.elastic.present):
            self.remove_bundle()

    def remove_bundle(self) -> None:
        """Remove the bundle if the engine's machines do that. An error is reported as a warning: the file has the job's key."""
        if self._bundle is None or not engine_of(self.join).removes_bundle:
            return
        try:
            self._bundle.remove()
        except OSError as error:
            self.report.warning(f"{error.filename} has the job's key and cannot be removed: {error.strerror}")

    def wires(self) -> List[FileDescriptorLike]:
        """List the descriptors that wake turn()."""
        own = self.record.wires() if self.record is not None else []
        return [*([self._busy] if self._busy is not None else []), *self.relay.wires(), *own]

    @property
    def stopped(self) -> Optional[ClustertoolError]:
        """The error that stands for a stop by the user between two epochs; None without one."""
        return self.record.stopped if self.record is not None else None

    def probe(self, address: str) -> None:
        """Start a child that installs the content of the bundle and probes this machine; turn() returns the facts.

        Another child is ended before, and what it has done is taken back.
        """
        request = probe_of(self.join, self.join.own, address)

        def install() -> None:
            if self._bundle is not None:
                self._bundle.install(self.root, self.join.release)
                self._bundle.install_nvml()

        self._end_task()
        self.spec = None
        container = self.join.job.container
        patience = PULL_END + _PROBE_END if container else _PROBE_END
        self._busy = ChildTask(probe_task(request, self.root, install, container), patience)

    def place(self, order: PlaceOrder) -> None:
        """End the relay, report the order's warnings, and start a child that places the job; turn() returns the result."""
        self.relay.end()  # all machines have the workspace
        spec = self.spec = order["spec"]
        for warning in order["warnings"]:
            self.report.warning(warning)
        volume = self.join.of_engine.output

        def finish() -> None:
            if volume:
                link_output(spec, volume, self._umask)

        request: PlaceRequest = {"spec": spec, "release": order["release"], "resume": self.join.own.resume}
        self._busy = ChildTask(place_task(request, finish=finish), UNDO)

    def turn(self, ready: Set[int]) -> Optional[OrderResult]:
        """Let record and relay work, and return the result of the present order once there is one, else None.

        An error of the order is in the result.
        """
        if self.record is not None:
            self.record.turn()
        try:
            if self.relay.turn(ready):
                return OrderResult(port=self.relay.port)
        except ClustertoolError as error:
            self.relay.end()
            return OrderResult(error)
        task = self._busy
        if task is None or task.fileno() not in ready:
            return None
        try:
            reply = task.reply()
        except ClustertoolError as error:
            if self.spec is None:
                self._end_task()
            else:  # undo() ends it, later: this takes long where a file system does not answer
                self._busy, self._placed = None, task
            return OrderResult(error)
        if reply is None:
            return None
        if "facts" in reply:
            self._end_task()
            return OrderResult(facts=reply["facts"])
        self._busy, self._placed = None, task
        return OrderResult()

    def _end_task(self) -> None:
        """End the child that works now, if there is one, and take back what it has done."""
        if self._busy is not None:
            self._busy.undo()
        self._busy = None

    def launch(self, now: float) -> None:
        """Prepare the supervisor, with secrets and keys: nothing of the job's runs yet. now: the coordinator's time.

        The member's record is closed, or opened again after an error. Raises ClustertoolError, also where the user has stopped
        the job meanwhile.
        """
        if self.stopped is not None:
            raise self.stopped
        spec = self.spec
        if spec is None or self._placed is None:
            raise InternalError("a job was launched before it was placed")
        values = dict(self.join.secrets)
        spec["secrets"] = {name: values[name] for name in self.join.job.elastic.server.of_ranks(values)}
        spec["certificate"], spec["key"] = self.join.identity.certificate, self.join.identity.key
        spec["notify"] = list(self.join.cluster.notify)
        spec["header"]["skew"] = launch.counted_skew(time.time() - now)
        file = self._bundle.data if self._bundle is not None else b""
        # A machine that `grow` adds gets the code of the node from its laptop.
        bundle = self.join.for_others if self.join.job.elastic.present else file
        if "elastic" in spec:
            self.join, self.job_began = self.join.of_job(spec), boottime() - spec["elastic"]["age"]
        origin = Origin(bundle, self.allocation, self._store_end(spec), file)
        supervisor = Supervisor(spec, files.open_job_dir(spec["job_dir"]), self._umask, origin)
        task = processes.identify(self._placed.pid)
        supervisor.guard.spared = (task,) if task is not None else ()  # if this process dies, it takes the job back
        if self.record is not None:
            self.record.close()
        self.record, self._paused = None, self.record
        try:
            supervisor.prepare()
        except ClustertoolError:
            supervisor.leave()
            self._resume_record()
            raise
        self._supervisor = supervisor

    def _store_end(self, spec: Spec) -> Optional[Callable[[], float]]:
        """Create the function that returns by when the epoch's ranks must be dead here, as the store decides; None without it.

        Opens the store if it is not open, and follows the epoch there unless this node coordinates it.
        """
        if self.store is None and self.join.job.elastic.server.present:
            self.store = StoreMeeting(self.join, own_incarnation())
        store = self.store
        if store is None:
            return None
        coordinates = spec["node"] == spec["lead"]["node"]
        if not coordinates:
            store.follow(spec["elastic"]["epoch"])
        return store.ranks_deadline(coordinates)

    def undo(self) -> None:
        """Take back the supervisor, the work of a child, the relay, and the placed job. Returns when that is over."""
        if self._supervisor is not None:
            self._supervisor.leave()
            self._supervisor = None
            self._resume_record()
        self._end_task()
        self.relay.end()
        if self._placed is not None:
            self._placed.undo()
            self._placed = None

    def run(self, request: Optional[EndRequest] = None) -> int:
        """Run the node's supervisor until the job or its epoch is over, and return the exit code. request: to end it at once.

        From now on this process does not end with its parent, and the placed job is not taken back. Sets `end` after an epoch.
        After the job, reports the outcome, leaves the allocation where this node has to, and sets `comes_back`. If this node
        coordinates, and the engine does not start the job again, it removes the bundle.
        """
        supervisor, task = self._supervisor, self._placed
        assert supervisor is not None and task is not None and self.spec is not None
        task.keep()
        prctl.end_with_parent(0)
        self.report.planned(self.spec)
        self.report.started()
        if request is not None:
            supervisor.obey_signal(request)
        supervisor.run()
        outcome = supervisor.outcome
        assert outcome is not None, "the supervisor runs until it knows the outcome"
        if outcome.state is JobState.NEXT_EPOCH:
            self.end = supervisor.epoch_end
            self.report.epoch_ended(outcome)
            return outcome.code
        self.report.ended(outcome)
        silent = supervisor.link.silent or (supervisor.coordinates and self._has_absent_member(self.spec))
        if supervisor.coordinates or silent:
            self.leave_allocation(End(supervisor.coordinates, silent, outcome.state is JobState.LOST))
        self.comes_back = self.join.of_engine.keep_bundle and self.allocation.comes_back(outcome)
        if supervisor.coordinates and not self.comes_back:
            self.remove_bundle()
        return outcome.code

    def _has_absent_member(self, spec: Spec) -> bool:
        """Check whether a lost member was not in the last epoch: the engine may wait for its node."""
        return bool(self.lost) and not self.lost <= frozenset(spec["shape"]["nodes"])

    def record_event(self, kind: str, **fields: object) -> None:
        """Record an event of this node: by its supervisor, else by the record between two epochs, if there is one."""
        if self._supervisor is not None:
            self._supervisor.record(kind, **fields)
        elif self.record is not None:
            self.record.record(kind, **fields)

    def _resume_record(self) -> None:
        """Open the record between two epochs again, if there was one, since the supervisor was taken back."""
        if self._paused is not None:
            self.record, self._paused = MemberRecord(self._paused.spec, self._paused.bundle), None

    def record_outcome(self, outcome: Outcome, coordinates: bool = False) -> None:
        """Record the outcome, and close the record between epochs, if there is one. coordinates: this node decides."""
        if self.record is not None:
            self.record.end(outcome, coordinates)
            self.record.close()
            self.record = None

    def record_error(self, error: ClustertoolError, coordinates: bool) -> None:
        """Call record_outcome() with the outcome of an error with which the job ends here. coordinates: see there."""
        if self.record is not None:
            self.record_outcome(outcome_of(error, self.record.spec["lead"]["node"]), coordinates)

    def first_attempt(self, job_dir: str) -> int:
        """Compute the number of the first attempt of this start, 0 if the engine has not started the job before.

        It is the number of these starts, or more if the events of the job's directory have later attempts (--max-restarts).
        """
        restarts = self.allocation.restarts
        if not restarts:
            return 0
        starts = [event for event in events_in(job_dir) if event["type"] in ("started", "restart", "epoch")]
        begun = [event.get("attempt", 0) for event in starts]
        numbers = [number for number in (whole(one, 0, _MOST_ATTEMPTS) for one in begun) if number is not None]
        return max([restarts, *(number + 1 for number in numbers)])
