"""The rank table has the processes of one job on this node: it starts them, opens their logs and measures how these grow."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import NotFound
from clustertool.model.container.container_command import Surroundings
from clustertool.model.job.outcome import Key, Outcome, RankExit
from clustertool.model.job.start_error import NOT_EXECUTABLE
from clustertool.model.job.state_names import RankState
from clustertool.model.notification import secret_parts
from clustertool.model.paths import JobPaths
from clustertool.model.quantities import MOST_FILES
from clustertool.model.roles import LAUNCHERS
from clustertool.node.container import rank_containers
from clustertool.node.container.rank_containers import RankContainer, RankContainers
from clustertool.node.mpi.launched_ranks import LaunchedRanks
from clustertool.node.ports import listeners as ports
from clustertool.node.ports.listeners import Listener
from clustertool.node.supervisor import rank_error, rank_process
from clustertool.node.supervisor.log_keeper import LogKeeper
from clustertool.node.system import pressure, processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec, SpecProcess
    from clustertool.model.wire.supervisor_messages import LiveStatus, RankEnvironment

OtherAddress = Tuple[Key, str, str]  # of which pserver, where it listens, its endpoint

# Seconds between two searches for pservers that listen on another address; they may yet open the right port.
_CHECK_EVERY = 3.0
_SIGNALLED = 128
_GROWTH_EVERY = 0.5  # seconds between two records of how a log grew

Growth = Sequence[Any]  # time, log, size


class PendingServer:
    """A pserver that does not listen at its endpoint yet: the trainers wait until all do.

    A port alone is not sufficient: on one machine several addresses may have a listener each at the same port. If an endpoint
    is not an address of this machine (a name, or one that a router translates), any listener at the port counts.
    """

    def __init__(self, spec: SpecProcess, pid: int) -> None:
        self.pid = pid
        self.endpoint = spec["endpoint"]
        self.ports = frozenset(spec["ready"])
        self.address = ports.own_address(self.endpoint.rpartition(":")[0].strip("[]"))
        self.check_at = time.monotonic() + _CHECK_EVERY

    def listens_at(self, listeners: Sequence[Listener]) -> bool:
        """Check whether a listener has one of the pserver's ports, at its address if that is one of this machine."""
        at = [listener for listener in listeners if listener.port in self.ports]
        return any(not self.address or ports.serves(listener, self.address) for listener in at)

    def other_address(self, listeners: Sequence[Listener]) -> str:
        """List where the pserver or a descendant listens on one of its port numbers, as "ADDRESS port PORT, ..."; or ""."""
        at = [listener for listener in listeners if listener.port in self.ports]
        own: List[Listener] = []
        for pid in [self.pid, *(process.pid for process in processes.descendants(self.pid))] if at else ():
            with contextlib.suppress(OSError):
                own += ports.listeners_of_process(pid, at)
        return ", ".join(sorted({f"{listener.address} port {listener.port}" for listener in own}))


class ListenWatch:
    """The watch for pservers that begin to listen. pending: those that were started and do not listen yet."""

    def __init__(self) -> None:
        self.pending: Dict[Key, PendingServer] = {}
        self._reported: Dict[Key, str] = {}

    def check(self) -> Tuple[List[Key], List[OtherAddress]]:
        """Return the pending pservers that listen now, and those that are newly found at another address.

        The former are pending no more; the latter are (key, where it listens, its endpoint).
        """
        if not self.pending:
            return [], []
        listeners = ports.listeners()
        ready = sorted(key for key, server in self.pending.items() if server.listens_at(listeners))
        for key in ready:
            del self.pending[key]
        return ready, self._find_other_addresses(listeners)

    def _find_other_addresses(self, listeners: Sequence[Listener]) -> List[OtherAddress]:
        """Find the pending pservers that listen at another address; each address of one is returned once.

        Each pserver is checked every 3 s.
        """
        found, now = [], time.monotonic()
        for key in sorted(self.pending):
            server = self.pending[key]
            if now >= server.check_at:
                server.check_at = now + _CHECK_EVERY
                listens = server.other_address(listeners)
                if listens and self._reported.get(key) != listens:
                    self._reported[key] = listens
                    found.append((key, listens, server.endpoint))
        return found


class Running(NamedTuple):
    """A running rank, for the recorder's thread. pid: of its program. log_size: in bytes, -1 if it is not known."""

    role: str
    rank: int
    attempt: int
    pid: int
    log_size: int


