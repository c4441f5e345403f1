"""The guard runs in its own session. If the supervisor dies or stops its heartbeat, the guard ends the job on this node.

It reports to the coordinator first, in the supervisor's place, so that the others need not wait for the loss timeout. The
supervisor's keeper sends heartbeats to the guard, and replaces a guard that dies, is stopped or sends nothing.

In an elastic job the keeper also sends the end of the node's lease whenever it is renewed. If the supervisor does not run at
that time, the guard ends the ranks, and nothing else: the supervisor may run again minutes later, and joins the next epoch.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple

from clustertool.model.wire.coordinator_messages import Incarnation
from clustertool.node.jobs import descendants, records
from clustertool.node.jobs.descendants import Descendants
from clustertool.node.jobs.termination import Sweep
from clustertool.node.supervisor.coordinator import coordinator_link
from clustertool.node.system import processes
from clustertool.node.system.process_clock import ProcessClock, boottime
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_BEAT = 0.5
_TICK = 0.1  # in an elastic job
_QUIT = b"Q"
_LEASE = b"L"  # before the end of a lease in seconds of CLOCK_BOOTTIME, and a newline
_LEASE_ENDED = b"E"  # from the guard, before it ends the ranks
_RENEWALS = 20  # ends of a lease that are sent in the time that it lasts, at most
_KILL_TIME = 2.0  # seconds for the ranks to end; one that the kernel blocks is left to the supervisor
_FROZEN = 300.0  # seconds that the supervisor of an elastic job may be frozen
_START = 30.0  # seconds that a supervisor may take to its first beat: a loaded machine starts many at once
_BUSY = 60.0  # the same for one that is ready to run and gets no processor
_REPORT_TIME = 0.5  # seconds that the coordinator may take to receive the end of a supervisor
_PAUSE = 0.2  # between two guards: one that dies at once must not make us spin
_FAREWELL = 2.0


def patience(spec: Spec) -> float:
    """Return the seconds of silence after which supervisor and guard regard each other as frozen: the loss timeout, at least 2.

    The one that waits counts them by its process clock.
    """
    return max(2.0, spec["policy"]["loss_timeout"])


def _guard_patience(spec: Spec) -> float:
    """Return the seconds of silence after which the guard regards the supervisor as frozen; at least 300 s in an elastic job.

    There the lease ends the ranks of a frozen supervisor, and it may go on later.
    """
    return max(_FROZEN, patience(spec)) if "elastic" in spec else patience(spec)


class GuardKeeper:
    """The supervisor's side of the guard: starts it, exchanges heartbeats, and replaces one that dies, is stopped or is silent.

    Call start() once, turn() each loop, changed() on its SIGCHLD, and end() at last. pid: of the present guard, 0 while there
    is none.
    """

    def __init__(self, family: Descendants, spec: Spec, job: int, record: Callable[..., None]) -> None:
        self.pid = 0
        self.sock: Optional[socket.socket] = None
        self._family, self._spec, self._job, self._record = family, spec, job, record
        self._patience = patience(spec)
        self.inherited: Tuple[int, ...] = ()  # descriptors that the guard keeps open too
        self.spared: Tuple[Process, ...] = ()  # children of the supervisor that end by themselves when it dies
        self._clock = ProcessClock()
        self._beat_at = self._received = self._start_at = 0.0
        self._lease_end = math.inf
        self.lease_ended = False  # the guard has ended the ranks because of that

    def start(self) -> None:
        """Fork a guard, connect it by a socket pair, and record it. Raises OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                watch = partial(run, theirs, self._family.head, self._spec, self._job, self.spared, self._lease_end)
                self.pid = processes.fork(watch, theirs.fileno(), self._job, *self.inherited)
            except OSError:
                ours.close()
                raise
        self.sock = ours
        self._family.spare.add(self.pid)
        self._received = self._clock.turn()
        process = processes.identify(self.pid)
        self._record("guard", pid=self.pid, start=process.start if process else 0)

    def turn(self) -> None:
        """Read the guard's messages and send it a heartbeat; kill it if it was silent for too long. Without a guard, start one.

        Tries to start one every 0.2 s.
        """
        now = self._clock.turn()
        if self.sock is None:
            if now >= self._start_at:
                self._start_at = now + _PAUSE
                with contextlib.suppress(OSError):
                    self.start()
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            data = self.sock.recv(4096)
            self._received = now if data else self._received
            self.lease_ended = self.lease_ended or _LEASE_ENDED in data
        if now - self._received > self._patience:
            os.kill(self.pid, signal.SIGKILL)
            self._received = now
        if now >= self._beat_at:
            self._beat_at = now + _BEAT
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self.sock.send(b"s")

    def renew(self, end: float, seconds: float) -> None:
        """Send the guard the end of the node's lease, by CLOCK_BOOTTIME, if it has moved by a twentieth of `seconds` or more.

        seconds: how long the lease lasts.
        """
        if end == self._lease_end or abs(end - self._lease_end) < seconds / _RENEWALS:
            return
        self._lease_end = end
        if self.sock is not None:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self.sock.send(b"%s%.3f\n" % (_LEASE, end))

    def changed(self, status: int) -> None:
        """Handle the guard's wait status: kill a stopped guard; forget one that has ended, so that turn() starts another."""
        if os.WIFSTOPPED(status):
            os.kill(self.pid, signal.SIGKILL)
        elif not os.WIFCONTINUED(status):
            self._family.spare.discard(self.pid)
            self.pid = 0
            if self.sock is not None:
                self.sock.close()
                self.sock = None

    def end(self) -> None:
        """Send the guard the order to quit, wait up to 2 s for its end, then KILL it, and close its socket.

        Without a guard, do nothing.
        """
        if self.sock is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self.sock.send(_QUIT)
        processes.reap(self.pid, _FAREWELL)
        self.sock.close()
        self.pid, self.sock = 0, None


