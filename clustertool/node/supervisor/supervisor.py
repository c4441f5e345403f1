"""The supervisor owns the processes of one job on one node: one loop, one waitpid, detached from ssh.

It starts what the lead tells it to start, says what became of it, and ends everything when told, when the lead is
silent for the loss timeout, or when it is asked to through its fifo. Every event goes into the events file first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set, Tuple, cast

from clustertool.errors import PreflightError
from clustertool.model.job.outcome import Key, Outcome, coordinator, read_outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.wire import record_lines
from clustertool.model.wire.lead_messages import Incarnation, is_outdated
from clustertool.node.devices import locks
from clustertool.node.jobs.descendants import Family
from clustertool.node.jobs.ledger import Ledger
from clustertool.node.ports import claims, listeners
from clustertool.node.ports.reservations import Holds
from clustertool.node.storage import files
from clustertool.node.supervisor import pressure, rank_process
from clustertool.node.supervisor.card_monitor import Gauge
from clustertool.node.supervisor.child_signals import Signals
from clustertool.node.supervisor.guard_keeper import Keeper
from clustertool.node.supervisor.lead_client import Uplink
from clustertool.node.supervisor.lead_server import LeadServer
from clustertool.node.supervisor.listen_watch import Awaited
from clustertool.node.supervisor.pressure import Disk
from clustertool.node.supervisor.shutdown import Ending
from clustertool.node.supervisor.usage_recorder import Recorder, Running
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.lead_messages import ExitRow, MemberMessage, Order
    from clustertool.model.wire.spec_types import Spec, SpecProcess
_FILES = 200  # descriptors for all but the nodes' connections: logs, strangers
_TICK = 0.1
_IDLE_TICK = 0.25  # before a rank was started, and between two attempts
_WAITING_TICK = 0.03  # while pservers are expected to listen, or processes to end
_TOUCH_EVERY = 3600.0  # files in /tmp are removed after days
_LOOK_EVERY = 0.5
_GROWTH_EVERY = 0.5  # seconds between two records of how a log grew
_LAST_WORD = 1.0  # seconds a stopped node waits for the lead's verdict
# Bytes of the events file that are kept free on the disk: what is said of each process here, and of each rank in a verdict.
_LAST_WORDS, _OF_PROCESS, _OF_RANK = 16 << 10, 512, 64

_OF_SIGNALS = (128 + signal.SIGTERM, 128 + signal.SIGKILL)  # exit codes of a shell whose program was signalled


class Rank:
    """One process of ours, running or ended."""

    def __init__(self, spec: SpecProcess) -> None:
        self.spec = spec
        self.key: Key = (str(spec["role"]), int(spec["rank"]))
        self.pid = 0
        self.log = -1
        self.log_name = str(spec["log"])
        self.log_size = -1
        self.noted, self.noted_at = 0, 0.0  # the size that is written down as its growth, and when
        self.oom: Optional[pressure.Watch] = None


class Supervisor:
    """`spec` is one node's part of a plan as the engine wrote it; `job` the job directory's descriptor."""

    def __init__(self, spec: Spec, job: int, umask: int) -> None:
        self.spec = spec
        self.job = job
        self.paths = JobPaths(os.path.dirname(spec["job_dir"]), spec["job"])
        self.umask = umask
        self.node = int(spec["node"])
        self.attempt = 0
        self.ranks: Dict[Key, Rank] = {}
        for process in spec["processes"]:
            rank = Rank(process)
            self.ranks[rank.key] = rank
        self.by_pid: Dict[int, Rank] = {}
        ahead = _LAST_WORDS + _OF_PROCESS * len(spec["processes"]) + _OF_RANK * len(spec["endpoints"])
        self.journal = files.Journal(files.open_append(job, f"{OURS}/events.jsonl"), ahead)
        self.ledger = Ledger(spec)
        self.me = processes.Process(os.getpid(), getattr(processes.stat(os.getpid()), "start", 0))
        self.family = Family(job, self.me)
        self.looked_at = 0.0
        self.touched_at = time.monotonic()  # the file of the claims
        self.disk = Disk(job)
        self.gauge = Gauge(self.family, spec, self.record)
        self.recorder = Recorder(job, self.gauge)
        self.holds = Holds()
        self.keeper = Keeper(self.family, spec, job, self.record)
        self.devices: Optional[locks.Held] = None
        self.control = -1
        self.control_rest = b""
        self.ending: Optional[Ending] = None
        self.ended_before: Set[int] = set()  # ranks that had ended when the others were signalled
        self.mortal: Set[int] = set()  # ranks that end by SIGTERM itself, and not with an exit code
        self.awaited = Awaited()
        self.outcome: Optional[Outcome] = None
        self.asked: Optional[Tuple[str, int]] = None  # by whom, with which code, an agent here asked to stop
        self.asked_at = 0.0
        self.file_limit = 0  # the user's own, for the ranks, where we had to raise ours
        self.lead: Optional[LeadServer] = None
        self.uplink: Optional[Uplink] = None
        self.inbox: List[Order] = []

    # -- life --

    def prepare(self) -> None:
        """All that can fail before a rank runs: ports, the guard, the lead's port. Raises PreflightError."""
        processes.become_subreaper()
        processes.set_name("ct-supervisor")
        self.signals = Signals()
        each = [rank.spec["ports"] for rank in self.ranks.values()]
        others = [port for its in each for port in its[1:]]
        wanted = [*(its[0] for its in each), *self.spec["extra_ports"], *others]
        self.holds.take(wanted)
        listeners.require_free(wanted)
        self._lock_devices()
        self._open_control()
        self.record("job", **self.spec["header"])
        self.record(
            "supervisor", pid=self.me.pid, start=self.me.start, boot=processes.boot_id(), space=processes.space()
        )
        try:
            self.keeper.start()
        except OSError as error:
            raise PreflightError(
                f"no process can be started: {error.strerror}", "check ulimit -u on the node"
            ) from None
        if self.node == int(self.spec["lead"]["node"]):
            self._become_lead()
        else:
            self.uplink = Uplink(self.spec, self._incarnation(), record=self.record)

    def _lock_devices(self) -> None:
        """The cards of our ranks, for us and the guard: as long as one of the two lives, they are this job's."""
        kind, ids = (
            str(self.spec["device_kind"]),
            {card for rank in self.ranks.values() for card in rank.spec["devices"]},
        )
        if ids and kind != "cpu":
            self.devices = locks.take(kind, sorted(ids), self.spec["job"])
            self.keeper.inherited = (self.devices.fd,)

    def _open_control(self) -> None:
        try:
            os.mkfifo(f"{OURS}/control", 0o600, dir_fd=self.job)
        except FileExistsError:
            raise PreflightError(f"job {self.spec['job']} was started here already", "take another --job-id") from None
        except OSError as error:
            what = f"cannot create a named pipe (fifo) below {self.spec['root']}: {error.strerror}"
            raise PreflightError(what, "set ROOT_DIR to a folder on a file system with fifos (ext4, xfs)") from None
        self.control = os.open(f"{OURS}/control", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.job)

    def _incarnation(self) -> Incarnation:
        return Incarnation(processes.boot_id(), *self.me)

    def _become_lead(self) -> None:
        self._allow_files(_FILES + 2 * len(self.spec["shape"]["names"]))
        try:
            self.lead = LeadServer(self.spec, self._incarnation(), self.inbox.append, self.record)
        except OSError as error:
            port = self.spec["lead"]["port"]
            raise PreflightError(
                f"port {port} (the lead's) cannot be used: {error.strerror}", "set LEAD_PORT"
            ) from None
        self.lead.join_self()

    def _allow_files(self, needed: int) -> None:
        """Many nodes are many connections; 1024 descriptors, which are common, are soon used up."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            with contextlib.suppress(ValueError, OSError):
                wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                self.file_limit = soft

    def run(self) -> None:
        """Until the verdict is known here, or the lead is lost and nothing lives any more.

        An error leaves the guard in its place: it ends what a broken supervisor would leave behind.
        """
        while not self._over():
            self._turn()
        self.leave()

    def _over(self) -> bool:
        if self.ending is None or not self.ending.over:
            return False
        if self.outcome is None and self.asked and self.lead is None and self._patience_is_over():
            # The user's stop was done here, and the lead is not there to say so: this node need not wait for it.
            self.outcome = Outcome(JobState.STOPPED, self.asked[1], "tool", self.asked[0])
            return True
        return self.outcome is not None and (self.lead is None or self.lead.done)

    def _patience_is_over(self) -> bool:
        """Neither the end of things here nor the user's word, which may have come later, is younger than the lead's time."""
        assert self.ending is not None
        return time.monotonic() > max(self.ending.over_at, self.asked_at) + _LAST_WORD

    def _turn(self) -> None:
        readers: List[Any] = [*self.signals.wake, self.control]
        writers: List[Any] = []
        if self.keeper.sock is not None:
            readers.append(self.keeper.sock)
        if self.lead is not None:
            readers += self.lead.readers()
            writers += self.lead.writers()
        if self.uplink is not None and self.uplink.wire is not None:
            readers.append(self.uplink.wire)
            writers += [self.uplink.wire] if self.uplink.wire.wants_write else []
        ready = _select(readers, writers, self._patience())
        for request in self.signals.turn():  # before the ranks that the same sender has ended
            self._ask_stop(f"the supervisor on {self.spec['name']} {request}", 143)
        self._reap()
        self._read_control()
        self._links(ready)
        self._look_for_listeners()
        self.keeper.turn()
        self._note_growth()
        self._note_descendants()
        self._keep_stopping()
        self.journal.flush()

    def _patience(self) -> float:
        if self.inbox:
            return 0.0
        stopping = self.ending is not None and not self.ending.over
        calling = self.uplink is not None and self.uplink.wire is None  # an open wire wakes us
        if stopping or calling or self.awaited:
            return _WAITING_TICK
        return _TICK if self.by_pid else _IDLE_TICK

    def leave(self) -> None:
        """The last word, and nothing of ours stays."""
        if self.outcome is not None:
            self.record("ended", **self.outcome.as_record())
        if self.uplink is not None:
            self.uplink.leave(0.5)
        if self.lead is not None:
            self.lead.close()
        self.gauge.end()
        self.keeper.end()
        self.holds.close()
        if self.devices is not None:
            self.devices.release()
        if self.control >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{OURS}/control", dir_fd=self.job)
            with contextlib.suppress(PreflightError):  # void by the last word, too
                claims.take_back(str(self.spec["job"]), os.path.dirname(self.spec["job_dir"]))
        self._note_growth(at_once=True)
        self.recorder.close()
        self.journal.close(durable=True)

    def record(self, kind: str, **fields: Any) -> None:
        self.journal.write(record_lines.written_event(kind, round(time.time(), 3), fields))
        self.ledger.note(kind, fields)

    # -- words from and to the lead --

    def _tell(self, message: MemberMessage) -> None:
        if self.lead is not None:
            self.lead.receive(self.node, message)
        elif self.uplink is not None:
            self.uplink.post(message)

    def _links(self, ready: Set[int]) -> None:
        if self.lead is not None:
            self.lead.turn(ready)
        elif self.uplink is not None:
            self.inbox += cast("List[Order]", self.uplink.turn())
            if self.uplink.lost and self.outcome is None:
                self._lost_lead()
        while self.inbox:
            self._obey(self.inbox.pop(0))

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

    def _lost_lead(self) -> None:
        lead, name, uplink = self.spec["lead"]["name"], self.spec["name"], self.uplink
        assert uplink is not None
        if uplink.joined:
            timeout = self.spec["policy"]["loss_timeout"]
            brief = f"node {lead} is lost"
            reason = f"{brief}: it leads the job, and {name} has not heard from it for {timeout:g} s"
        else:
            brief = f"{name} cannot connect to {coordinator(lead, uplink.endpoint)}"
            reason = f"{brief}: {uplink.cause}"
        self.outcome = Outcome(JobState.LOST, 75, "tool", reason, node=int(self.spec["lead"]["node"]), brief=brief)
        self.stop(reason, float(self.spec["policy"]["grace"]))

    def _ask_stop(self, by: str, code: int) -> None:
        """Stop here at once, and let the lead stop the others: a stop that reaches one node reaches all."""
        self._tell({"type": "stop", "by": by, "code": code, "attempt": self.attempt})
        self.stop(by, float(self.spec["policy"]["grace"]))

    # -- ranks --

    def _enter(self, attempt: int) -> None:
        if attempt != self.attempt:
            self.attempt, self.ending = attempt, None
            if self.uplink is not None:
                self.uplink.attempt = attempt

    def _start(self, role: str, attempt: int) -> None:
        self._enter(attempt)
        if self.ending is not None:
            return
        exits = []
        for rank in self.ranks.values():
            if rank.key[0] == role:
                exits += self._start_rank(rank)
        if exits:
            self._tell({"type": "exited", "exits": exits, "attempt": self.attempt})

    def _start_rank(self, rank: Rank) -> List[ExitRow]:
        role, number = rank.key
        pid, why = self._open_log(rank)
        if not why:
            pid, why = rank_process.start(
                self.spec, rank.spec, self.attempt, self.job, rank.log, self.umask, self.file_limit
            )
        if why:
            self.record(
                "exited", role=role, rank=number, code=pid, signal=0, stopped=False, note=why, attempt=self.attempt
            )
            return [(role, number, pid, 0, False, why, 0, False)]
        rank.pid = pid
        self.by_pid[pid] = rank
        process = processes.identify(pid)
        start = process.start if process else 0
        self.record("started", role=role, rank=number, pid=pid, start=start, attempt=self.attempt, log=rank.log_name)
        rank.oom = pressure.Watch(pid)
        if process:
            self.family.write_down([process])
        if role == "pserver" and rank.spec["ready"]:
            self.awaited.add(rank.key, rank.spec, pid)
        elif role == "pserver":  # [pserver] ready = "started": the trainers need not wait for it
            self._tell({"type": "listening", "role": role, "rank": number, "attempt": self.attempt})
        return []

    def _open_log(self, rank: Rank) -> Tuple[int, str]:
        """(0, ""), or (126, why) where the disk is full, or the job has put something in the log's place."""
        self._note_growth(at_once=True)  # of the log before this one
        rank.log_name, rank.noted, rank.noted_at = self.paths.log(*rank.key, self.attempt), 0, 0.0
        if rank.log >= 0:
            os.close(rank.log)
        rank.log = rank.log_size = -1
        try:
            rank.log = files.open_append(self.job, rank.log_name)
        except OSError as error:
            return rank_process.NOT_EXECUTABLE, f"cannot open {rank.log_name}: {error.strerror}"
        return 0, ""

    def _reap(self) -> None:
        """One waitpid loop for ranks, orphans and the guard. What is reaped in one go is told in one message."""
        exits = []
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.keeper.pid:
                self.keeper.changed(status)
            elif pid == self.gauge.pid:
                self.gauge.changed(status)
            elif pid in self.by_pid:
                exits += self._changed(self.by_pid[pid], pid, status, used)
        if exits:
            self._tell({"type": "exited", "exits": exits, "attempt": self.attempt})

    def _changed(self, rank: Rank, pid: int, status: int, used: resource.struct_rusage) -> List[ExitRow]:
        role, number = rank.key
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            self.record("frozen" if os.WIFSTOPPED(status) else "thawed", role=role, rank=number)
            return []
        del self.by_pid[pid]
        rank.pid = 0
        self.awaited.drop(rank.key)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 0 if killed else os.WEXITSTATUS(status)
        stopped = self.ending is not None and pid not in self.ended_before
        if stopped and not killed and pid in self.mortal and code not in _OF_SIGNALS:
            stopped = False  # the signal came too late: the rank was ending by itself
        note = rank.oom.verdict() if rank.oom and killed == signal.SIGKILL and not stopped else ""
        if (code or killed) and not stopped and not note:
            self._look_at_disk()
            note = f"the disk of {self.spec['root']} is full" if self.disk.full else ""
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

    def _look_for_listeners(self) -> None:
        heard, strays = self.awaited.look()
        for role, rank in heard:
            self.record("listening", role=role, rank=rank)
            self._tell({"type": "listening", "role": role, "rank": rank, "attempt": self.attempt})
        for (role, rank), listens, endpoint in strays:
            self.record("elsewhere", role=role, rank=rank, listens=listens, endpoint=endpoint)

    def _note_growth(self, at_once: bool = False) -> None:
        """(time, log, size) of logs that grew: enough to merge ranks by time later. at_once: also of one noted a moment ago."""
        at, clock, lines = round(time.time(), 2), time.monotonic(), []
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):  # no log yet (-1), or a file system that is away
                rank.log_size = os.fstat(rank.log).st_size
                if rank.log_size != rank.noted and (at_once or clock >= rank.noted_at + _GROWTH_EVERY):
                    rank.noted, rank.noted_at = rank.log_size, clock
                    lines.append([at, rank.log_name, rank.log_size])
        self.recorder.grown(lines)

    def _note_descendants(self) -> None:
        now = time.monotonic()
        if now >= self.looked_at + _LOOK_EVERY:
            self.looked_at = now
            self.family.look()
            self._look_at_disk()
            self.holds.turn()
            for rank in self.by_pid.values():
                if rank.oom is not None:
                    rank.oom.look(rank.pid)
            if self.by_pid:
                self.gauge.turn()
            running = [Running(*rank.key, self.attempt, rank.pid, rank.log_size) for rank in self.by_pid.values()]
            self.recorder.turn(self.family.members, running)
            if self.uplink is not None:
                self.uplink.progress = self.recorder.progress
            with contextlib.suppress(OSError):
                os.utime(self.control)  # our heartbeat for whoever asks for the status
            if self.devices is not None:
                self.devices.touch()
            if now >= self.touched_at + _TOUCH_EVERY:
                self.touched_at = now
                claims.touch()

    def _look_at_disk(self) -> None:
        if self.disk.look():
            self.record("disk", full=self.disk.full, root=self.spec["root"])

    # -- stopping --

    def stop(self, why: str, grace: float) -> None:
        """TERM to all descendants now, KILL after `grace` seconds; a second call can only hurry."""
        if self.ending is not None:
            self.ending.hurry(grace)
            return
        self._reap()  # what has ended by now was not stopped
        self.awaited.clear()
        self.record("stopping", why=why)
        self.mortal = {pid for pid in self.by_pid if processes.dies_of(pid, signal.SIGTERM)}
        self.ending = Ending(self.family, str(self.spec["mark"]), grace)
        self.ended_before = set(self.by_pid) - self.ending.signalled

    def _keep_stopping(self) -> None:
        if self.ending is None or self.ending.over:
            return
        survivors = self.ending.turn(unreaped=bool(self.by_pid))
        if survivors is not None:
            self.record("clean", survivors=survivors)
            self._tell({"type": "clean", "survivors": survivors[:50], "attempt": self.attempt})

    def _read_control(self) -> None:
        """Messages of agents, a JSON object a line: see record_lines.control_line."""
        with contextlib.suppress(BlockingIOError):
            self.control_rest += os.read(self.control, 65536)
        *lines, self.control_rest = self.control_rest.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                command = record_lines.read_control(line)
                if command["type"] == "attached":
                    self._tell({"type": "attached", "attempt": self.attempt})
                elif command["type"] == "stop":
                    self.asked, self.asked_at = (str(command["by"]), int(command["code"])), time.monotonic()
                    self._tell({"type": "stop", "by": self.asked[0], "code": self.asked[1], "attempt": self.attempt})
                    self.stop(str(command["by"]), 0.0 if command["force"] else float(command["grace"]))


def _select(readers: List[Any], writers: List[Any], wait: float) -> Set[int]:
    """The descriptors that are ready, of any number: poll, since select() ends at 1024."""
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    for writer in writers:
        poll.register(writer, select.POLLIN | select.POLLOUT)
    return {fd for fd, _ in poll.poll(wait * 1000)}