class LocalRank:
    """One rank of this node, waiting, running or ended, with the descriptor of its log, its exit, and its container."""

    def __init__(self, spec: SpecProcess) -> None:
        self.spec = spec
        self.key: Key = (spec["role"], spec["rank"])
        self.attempt = 0
        self.pid = 0
        self.exit: Optional[RankExit] = None  # of this attempt
        self.early: Optional[RankExit] = None  # it has ended, and is not judged yet: see Supervisor
        self.ended_pid, self.ended_at = 0, 0.0  # when it was reaped, by the monotonic clock
        self.cpu, self.memory = 0.0, 0  # seconds, and the most that it used in bytes, at its end
        self.log = -1
        self.log_name = spec["log"]
        self.log_size = -1
        self.log_seen = (0, 0)  # size and time of its file
        self.recorded_size, self.recorded_at = 0, 0.0  # the size that was recorded as growth, and when
        self.oom: Optional[pressure.OomWatch] = None
        self.container: Optional[RankContainer] = None

    @property
    def main(self) -> int:
        """The pid of the program: in a container not `pid`, which is that of the runtime's client."""
        return self.container.main.pid if self.container and self.container.main else self.pid

    def end(self, status: int, used: resource.struct_rusage) -> RankExit:
        """Record when a reaped rank ended and what it used, and return its exit, still without its cause and what has ended it.

        status: as wait4() returns it. A container's client exits with 128 + n where signal n ended the program.
        """
        self.ended_pid, self.ended_at = self.pid, time.monotonic()
        self.cpu, self.memory = round(used.ru_utime + used.ru_stime, 2), used.ru_maxrss << 10
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 0 if killed else os.WEXITSTATUS(status)
        if self.container is not None:
            self.cpu, self.memory = self.container.cpu, self.container.memory
            if 0 < code - _SIGNALLED < signal.NSIG:
                code, killed = 0, code - _SIGNALLED
        return RankExit(*self.key, code, killed)

    def sample(self) -> bool:
        """Sample the out-of-memory counters and the container. Return whether a container's program was stopped or continued.

        Kills podman's client if the container's monitor is gone: it would wait 20 s for an exit code.
        """
        if self.container is None:
            if self.oom is not None:
                self.oom.update(self.pid)
            return False
        if self.oom is not None and self.container.main is not None and processes.alive(self.container.main):
            self.oom.update(self.main)  # not when it has ended: the container's cgroup outlives it
        changed = self.container.sample()
        if self.container.orphaned and self.pid != self.main:  # the client of podman would wait 20 s for an exit code
            processes.signal_one(processes.identify(self.pid) or processes.Process(self.pid, 0), signal.SIGKILL)
        return changed

    @property
    def state(self) -> RankState:
        """The state: RUNNING or FROZEN with a process, RUNNING too before its end is judged, WAITING before its start.

        Else STOPPED, FAILED or DONE, by its exit.
        """
        if self.pid:
            frozen = processes.stopped(processes.identify(self.main) or processes.Process(self.main, 0))
            return RankState.FROZEN if frozen else RankState.RUNNING
        if self.early is not None:
            return RankState.RUNNING
        if self.exit is None:
            return RankState.WAITING
        if self.exit.stopped:
            return RankState.STOPPED
        return RankState.FAILED if self.exit.failed else RankState.DONE