class LeaseWatch:
    """What the guard knows of the node's lease. `end`: when it ends, infinite if there are no ranks or no leases."""

    def __init__(self, end: float) -> None:
        self.end = end
        self._begun = b""  # a line of which the rest is still to come

    def read(self, data: bytes) -> None:
        """Set `end` to the newest end of a lease in the data from the supervisor; keep an incomplete line for the next call."""
        *lines, rest = (self._begun + data).split(b"\n")
        self._begun = b"".join(rest.rpartition(_LEASE)[1:]) if _LEASE in rest else b""
        for line in lines:
            _, found, end = line.rpartition(_LEASE)
            if found:
                self.end = float(end)

    def has_ended(self) -> bool:
        """Check whether the lease has ended; True once, after which `end` is infinite."""
        ended = boottime() >= self.end
        if ended:
            self.end = math.inf
        return ended


def run(
    sock: socket.socket,
    supervisor: Process,
    spec: Spec,
    job: int,
    spared: Sequence[Process] = (),
    lease_end: float = math.inf,
) -> None:
    """Send heartbeats to the supervisor until it sends QUIT; end the job on this node if it dies or is silent for too long.

    That is _guard_patience(), 30 s at least before its first heartbeat, and up to 60 s while it is ready to run and gets no
    processor. When the lease ends, kill the ranks only. job: the job directory's descriptor. spared: processes that are not
    ended.
    """
    lease = LeaseWatch(lease_end)
    processes.set_name("ct-guard")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    clock, received, limit = ProcessClock(), 0.0, max(_START, patience(spec))
    tick = _TICK if "elastic" in spec else _BEAT
    why, beat_at = "", 0.0
    while not why:
        ready, _, _ = select.select([sock], [], [], tick)
        now = clock.turn()
        if ready:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = sock.recv(4096)
            if _QUIT in data:
                return
            received, limit = now, _guard_patience(spec)
            why = "" if data else "died"
            lease.read(data)
        elif now - received > limit and not (now - received < _BUSY and _is_runnable(supervisor)):
            why = f"did not move for {limit:g} s"
        if lease.has_ended():
            _end_ranks(sock, supervisor, spec, job, spared)
        if now >= beat_at:
            beat_at = now + _BEAT
            with contextlib.suppress(OSError):
                sock.send(b"g", socket.MSG_DONTWAIT)
    _take_over(f"the supervisor {why}", supervisor, spec, job, spared)


def _end_ranks(sock: socket.socket, supervisor: Process, spec: Spec, job: int, spared: Sequence[Process]) -> None:
    """Report the end of the lease to the supervisor, then KILL all processes of the job, but not the supervisor and `spared`.

    The supervisor's descendants come first: to search the whole machine for others takes longer. Waits 2 s at most.
    """
    with contextlib.suppress(OSError):
        sock.send(_LEASE_ENDED, socket.MSG_DONTWAIT)
    below: List[Process] = processes.descendants(supervisor.pid) if processes.alive(supervisor) else []
    apart = {os.getpid(), *(process.pid for process in spared)}
    ranks = [process for process in below if process.pid not in apart]
    for process in ranks:
        processes.signal_one(process, signal.SIGKILL)
    Sweep([*descendants.recorded(job), *ranks], spec["mark"], spec.get("container")).end(0.0, _KILL_TIME)


def _is_runnable(supervisor: Process) -> bool:
    """Check whether the supervisor's process is in state R: the machine is loaded, or it has much to do."""
    found = processes.stat(supervisor.pid)
    return found is not None and found.start == supervisor.start and found.state == "R"


def _take_over(why: str, supervisor: Process, spec: Spec, job: int, spared: Sequence[Process]) -> None:
    """End the job on this node in the place of its supervisor, and record the loss and what is left.

    Reports to the coordinator, kills the supervisor, then all processes of the job but `spared`, and removes its session.
    Descendants of a living supervisor are found by their parents, those of a dead one by its records and the job's mark.
    """
    records.record_loss(job, why, make=False)
    _report_loss(why, supervisor, spec)
    found: List[Process] = processes.descendants(supervisor.pid) if processes.alive(supervisor) else []
    below = [process for process in found if process not in spared]
    processes.signal_one(supervisor, signal.SIGKILL)
    sweep = Sweep([*descendants.recorded(job), *below], spec["mark"], spec.get("container"))
    left = sweep.end(grace=0.0, patience=10.0)
    sweep.remove_session()
    records.record_clean(job, left, make=False)


def _report_loss(why: str, supervisor: Process, spec: Spec) -> None:
    """Report the supervisor's death to the coordinator, if that is on another node, before anything is killed. Ignores errors.

    Ranks of other nodes that fail because these ranks are missing must not count as culprits.
    """
    if spec["node"] != spec["lead"]["node"]:
        with contextlib.suppress(OSError, ValueError, MemoryError):
            boot = processes.boot_id()
            me, ended = Incarnation(boot, *processes.this_process()), Incarnation(boot, *supervisor)
            coordinator_link.report_death(spec, me, ended, why, _REPORT_TIME)
