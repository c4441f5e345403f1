"""The supervisor owns the processes of one job on one node: one loop, one waitpid, detached from ssh.

It starts ranks on the coordinator's order and reports what happens to them. It ends all processes on the coordinator's order,
when the coordinator is silent for the loss timeout, and on a request on its socket. Every event goes into the events file
first.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from clustertool.errors import Interrupted, NotFound, PreflightError
from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.job.outcome import MESSAGE_FIELDS, Key, Outcome, RankExit, some
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.roles import MPI_DAEMON
from clustertool.model.shape import read, to_plain
from clustertool.model.wire import record_lines
from clustertool.model.wire.coordinator_messages import Incarnation, Order, StopMessage, is_outdated
from clustertool.node.container.rank_containers import helpers
from clustertool.node.jobs import rank_log
from clustertool.node.jobs.descendants import Descendants
from clustertool.node.jobs.ledger import Ledger
from clustertool.node.jobs.termination import Shutdown
from clustertool.node.storage import files
from clustertool.node.storage.reserving_journal import ReservingJournal
from clustertool.node.supervisor.allocation import AGENT, Origin
from clustertool.node.supervisor.control_socket import ControlSocket, LauncherRequests, UserRequests, Waiting
from clustertool.node.supervisor.coordinator.coordinator_link import (
    CoordinatorClient,
    CoordinatorLink,
    may_leave,
    require_may_leave,
)
from clustertool.node.supervisor.coordinator.coordinator_server import CoordinatorServer
from clustertool.node.supervisor.guard import GuardKeeper
from clustertool.node.supervisor.node_monitor import NodeMonitor
from clustertool.node.supervisor.node_resources import NodeResources
from clustertool.node.supervisor.rank_table import LocalRank, PendingServer, RankTable
from clustertool.node.supervisor.stack_requests import StackRequests
from clustertool.node.system import prctl, processes
from clustertool.node.system.child_signals import EndRequest, Signals, changed_children
from clustertool.node.system.tls_link import wait_for

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire import supervisor_messages as messages
    from clustertool.model.wire.spec_types import Spec

Event = Tuple[str, Dict[str, object]]  # its type and its fields
# Bytes of the events file that are kept free on the disk for the last events: for all, for each process of this node, and
# for each rank in a verdict.
_LAST_EVENTS, _OF_PROCESS, _OF_RANK = 16 << 10, 2 << 10, 64
_FILES = 200  # descriptors for all but the nodes' connections: logs, connections that have not joined yet
_TICK = 0.1
_IDLE_TICK = 0.25  # before a rank was started, and between two attempts
_WAITING_TICK = 0.03  # while pservers are expected to listen, or processes to end
# Seconds between an engine's signal to one process of the job, and to another; or the end of a rank by it.
_OUTSIDE = 2.0
_VERDICT_WAIT = 1.0  # seconds a stopped node waits for the coordinator's verdict
_ACCEPTED: messages.Accepted = {"type": "accepted"}
_BUNDLE: messages.BundleAnswer = {"type": "bundle"}


class NodeEnd(NamedTuple):
    """How a supervisor ends. outcome: of the job on this node; NEXT_EPOCH, with `epoch`; or None if no rank could run."""

    outcome: Optional[Outcome]
    epoch: Optional[EpochEnd] = None
    events: Tuple[Event, ...] = ()


def node_end(
    outcome: Optional[Outcome], requests: UserRequests, survivors: Sequence[str], link: CoordinatorLink, spec: Spec
) -> NodeEnd:
    """Determine how this node ends: its outcome, the epoch's end if the job goes on, and the last events. Record nothing.

    outcome: of the job or its epoch, decided by the coordinator, or here if it was silent; None if no rank could run.
    survivors: processes that cannot be ended. With them, or after a stop that was requested here, the node takes part in no
    other epoch, and has an outcome of its own.
    """
    if outcome is None:
        return NodeEnd(None)
    left: Tuple[Event, ...] = (("left", {"why": requests.leave_by}),) if requests.leave_by else ()
    if outcome.state is not JobState.NEXT_EPOCH:
        alone = left if outcome == requests.left else ()
        return NodeEnd(outcome, None, (*alone, ("ended", outcome.as_record())))
    own = _own_outcome(requests, survivors, spec)
    if own is not None:
        verdict: Tuple[Event, ...] = (("verdict", own.as_record()),) if spec["node"] == spec["lead"]["node"] else ()
        return NodeEnd(own, None, (*verdict, ("ended", own.as_record())))
    end = link.epoch_end(outcome)
    ended: Event = ("epoch-ended", {"attempt": end.attempt, "why": end.why})
    if left:
        end = end._replace(left=tuple(sorted({*end.left, spec["node"]})), code=requests.code)
    return NodeEnd(outcome, end, (ended, *left))


def _own_outcome(requests: UserRequests, survivors: Sequence[str], spec: Spec) -> Optional[Outcome]:
    """Return the outcome of a node that takes part in no other epoch: LOST with survivors, that of a stop, or None."""
    if survivors:
        brief = f"processes on {spec['name']} cannot be ended"
        return Outcome(JobState.LOST, 75, "tool", f"{brief}: {some(survivors)}", node=spec["node"], brief=brief)
    return requests.stopped  # the coordinator did not learn of it, or too late


class Supervisor:
    """The owner of a job's processes on a node. spec: this node's part. job: its directory's descriptor; leave() closes it."""

    def __init__(self, spec: Spec, job: int, umask: int, origin: Origin = AGENT) -> None:
        """Open the files of events and of descendants, and create the parts of a supervisor; prepare() starts them."""
        self.spec = spec
        self.job = job
        self.origin = origin
        ahead = _LAST_EVENTS + _OF_PROCESS * len(spec["processes"]) + _OF_RANK * len(spec["endpoints"])
        self.events = ReservingJournal(files.open_append(job, f"{OURS}/events.jsonl"), ahead)
        self.ledger = Ledger(spec)  # has a copy of what a stop needs
        self.family = Descendants(job, processes.this_process())
        origin.allocation.attach(self.family.spare)
        self.ranks = RankTable(spec, job, umask)
        self.monitor = NodeMonitor(spec, job, self.family, self.ranks, self.record)
        self.resources = NodeResources(spec)
        self.guard = GuardKeeper(self.family, spec, job, self.record)
        self.control = ControlSocket(job)
        self.stacks = StackRequests(self.family, self.ranks, self.control, spec)
        self.mpirun = LauncherRequests(self.ranks, self.control, self._adopt)
        self.link = CoordinatorLink()
        self.link.attempt = spec.get("attempt", 0)
        self.shutdown: Optional[Shutdown] = None  # of this attempt
        self.outcome: Optional[Outcome] = None
        self.signals: Optional[Signals] = None
        self.epoch_end: Optional[EpochEnd] = None  # after leave(), in an elastic job that goes on
        self.requests = UserRequests()
        self._deferred: List[Order] = []  # see _defer()
        self._removed = 0  # samples since the records of the job were removed

    @property
    def attempt(self) -> int:
        """The number of the present attempt, from 0."""
        return self.link.attempt

    @property
    def coordinates(self) -> bool:
        """Whether this node coordinates the job."""
        return self.spec["node"] == self.spec["lead"]["node"]

    @property
    def _ends_from_outside(self) -> bool:
        """Whether a signal to all processes of this node is an orderly end, and no failure of its ranks."""
        return self.origin.allocation.present or "elastic" in self.spec

    # -- life --

    def prepare(self) -> None:
        """Do all that can fail before a rank runs: reserve ports and devices, start control socket, guard and link.

        Records the job and this process. Raises PreflightError if a part of this fails.
        """
        self.ranks.containers.prepare()
        prctl.become_subreaper()
        processes.set_name("ct-supervisor")
        self.signals = Signals()
        self.resources.reserve()
        self.guard.inherited = self.resources.inherited
        self.control.create(self.spec)
        self.ranks.launched.prepare(self.job, self.origin.file)
        self.monitor.endpoint.start()  # its thread gets no signal, since they are blocked now
        self.record("job", **self.spec["header"])
        me = self.family.head
        self.record(
            "supervisor", pid=me.pid, start=me.start, boot=processes.boot_id(), space=processes.namespace("pid")
        )
        try:
            self.guard.start()
        except OSError as error:
            what = f"no process can be started: {error.strerror}"
            raise PreflightError(what, "check ulimit -u on the node") from None
        incarnation, attempt = Incarnation(processes.boot_id(), *me), self.attempt
        store_end = self.origin.store_end
        if self.coordinates:
            self.ranks.raise_file_limit(_FILES + 2 * len(self.spec["shape"]["names"]))
            self.link = CoordinatorServer(self.spec, incarnation, self.record, self.origin.allocation, store_end)
        else:
            self.link = CoordinatorClient(self.spec, incarnation, record=self.record, store_end=store_end)
        self.link.attempt = attempt
        self.monitor.devices.expect_free()  # if ranks of an earlier epoch have ended here

    def run(self) -> None:
        """Turn the loop until no process lives, the outcome is known, and no other node needs this one; then leave().

        An error leaves the guard in its place: it ends what a broken supervisor would leave behind.
        """
        while not self._is_over():
            self._turn()
        self.leave()

    def _is_over(self) -> bool:
        """Check whether no process is left, the outcome is known, and other nodes do not need this one.

        A node that was stopped takes its own outcome if the coordinator has sent no verdict after 1 s.
        """
        if self.shutdown is None or not self.shutdown.over_at:
            return False
        asked, ended_at = self.requests, self.shutdown.over_at
        if self.outcome is None and asked.stop_at and not self.coordinates:
            # The user's stop is done here. This node waits for the verdict of the coordinator, but not for a coordinator that
            # is gone.
            waited = time.monotonic() - max(ended_at, asked.stop_at)
            if waited > _VERDICT_WAIT:
                self.outcome = asked.stopped or asked.left
        return self.outcome is not None and self.link.done

    def _turn(self) -> None:
        """Wait for descriptors, and handle once all that has come: signals, exits, requests, orders, samples, the shutdown."""
        signals = self.signals
        assert signals is not None, "prepare() comes before run()"
        readers: List[FileDescriptorLike] = [signals.wake, *self.control.wires(), *self.link.wires()]
        if self.guard.sock is not None:
            readers.append(self.guard.sock)
        ready = wait_for(readers, self._wait_time())
        for request in signals.turn():  # before the ranks that the same sender has ended
            self.obey_signal(request)
        self.ranks.pass_on(signals.for_ranks)
        self._reap()
        self._enter_containers()
        self.control.turn(self._answer)
        self.stacks.turn()
        self._obey_orders(ready)
        self.mpirun.turn(self.link)
        self._report_listeners()
        self.guard.turn()
        if self.monitor.turn():
            self.link.progress, self.link.quiet = self.monitor.recorder.progress, self.monitor.quiet
            if "metrics_file" in self.spec:
                self.link.metrics = self.monitor.recorder.metrics.newest
                self.monitor.recorder.write_metrics(self.link.other_metrics)
            self.control.touch()
            self.resources.refresh()
            self._check_records()
            self.ranks.logs.check()
        self._continue_shutdown()
        self.events.flush()

    def _wait_time(self) -> float:
        """Return the seconds that the loop may wait for descriptors: 0 with orders, 0.03 if it must poll, else 0.1 or 0.25."""
        if self.link.orders:
            return 0.0
        stopping = self.shutdown is not None and not self.shutdown.over_at
        if stopping or self.link.connecting or self.ranks.servers.pending:
            return _WAITING_TICK
        return _TICK if self.ranks.running else _IDLE_TICK

    def leave(self) -> None:
        """Complete the logs, record the end, inform the coordinator, and release all that is reserved and open here.

        Then this process can supervise the next epoch of an elastic job, by another object of this class.
        """
        self.ranks.logs.finish()  # before the end is recorded: readers wait for it
        survivors = self.shutdown.survivors if self.shutdown is not None else []
        self.outcome, self.epoch_end, events = node_end(self.outcome, self.requests, survivors, self.link, self.spec)
        for kind, fields in events:
            self.record(kind, **fields)
        self.link.close(self.outcome)
        self.monitor.devices.end()
        self.stacks.end()
        self.guard.end()
        self.ranks.launched.remove()
        self.resources.release(claimed=self.control.remove())
        self.monitor.close()
        self.ranks.close()
        self.family.close()
        self.events.close(durable=True)
        self.ranks.logs.end()
        if self.signals is not None:
            self.signals.close()
        os.close(self.job)

    def record(self, kind: str, **fields: object) -> None:
        """Write an event to the events file, and note it in the ledger and, on the coordinator's node, for notifications."""
        self.events.write(record_lines.written_event(kind, round(time.time(), 3), fields))
        self.ledger.note(kind, fields)
        self.link.note(kind, fields)

    # -- messages from and to the coordinator --

    def _obey_orders(self, ready: Set[int]) -> None:
        """Turn the link, end the ranks if lease or coordinator is lost, and obey deferred and new orders."""
        self.link.turn(ready)
        self._keep_lease()
        if self.outcome is None and self.link.loss is not None:
            self.outcome = self.link.loss
            self.stop(self.outcome.reason)
            self.release()
        self.link.orders[:0], self._deferred = self._deferred, []
        while self.link.orders:  # also those that the coordinator gives because of what this node does meanwhile
            self._obey(self.link.orders.pop(0))

    def _keep_lease(self) -> None:
        """Stop the ranks with KILL, once, when this node's lease has ended; else send the guard the lease's end."""
        lease = self.link.lease
        if lease is None:
            return
        if self.guard.lease_ended and not lease.ended:
            self.link.lose_lease()
        if lease.take_end():
            self.record("lease-lost", attempt=self.attempt, seconds=lease.seconds)
            self.stop("the lease of this node has ended", grace=0.0)
            self.release()
        elif not lease.ended:
            self.guard.renew(lease.end, lease.seconds)

    def _obey(self, order: Order) -> None:
        """Carry out an order of the coordinator. Ignores those of an earlier attempt, and starts after the lease has ended."""
        lease = self.link.lease
        starts = order["type"] in ("start", "launch")
        late = lease is not None and lease.ended and starts
        if late or is_outdated(order, self.attempt) or (starts and self._defer(order)):
            return
        if order["type"] == "start":
            self._start_role(order["role"], order["attempt"])
        elif order["type"] == "launch":
            self._start_daemon(order["command"])
        elif order["type"] == "release":
            self.release()
        elif order["type"] == "stop":
            self._enter_attempt(order["attempt"])  # a stop between two attempts ends the one that never began
            self.stop(order["why"], order.get("grace"), _OUTSIDE if order.get("outside") else 0.0)
        elif order["type"] == "sample":
            self.stacks.trace(partial(self._send_traces, order["of"]))
        elif order["type"] == "finish":
            self.outcome = read(Outcome, order["outcome"])
            self.stop(self.outcome.reason)

    def _send_traces(self, of: int, data: bytes) -> None:
        """Send the coordinator what the ranks here do, for its order with the number `of`; nothing if they were not sampled."""
        found = json.loads(data)
        if not found["fault"]:
            self.link.post({"type": "sampled", "of": of, "traces": found["samples"], "attempt": self.attempt})

    def _defer(self, order: Order) -> bool:
        """Enter the attempt of an order to start processes, and keep the order while memory of devices is not free.

        Ranks that have ended may still have it. Returns whether the order waits; a stop of the attempt makes it void.
        """
        self._enter_attempt(order["attempt"])
        waits = self.shutdown is None and self.monitor.devices.waits()
        self._deferred += [order] * waits
        return waits

    def obey_signal(self, request: EndRequest) -> None:
        """Stop the ranks here, and request the end of the job or that this node leaves it: this process got a signal to end."""
        self._shut_down(f"the supervisor on {self.spec['name']} {request.what}", request.code, request.everywhere)

    def _shut_down(self, by: str, code: int, everywhere: bool = False) -> None:
        """Stop the ranks here, and request the end of the job; in an elastic job, that this node leaves, if enough remain.

        A coordinator leaves only where another node can take over, and ends the job on Ctrl+C in its terminal. everywhere: the
        sender of a signal has signalled the ranks as well.
        """
        outside = self.origin.allocation.present or everywhere
        stays = self.coordinates and (self.origin.allocation.present or code == Interrupted.code)
        message: StopMessage = {"type": "stop", "by": by, "code": code, "outside": outside}
        if not stays and may_leave(self.spec, self.coordinates):
            message["leaves"] = True
            self.requests = self.requests.leave(by, code, time.monotonic())
        self._ask_stop(message, None, math.inf if everywhere else 0.0)

    def _ask_stop(self, message: StopMessage, grace: Optional[float], term_after: float = 0.0) -> None:
        """Record a request to stop, send it to the coordinator, which stops the other nodes, and stop the ranks here at once.

        grace, term_after: see stop().
        """
        if not self.requests.leave_by:
            state = JobState.LOST if message.get("lost") else JobState.STOPPED
            self.requests = self.requests._replace(by=message["by"], code=message["code"], state=state)
        if grace is not None:
            message["grace"] = grace
        self.link.post({**message, "attempt": self.attempt})
        self.stop(message["by"], grace, term_after)

    def _check_records(self, samples: int = 2) -> None:
        """Stop the job on all nodes as LOST after this number of checks in turn that have found its records removed here."""
        if self.shutdown is not None or self.requests.by:
            return
        removed = self.ledger.describe_removal(self.job)
        self._removed = self._removed + 1 if removed else 0
        if self._removed >= samples:
            by = f"{removed} on {self.spec['name']}"
            self._ask_stop({"type": "stop", "by": by, "code": 75, "lost": True}, None)

    # -- ranks --

    def _enter_attempt(self, attempt: int) -> None:
        """Set the number of the attempt; in a new one, forget the shutdown of the last one."""
        if attempt != self.attempt:
            self.link.attempt = attempt
            self.shutdown = None

    def _start_role(self, role: str, attempt: int) -> None:
        """Start the ranks of a role here, unless the node stops, and report those that cannot start; expect those of mpirun."""
        self._enter_attempt(attempt)
        if self.shutdown is not None:
            return
        exits = []
        if self.ranks.launched.starts(role):
            self.ranks.launched.expect([rank.key for rank in self.ranks.of_role(role)])
            return
        for rank in self.ranks.of_role(role):
            self.monitor.record_growth(at_once=True)  # of the log before this one
            exits += self._start_rank(rank)
        self._report(exits)

    def _start_daemon(self, command: str) -> None:
        """Start the daemon of mpirun here by `command`, unless it runs or the node stops; report it if it cannot be started."""
        rank = next(iter(self.ranks.of_role(MPI_DAEMON)), None)
        if rank is None or rank.pid or self.shutdown is not None:
            return
        rank.spec = self.ranks.launched.daemon_process(rank.spec, command)
        self._report(self._start_rank(rank))

    def _adopt(self, key: Key, pid: int) -> None:
        """Adopt and record a rank that mpirun has started as process `pid`.

        Raises NotFound for an unknown rank, if it runs already or the node stops, or if `pid` is no child of this process;
        UsageError for a rank that is not expected; and PreflightError if its log cannot be opened.
        """
        rank = self.ranks.find(key)
        if rank is None or rank.pid or self.shutdown is not None:
            raise NotFound(f"{key[0]} {key[1]} cannot be started on {self.spec['name']} now", "start the job again")
        self.ranks.launched.admit(key, pid)
        self.monitor.record_growth(at_once=True)  # of the log before this one
        why = self.ranks.adopt(rank, pid, self.attempt)
        if why:
            raise PreflightError(why, "make room on the disk of ROOT_DIR")
        self._record_start(rank)

    def _record_start(self, rank: LocalRank) -> None:
        """Record the start of a rank's program with its pid, and add the process to the descendants on disk."""
        (role, number), pid = rank.key, rank.main
        process = processes.identify(pid)
        start = process.start if process else 0
        self.record("started", role=role, rank=number, pid=pid, start=start, attempt=self.attempt, log=rank.log_name)
        if process:
            self.family.write_down([process])

    def _start_rank(self, rank: LocalRank) -> List[RankExit]:
        """Start a rank. Return its exit in a list if it cannot be started, else [].

        A pserver is watched until it listens, or reported as listening if trainers need not wait for it.
        """
        role, number = rank.key
        pid, why = self.ranks.start(rank, self.attempt)
        if why:
            of_runtime = rank.container is not None  # its client does not start
            return [self._record_exit(rank, RankExit(role, number, pid, note=why, of_runtime=of_runtime))]
        if rank.container is None:  # else when its program runs
            self._record_start(rank)
        if role == "pserver" and rank.spec["ready"]:
            self.ranks.servers.pending[rank.key] = PendingServer(rank.spec, pid)
        elif role == "pserver":  # [pserver] ready = "started": the trainers need not wait for it
            self.link.post({"type": "listening", "role": role, "rank": number, "attempt": self.attempt})
        return []

    def _enter_containers(self) -> None:
        """Record ranks whose programs in containers were found since the last turn; in a shutdown, end these programs."""
        for rank in self.ranks.take_entered():
            self._record_start(rank)
            main = rank.container.main if rank.container else None
            if main is not None:
                self.family.others.add(main)
                if self.shutdown is not None:  # it was not there when the others got TERM
                    self.shutdown.enter(main)

    def _report(self, exits: List[RankExit]) -> None:
        """Send exits to the coordinator, if there are any, with the steps that ranks of this node have printed.

        After a failure, first check whether the records were removed.
        """
        if any(exit.failed for exit in exits):  # it cannot have started, or found its files
            self._check_records(samples=1)
        if exits:
            sent = [exit[:MESSAGE_FIELDS] for exit in exits]
            steps = self.monitor.recorder.steps  # the newest sample is up to 2 s old
            for key in [exit.key for exit in exits if exit.role != "pserver" and self.spec["policy"]["max_restarts"]]:
                now = rank_log.progress(self.job, JobPaths.log(*key, self.attempt), 16 << 10)  # a traceback, too
                steps = steps.add([now and now[:2]])
            self.link.post({"type": "exited", "exits": sent, "attempt": self.attempt, "steps": to_plain(steps)})

    def _reap(self) -> None:
        """Reap ended or stopped children, handle each by what it is, and report the exits of ranks in one message."""
        exits = []
        changed = list(changed_children())
        if self.link.lease is not None:  # the guard reports first if it ends ranks because of the lease
            self.guard.turn()
            self._keep_lease()
        for pid, status, used in changed:
            for helper in (self.guard, self.monitor.devices, self.stacks, self.ranks.containers.removal):
                if pid == helper.pid:
                    helper.changed(status)
            if pid in self.ranks.running:
                exits += self._handle_change(self.ranks.running[pid], pid, status, used)
        exits += self._judge_early_exits()
        self._report(exits)

    def _handle_change(self, rank: LocalRank, pid: int, status: int, used: resource.struct_rusage) -> List[RankExit]:
        """Handle a rank's wait status: record a freeze, thaw or end.

        Return a list with its exit, [] without one to judge now.
        """
        role, number = rank.key
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            if rank.container is not None:  # the client of the runtime: NodeMonitor observes the program
                return []
            self.record("frozen" if os.WIFSTOPPED(status) else "thawed", role=role, rank=number)
            return []
        if rank.container is not None and rank.container.find():
            self._record_start(rank)
        exit = rank.end(status, used)
        self.ranks.forget_process(rank)
        self.ranks.servers.pending.pop(rank.key, None)
        if self.shutdown is None and self._is_early(rank, exit):
            rank.early = exit
            return []
        return [self._judge(rank, exit)]

    def _is_early(self, rank: LocalRank, exit: RankExit) -> bool:
        """Check whether an engine or mpirun may have ended a rank, which becomes known a moment later."""
        if self._ends_from_outside and exit.by_request:
            return time.monotonic() - rank.ended_at <= _OUTSIDE
        return self.mpirun.may_have_ended(rank, exit)

    def _judge_early_exits(self) -> List[RankExit]:
        """Judge and return the exits that were kept, once the node stops or the time for that has passed.

        An engine ends a job, and a machine that is shut down a member of an elastic one, by a signal to all its processes. This
        process may read its own a moment later: such ranks were stopped, if the job is stopped within 2 s.
        """
        stops = self.shutdown is not None
        due = [(rank, exit) for rank, exit in self.ranks.early() if stops or not self._is_early(rank, exit)]
        for rank, _ in due:
            rank.early = None
        return [self._judge(rank, exit) for rank, exit in due]

    def _judge(self, rank: LocalRank, exit: RankExit) -> RankExit:
        """Decide whether a rank ended by itself, was stopped, or was ended by mpirun; record the exit and a failure's cause.

        Returns the complete exit. If the rank ended well, its waiting wrapper of mpirun is answered.
        """
        stopped = self.shutdown is not None and self.shutdown.stopped(rank.ended_pid, exit.code, exit.signal)
        if self.shutdown is not None and self._ends_from_outside:
            stopped = stopped or exit.by_request
        if self.link.lease is not None and self.link.lease.ended:
            stopped = stopped or exit.signal == signal.SIGKILL
        by_launcher = bool(exit.code or exit.signal) and not stopped and self.mpirun.has_ended(rank)
        exit = exit._replace(stopped=stopped, by_launcher=by_launcher)
        if exit.failed:
            disk = f"the disk of {self.spec['root']} is full" if self.monitor.disk_is_full() else ""
            exit = self.ranks.with_reason(rank, exit, disk)
        self._record_exit(rank, exit, cpu=rank.cpu, memory=rank.memory)
        self.mpirun.answer_wrapper(rank.key)
        return exit

    def _record_exit(self, rank: LocalRank, exit: RankExit, **usage: float) -> RankExit:
        """Keep the exit of a rank, write it as an event with what the rank used, and return it."""
        rank.exit = exit
        fields = {**exit._asdict(), "stopped": exit.ended_by_others, "attempt": self.attempt}
        del fields["by_launcher"], fields["of_runtime"], fields["node"]
        self.record("exited", **fields, **usage)
        return exit

    def _report_listeners(self) -> None:
        """Record and report pservers that listen now; record those that listen at another address."""
        listening, strays = self.ranks.servers.check()
        for role, rank in listening:
            self.record("listening", role=role, rank=rank)
            self.link.post({"type": "listening", "role": role, "rank": rank, "attempt": self.attempt})
        for (role, rank), listens, endpoint in strays:
            self.record("elsewhere", role=role, rank=rank, listens=listens, endpoint=endpoint)

    # -- stopping --

    def stop(self, why: str, grace: Optional[float] = None, term_after: float = 0.0) -> None:
        """Begin to end the ranks and their descendants: TERM, and KILL after `grace` seconds (the job's own if None).

        A later call can only shorten the grace, and, if term_after is infinite, prevent TERM. term_after: seconds until TERM,
        infinite where the sender of a signal has sent it to all of them.
        """
        grace = self.spec["policy"]["grace"] if grace is None else grace
        if self.shutdown is not None:
            self.shutdown.hurry(grace)
            if term_after == math.inf:
                self.shutdown.without_term()
            return
        self._reap()  # what has ended by now was not stopped
        self.ranks.servers.pending.clear()
        self.record("stopping", why=why)
        running = {pid: rank.main for pid, rank in self.ranks.running.items()}
        containers = self.ranks.containers
        remove, linger = containers.begin_removal().turn, containers.linger
        spared = self._container_processes if containers.present else self.mpirun.helpers
        mark = self.spec["mark"]
        self.shutdown = Shutdown(self.family, mark, grace, running, spared, linger, remove, term_after)

    def _container_processes(self) -> FrozenSet[int]:
        """Find the pids of the container runtime's programs, and of shells that wait for containers.

        They get no TERM, and outlive the programs in the containers.
        """
        return helpers(self.family.members) | self.ranks.waiting_clients()

    def release(self) -> None:
        """Allow a shutdown, if any, to kill mpirun's processes: no rank is left on any node, or the coordinator is lost."""
        if self.shutdown is not None:
            self.shutdown.release()

    def _continue_shutdown(self) -> None:
        """Continue a shutdown; report to the coordinator once when only spared helpers are left, and once when it is over.

        Helpers: programs of mpirun or of the container runtime. The end is recorded, too: an event "clean" with the survivors.
        """
        if self.shutdown is None or self.shutdown.over_at:
            return
        quiet, unreaped = self.shutdown.quiet, bool(self.ranks.running or self.ranks.early())
        survivors = self.shutdown.turn(unreaped)
        if self.shutdown.quiet and not quiet:
            self.link.post({"type": "quiet", "attempt": self.attempt})
        if survivors is not None:
            self.monitor.devices.expect_free()
            self.record("clean", survivors=survivors)
            self.link.post({"type": "clean", "survivors": survivors[:50], "attempt": self.attempt})

    # -- requests on the socket --

    def _answer(self, request: messages.SupervisorRequest) -> Union[Tuple[messages.SupervisorAnswer, bytes], Waiting]:
        """Carry out a request: status, a rank's environment, bundle, stacks, attached, leave, stop, or one of mpirun's helpers.

        Returns the answer and its payload, or the key that the sender waits for. Raises NotFound for what does not exist here,
        UsageError if this node may not leave the job, and the errors of LauncherRequests.answer().
        """
        if request["type"] == "status":
            return self._status(), b""
        if request["type"] == "rank-environment":
            return self.ranks.environment(request["role"], request["rank"], self.attempt), b""
        if request["type"] == "bundle":
            return _BUNDLE, self.origin.require_bundle(self.spec["name"])
        if request["type"] == "attached":
            laptop, notified = request["laptop"], request["notified"]
            self.link.post({"type": "attached", "attempt": self.attempt, "laptop": laptop, "notified": notified})
        elif request["type"] == "leave":
            require_may_leave(self.spec, self.coordinates)
            if request.get("code"):
                self._shut_down(request["by"], request["code"])
            else:
                self.requests = self.requests._replace(leave_by=request["by"])
                self.link.post({"type": "leave", "by": request["by"], "attempt": self.attempt})
        elif request["type"] == "stacks":
            return self.stacks.ask(request)
        elif request["type"] != "stop":
            return self.mpirun.answer(request, self.link, self.coordinates and self.shutdown is None)
        else:
            self.requests = self.requests._replace(stop_at=time.monotonic())
            message: StopMessage = {"type": "stop", "by": request["by"], "code": request["code"]}
            if self.requests.leave_by:  # it can only hurry
                message["leaves"] = True
            self._ask_stop(message, 0.0 if request["force"] else request["grace"])
        return _ACCEPTED, b""

    def _status(self) -> messages.LiveStatus:
        """Build the answer to a request for the status of this node."""
        over = self.shutdown is not None and self.shutdown.over_at
        stopping = "clean" if over else "stopping" if self.shutdown is not None else ""
        return self.ranks.status(self.attempt, self.coordinates, stopping, self.outcome)