class RankTable:
    """The ranks of a job on this node: starts them, opens their logs, and measures how these grow.

    running: the ranks by pid, from start() until forget_process(). job: the descriptor of the job's directory.
    """

    def __init__(self, spec: Spec, job: int, umask: int) -> None:
        self._spec = spec
        self._job = job
        self._umask = umask
        self._paths = JobPaths.at(spec["job_dir"])
        self._own_files = 0  # the soft limit of open files before raise_file_limit()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # Of the ranks. Some programs close as many descriptors as they may have, and take minutes for a billion.
        self._file_limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        self._firsts: Dict[str, Key] = {}  # of each role the first rank of this node
        for process in spec["processes"]:
            self._firsts.setdefault(process["role"], (process["role"], process["rank"]))
        self.logs = LogKeeper(job, self._paths)
        self._ranks = [LocalRank(process) for process in spec["processes"]]
        self.servers = ListenWatch()
        self.launched = LaunchedRanks(spec)
        self.containers = RankContainers(spec, job)
        self.running: Dict[int, LocalRank] = {}

    def of_role(self, role: str) -> Iterator[LocalRank]:
        """Iterate over the ranks of a role on this node."""
        return (rank for rank in self._ranks if rank.key[0] == role)

    def early(self) -> List[Tuple[LocalRank, RankExit]]:
        """List (rank, exit) of the ranks that have ended and are not judged yet."""
        return [(rank, rank.early) for rank in self._ranks if rank.early is not None]

    def raise_file_limit(self, needed: int) -> None:
        """Raise this process's soft limit of open files to `needed`, or the hard limit if that is lower; ignore errors."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            with contextlib.suppress(ValueError, OSError):
                wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                self._own_files = soft

    def close(self) -> None:
        """Close the logs, and restore the soft limit of open files that raise_file_limit() has changed."""
        for rank in self._ranks:
            if rank.log >= 0:
                os.close(rank.log)
                rank.log = -1
        if self._own_files:
            with contextlib.suppress(ValueError, OSError):
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._own_files, hard))

    def find(self, key: Key) -> Optional[LocalRank]:
        """Return the rank of this node with a key; None if it has none."""
        return next((rank for rank in self._ranks if rank.key == key), None)

    def launchers(self) -> List[int]:
        """Return the pids of mpirun and its daemon that run on this node."""
        return [pid for pid, rank in self.running.items() if rank.key[0] in LAUNCHERS]

    def adopt(self, rank: LocalRank, pid: int, attempt: int) -> str:
        """Open the log of a rank that mpirun has started and that waits for its begin, and add it to the running ones.

        Returns why its log cannot be opened, or "".
        """
        why = self._open_log(rank, attempt)
        if not why:
            self._add_running(rank, pid)
        return why

    def start(self, rank: LocalRank, attempt: int) -> Tuple[int, str]:
        """Start a rank, or its container, with a new log. Return (pid, ""), or (exit code, reason) if it cannot be started.

        The code is 127, or 126, also if the log or the container's files cannot be written.
        """
        why = self._open_log(rank, attempt)
        if why:
            return NOT_EXECUTABLE, why
        limits = (self._umask, self._file_limit)
        spec, process = self._spec, self.launched.complete_launcher(rank.spec)
        if process is not rank.spec:  # where its files are
            spec = {**spec, "work_dir": spec["job_dir"]}
        client: Optional[Tuple[List[str], Dict[str, str]]] = None
        if self.containers.present:
            variables = rank_process.planned_variables(spec, process, attempt)
            try:
                client, rank.container = self.containers.build_start(process, variables, self._surroundings(attempt))
            except OSError as error:
                return NOT_EXECUTABLE, f"cannot write to {spec['job_dir']}: {error.strerror}"
        pid, why = rank_process.start(spec, process, attempt, self._job, rank.log, *limits, client)
        if not why:
            self._add_running(rank, pid)
        return pid, why

    def _surroundings(self, attempt: int) -> Surroundings:
        """Collect the attempt, umask, limits and device files for a rank's container."""
        present = rank_containers.device_files(self._spec["device_kind"])
        return Surroundings(attempt, self._umask, rank_containers.limits(self._file_limit), present)

    def take_entered(self) -> List[LocalRank]:
        """Return the ranks whose program in a container was found since the last call, after a first sample of each."""
        found = [rank for rank in self.running.values() if rank.container is not None and rank.container.find()]
        for rank in found:
            if rank.oom is not None:
                rank.oom.enter_container(rank.main)
            rank.sample()  # it may end before the next sample
        return found

    def _add_running(self, rank: LocalRank, pid: int) -> None:
        """Set the pid of a rank that was started, watch its memory, and add it to the running ranks."""
        rank.pid = pid
        rank.oom = pressure.OomWatch(pid)
        self.running[pid] = rank

    def _open_log(self, rank: LocalRank, attempt: int) -> str:
        """Prepare a rank for an attempt: reset it, open log and copies, and remove its error file. Return an error or ""."""
        before = rank.log_name
        rank.attempt, rank.log_name, rank.exit = attempt, self._paths.log(*rank.key, attempt), None
        rank.container = None
        rank.recorded_size, rank.recorded_at = 0, 0.0
        if rank.log >= 0:
            os.close(rank.log)
        self.logs.close_log(before)
        rank.log = rank.log_size = -1
        rank.log_seen = (0, 0)
        more = [self._paths.first_log(rank.key[0], rank.log_name)] if rank.key in self._firsts.values() else []
        try:
            rank.log = self.logs.open(rank.log_name, *more)
        except OSError as error:  # the disk is full, or the job has put something in the log's place
            return f"cannot open {rank.log_name}: {error.strerror}"
        rank_error.remove_file(self._job, *rank.key)
        return ""

    def with_reason(self, rank: LocalRank, exit: RankExit, disk: str) -> RankExit:
        """Add to the exit of a failed rank its note, the number of its error, and whether that is a consequence or a timeout.

        The note names memory, the container's runtime or the disk, and the recorded or logged exception. disk: that the disk is
        full, or "".
        """
        (role, number), killed, runtime = rank.key, exit.signal, self.containers.runtime
        note = rank.oom.verdict() if rank.oom and killed == signal.SIGKILL else ""
        if rank.container is not None and rank.container.orphaned:
            note = f"the process of {runtime} that observed its container has ended"
        of_runtime = rank.container is not None and exit.code > 0 and not note and not rank.container.reached
        if of_runtime:
            note = rank_error.describe_runtime_error(self._job, rank.log_name, runtime, exit.code)
        note, found = note or disk, rank_error.LoggedError(b"", b"")
        secrets = [*self._spec.get("secrets", {}).values(), *secret_parts(self._spec.get("notify", ()))]
        recorded = rank_error.read_file(self._job, role, number, secrets)
        if recorded:
            found = rank_error.LoggedError(recorded.encode(), recorded.encode())
        elif exit.code or killed == signal.SIGABRT:  # libraries abort for errors of connections
            found = rank_error.end_of_log(self._job, rank.log_name)
            recorded = "" if of_runtime else rank_error.shown_exception(found, secrets)
        note = "; ".join(filter(None, (note, recorded)))
        error, consequence, timed_out = rank_error.classify(found)
        consequence = consequence or killed == signal.SIGPIPE
        exit = exit._replace(consequence=consequence, timed_out=timed_out)
        return exit._replace(note=note, error=error, of_runtime=of_runtime)

    def status(self, attempt: int, coordinates: bool, stopping: str, outcome: Optional[Outcome]) -> LiveStatus:
        """Build the answer to a request for the status of this node, with the state, pid and log of each rank.

        coordinates: `leads` of LiveStatus. stopping: see there.
        """
        return {
            "type": "status",
            "job": self._spec["job"],
            "node": self._spec["node"],
            "attempt": attempt,
            "leads": coordinates,
            "stopping": stopping,
            "outcome": None if outcome is None else outcome.as_record(),
            "ranks": [
                {
                    "role": rank.key[0],
                    "rank": rank.key[1],
                    "attempt": rank.attempt,
                    "state": rank.state.value,
                    "pid": rank.main,
                    "log": rank.log_name,
                }
                for rank in self._ranks
            ],
        }

    def environment(self, role: str, rank: int, attempt: int) -> RankEnvironment:
        """Build the answer with all that start() would give to a rank of this node in this attempt; start nothing.

        Raises NotFound if the node has no such rank, or the job's directory was removed.
        """
        found = self.find((role, rank))
        if found is None:
            raise NotFound(f"node {self._spec['name']} has no {role} {rank}", "ask the node that the plan gives it to")
        process = found.spec
        try:
            start = rank_process.rank_start(self._spec, process, attempt, self._job)
        except FileNotFoundError as error:
            raise NotFound(f"{error.filename} was removed", "start the job again") from None
        answer: RankEnvironment = {
            "type": "rank-environment",
            "role": role,
            "rank": rank,
            "attempt": attempt,
            "argv": start.argv,
            "env": {**start.env, **self.launched.rank_variables(role)},
            "work_dir": os.path.realpath(start.folder),
            "log": self._paths.of(self._paths.written(self._paths.log(role, rank, attempt))),
            "umask": self._umask,
            "file_limit": self._file_limit,
            "device_kind": self._spec["device_kind"],
            "devices": process["devices"],
            "shards": process["shards"],
        }
        if self.containers.present:
            variables = rank_process.planned_variables(self._spec, process, attempt)
            answer["session"] = self.containers.session(process, variables, self._surroundings(attempt))
        return answer

    def waiting_clients(self) -> FrozenSet[int]:
        """Return the pids of the shells that wait for containers of running ranks."""
        return frozenset(pid for pid, rank in self.running.items() if rank.container and rank.container.waits)

    def pass_on(self, numbers: Sequence[int]) -> None:
        """Send each of these signals to the program of each running rank."""
        for number in numbers:
            for rank in self.running.values():
                processes.signal_one(processes.identify(rank.main) or processes.Process(rank.main, 0), number)

    def forget_process(self, rank: LocalRank) -> None:
        """Remove a rank from the running ones, and its pid."""
        del self.running[rank.pid]
        rank.pid = 0

    def growth(self, at_once: bool = False) -> Sequence[Growth]:
        """Return (time, log, size) of logs that grew, each at most twice a second, or `at_once`; have changed files copied.

        That is enough to merge the output of ranks by time later.
        """
        at, clock, lines = round(time.time(), 2), time.monotonic(), []
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # no log yet (-1), or a file system that is away
                about = os.fstat(rank.log)
                seen = about.st_size, about.st_mtime_ns
                if seen != rank.log_seen and self.logs.changed(rank.log_name):
                    rank.log_seen = seen
                rank.log_size = max(rank.log_size, self.logs.base(rank.log_name) + about.st_size)
                if rank.log_size != rank.recorded_size and (at_once or clock >= rank.recorded_at + _GROWTH_EVERY):
                    rank.recorded_size, rank.recorded_at = rank.log_size, clock
                    lines.append([at, rank.log_name, rank.log_size])
        return lines

    def snapshot(self) -> List[Running]:
        """Return a record of each running rank, for the recorder's thread."""
        return [Running(*rank.key, rank.attempt, rank.main, rank.log_size) for rank in self.running.values()]
