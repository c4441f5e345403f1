"""The supervisor owns the processes of one job on one node: one loop, one waitpid, detached from ssh.

It starts ranks on the lead's order and reports what happens to them. It ends all processes on the lead's order, when the
lead is silent for the loss timeout, and on a command of its fifo. Every event goes into the events file first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Set

from clustertool.errors import PreflightError
from clustertool.model.job.outcome import Outcome, read_outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.lead_messages import Incarnation, is_outdated
from clustertool.node.jobs.descendants import Descendants
from clustertool.node.supervisor import rank_process
from clustertool.node.supervisor.control_fifo import ControlFifo
from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink
from clustertool.node.supervisor.event_log import EventLog
from clustertool.node.supervisor.guard_keeper import GuardKeeper
from clustertool.node.supervisor.listen_watch import ListenWatch
from clustertool.node.supervisor.node_monitor import NodeMonitor
from clustertool.node.supervisor.node_resources import NodeResources
from clustertool.node.supervisor.rank_table import LocalRank, RankTable
from clustertool.node.supervisor.shutdown import Shutdown
from clustertool.node.system import processes
from clustertool.node.system.child_signals import Signals

if TYPE_CHECKING:
    from clustertool.model.wire.lead_messages import ExitRow, MemberMessage, Order
    from clustertool.model.wire.spec_types import Spec

_FILES = 200  # descriptors for all but the nodes' connections: logs, connections that have not joined yet
_TICK = 0.1
_IDLE_TICK = 0.25  # before a rank was started, and between two attempts
_WAITING_TICK = 0.03  # while pservers are expected to listen, or processes to end
_VERDICT_WAIT = 1.0  # seconds a stopped node waits for the lead's verdict


class _UserStop(NamedTuple):
    """A stop by an agent on this node: by whom, the exit code of the job, and when by the clock of the machine."""

    by: str
    code: int
    at: float


class Supervisor:
    """`spec` is one node's part of a plan as the engine wrote it; `job` the job directory's descriptor."""

    def __init__(self, spec: Spec, job: int, umask: int) -> None:
        self.spec = spec
        self.job = job
        self.attempt = 0
        self.events = EventLog(spec, job)
        me = os.getpid()
        self.family = Descendants(job, processes.Process(me, getattr(processes.stat(me), "start", 0)))
        self.ranks = RankTable(spec, job, umask)
        self.monitor = NodeMonitor(spec, job, self.family, self.ranks, self.record)
        self.resources = NodeResources(spec)
        self.guard = GuardKeeper(self.family, spec, job, self.record)
        self.control = ControlFifo(job)
        self.link = CoordinatorLink()
        self.shutdown: Optional[Shutdown] = None  # of this attempt
        self.servers = ListenWatch()
        self.outcome: Optional[Outcome] = None
        self.user_stop: Optional[_UserStop] = None

    # -- life --

    def prepare(self) -> None:
        """Do all that can fail before a rank runs: ports, the guard, the lead's port. Raises PreflightError."""
        processes.become_subreaper()
        processes.set_name("ct-supervisor")
        self.signals = Signals()
        self.resources.reserve()
        self.guard.inherited = self.resources.inherited
        self.control.create(self.spec)
        self.record("job", **self.spec["header"])
        me = self.family.head
        self.record("supervisor", pid=me.pid, start=me.start, boot=processes.boot_id(), space=processes.space())
        try:
            self.guard.start()
        except OSError as error:
            raise PreflightError(
                f"no process can be started: {error.strerror}", "check ulimit -u on the node"
            ) from None
        if int(self.spec["node"]) == int(self.spec["lead"]["node"]):
            self.ranks.raise_file_limit(_FILES + 2 * len(self.spec["shape"]["names"]))
        self.link.open(self.spec, Incarnation(processes.boot_id(), *me), self.record)

    def run(self) -> None:
        """Return when the verdict is known here, or the lead is lost and no process lives any more.

        An error leaves the guard in its place: it ends what a broken supervisor would leave behind.
        """
        while not self._over():
            self._turn()
        self.leave()

    def _over(self) -> bool:
        if self.shutdown is None or not self.shutdown.over:
            return False
        stop, ended_at = self.user_stop, self.shutdown.over_at
        if self.outcome is None and stop is not None and not self.link.leads:
            # The user's stop is done here. This node waits for the verdict of the lead, but not for a lead that is gone.
            waited = time.monotonic() - max(ended_at, stop.at)
            if waited > _VERDICT_WAIT:
                self.outcome = Outcome(JobState.STOPPED, stop.code, "tool", stop.by)
        return self.outcome is not None and self.link.done

    def _turn(self) -> None:
        readers: List[Any] = [*self.signals.wake, self.control, *self.link.readers()]
        if self.guard.sock is not None:
            readers.append(self.guard.sock)
        ready = _select(readers, self.link.writers(), self._wait())
        for request in self.signals.turn():  # before the ranks that the same sender has ended
            self._ask_stop(f"the supervisor on {self.spec['name']} {request}", 143)
        self._reap()
        self._read_control()
        self._read_lead(ready)
        self._report_listeners()
        self.guard.turn()
        if self.monitor.turn():
            self.link.report_progress(self.monitor.progress)
            self.control.touch()
            self.resources.refresh()
        self._continue_shutdown()
        self.events.flush()

    def _wait(self) -> float:
        """Seconds that the loop may wait for descriptors."""
        if self.link.pending:
            return 0.0
        stopping = self.shutdown is not None and not self.shutdown.over
        if stopping or self.link.connecting or self.servers:
            return _WAITING_TICK
        return _TICK if self.ranks.running else _IDLE_TICK

    def leave(self) -> None:
        """Record the end and release all that is reserved here."""
        if self.outcome is not None:
            self.record("ended", **self.outcome.as_record())
        self.link.close()
        self.monitor.devices.end()
        self.guard.end()
        self.resources.release()
        if self.control.remove():
            self.resources.withdraw_claims()
        self.monitor.close()
        self.events.close()

    def record(self, kind: str, **fields: Any) -> None:
        self.events.record(kind, **fields)

    # -- messages from and to the lead --

    def _tell(self, message: MemberMessage) -> None:
        self.link.post(message)

    def _read_lead(self, ready: Set[int]) -> None:
        self.link.turn(ready)
        if self.link.lost and self.outcome is None:
            self.outcome = self.link.loss(self.spec)
            self.stop(self.outcome.reason, float(self.spec["policy"]["grace"]))
        for message in self.link.messages():
            self._obey(message)

    def _obey(self, message: Order) -> None:
        if is_outdated(message, self.attempt):
            return
        if message["type"] == "start":
            self._start(message["role"], message["attempt"])
        elif message["type"] == "stop":
            self._enter(message["attempt"])  # a stop between two attempts ends the one that never began
            self.stop(message["why"], float(self.spec["policy"]["grace"]))
        elif message["type"] == "finish":
            self.outcome = read_outcome(message["outcome"])
            self.stop(self.outcome.reason, float(self.spec["policy"]["grace"]))

    def _ask_stop(self, by: str, code: int) -> None:
        """Stop here at once, and let the lead stop the others."""
        self._tell({"type": "stop", "by": by, "code": code, "attempt": self.attempt})
        self.stop(by, float(self.spec["policy"]["grace"]))

    # -- ranks --

    def _enter(self, attempt: int) -> None:
        if attempt != self.attempt:
            self.attempt, self.shutdown = attempt, None
            self.link.enter(attempt)

    def _start(self, role: str, attempt: int) -> None:
        self._enter(attempt)
        if self.shutdown is not None:
            return
        exits = []
        for rank in self.ranks.of_role(role):
            self.monitor.record_growth(at_once=True)  # of the log before this one
            exits += self._start_rank(rank)
        if exits:
            self._tell({"type": "exited", "exits": exits, "attempt": self.attempt})

    def _start_rank(self, rank: LocalRank) -> List[ExitRow]:
        role, number = rank.key
        pid, why = self.ranks.start(rank, self.attempt)
        if why:
            self.record(
                "exited", role=role, rank=number, code=pid, signal=0, stopped=False, note=why, attempt=self.attempt
            )
            return [(role, number, pid, 0, False, why, 0, False)]
        process = processes.identify(pid)
        start = process.start if process else 0
        self.record("started", role=role, rank=number, pid=pid, start=start, attempt=self.attempt, log=rank.log_name)
        if process:
            self.family.write_down([process])
        if role == "pserver" and rank.spec["ready"]:
            self.servers.add(rank.key, rank.spec, pid)
        elif role == "pserver":  # [pserver] ready = "started": the trainers need not wait for it
            self._tell({"type": "listening", "role": role, "rank": number, "attempt": self.attempt})
        return []

    def _reap(self) -> None:
        """One waitpid loop for ranks, orphans and the guard. What is reaped in one turn is reported in one message."""
        exits = []
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.guard.pid:
                self.guard.changed(status)
            elif pid == self.monitor.devices.pid:
                self.monitor.devices.changed(status)
            elif pid in self.ranks.running:
                exits += self._changed(self.ranks.running[pid], pid, status, used)
        if exits:
            self._tell({"type": "exited", "exits": exits, "attempt": self.attempt})

    def _changed(self, rank: LocalRank, pid: int, status: int, used: resource.struct_rusage) -> List[ExitRow]:
        role, number = rank.key
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            self.record("frozen" if os.WIFSTOPPED(status) else "thawed", role=role, rank=number)
            return []
        self.ranks.reaped(rank)
        self.servers.drop(rank.key)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 0 if killed else os.WEXITSTATUS(status)
        stopped = self.shutdown is not None and self.shutdown.stopped(pid, code, killed)
        note = rank.oom.verdict() if rank.oom and killed == signal.SIGKILL and not stopped else ""
        if (code or killed) and not stopped and not note:
            note = f"the disk of {self.spec['root']} is full" if self.monitor.disk_is_full() else ""
        error, consequence = 0, False
        if (code or killed == signal.SIGABRT) and not stopped:  # libraries abort for errors of connections
            error, consequence = rank_process.last_line(self.job, rank.log_name)
        self.record(
            "exited",
            role=role,
            rank=number,
            code=code,
            signal=killed,
            stopped=stopped,
            note=note,
            attempt=self.attempt,
            error=error,
            consequence=consequence,
            cpu=round(used.ru_utime + used.ru_stime, 2),
            memory=used.ru_maxrss << 10,
        )
        return [(role, number, code, killed, stopped, note, error, consequence)]

    def _report_listeners(self) -> None:
        listening, strays = self.servers.check()
        for role, rank in listening:
            self.record("listening", role=role, rank=rank)
            self._tell({"type": "listening", "role": role, "rank": rank, "attempt": self.attempt})
        for (role, rank), listens, endpoint in strays:
            self.record("elsewhere", role=role, rank=rank, listens=listens, endpoint=endpoint)

    # -- stopping --

    def stop(self, why: str, grace: float) -> None:
        """TERM to all descendants now, KILL after `grace` seconds; a second call can only hurry."""
        if self.shutdown is not None:
            self.shutdown.hurry(grace)
            return
        self._reap()  # what has ended by now was not stopped
        self.servers.clear()
        self.record("stopping", why=why)
        self.shutdown = Shutdown(self.family, str(self.spec["mark"]), grace, set(self.ranks.running))

    def _continue_shutdown(self) -> None:
        if self.shutdown is None or self.shutdown.over:
            return
        survivors = self.shutdown.turn(unreaped=bool(self.ranks.running))
        if survivors is not None:
            self.record("clean", survivors=survivors)
            self._tell({"type": "clean", "survivors": survivors[:50], "attempt": self.attempt})

    def _read_control(self) -> None:
        """Obey the commands of agents: see record_lines.control_line. Others are ignored."""
        for command in self.control.commands():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if command["type"] == "attached":
                    self._tell({"type": "attached", "attempt": self.attempt})
                elif command["type"] == "stop":
                    stop = self.user_stop = _UserStop(str(command["by"]), int(command["code"]), time.monotonic())
                    self._tell({"type": "stop", "by": stop.by, "code": stop.code, "attempt": self.attempt})
                    self.stop(stop.by, 0.0 if command["force"] else float(command["grace"]))


def _select(readers: List[Any], writers: List[Any], wait: float) -> Set[int]:
    """The descriptors that are ready, of any number: poll, since select() ends at 1024."""
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    for writer in writers:
        poll.register(writer, select.POLLIN | select.POLLOUT)
    return {fd for fd, _ in poll.poll(wait * 1000)}
