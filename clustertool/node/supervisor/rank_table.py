"""The rank table has the processes of one job on this node: it starts them, opens their logs and measures how these grow."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional, Sequence, Tuple

from clustertool.model.job.outcome import Key
from clustertool.model.paths import JobPaths
from clustertool.node.storage import files
from clustertool.node.supervisor import rank_process
from clustertool.node.supervisor.usage_recorder import Growth, Running
from clustertool.node.system import pressure

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec, SpecProcess

_GROWTH_EVERY = 0.5  # seconds between two records of how a log grew


class LocalRank:
    """One rank of this node, running or ended."""

    def __init__(self, spec: SpecProcess) -> None:
        self.spec = spec
        self.key: Key = (str(spec["role"]), int(spec["rank"]))
        self.attempt = 0
        self.pid = 0
        self.log = -1
        self.log_name = str(spec["log"])
        self.log_size = -1
        self.recorded_size, self.recorded_at = 0, 0.0  # the size that was recorded as growth, and when
        self.oom: Optional[pressure.OomWatch] = None


class RankTable:
    """`running` has the ranks by pid from start() until reaped(). `job`: the descriptor of the job's directory."""

    def __init__(self, spec: Spec, job: int, umask: int) -> None:
        self._spec = spec
        self._job = job
        self._umask = umask
        self._paths = JobPaths(os.path.dirname(spec["job_dir"]), spec["job"])
        self._file_limit = 0  # the user's own, for the ranks, if raise_file_limit() has changed ours
        self._ranks = [LocalRank(process) for process in spec["processes"]]
        self.running: Dict[int, LocalRank] = {}

    def of_role(self, role: str) -> Iterator[LocalRank]:
        return (rank for rank in self._ranks if rank.key[0] == role)

    def raise_file_limit(self, needed: int) -> None:
        """Allow this process so many descriptors, and the ranks as many as before. Common limits are 1024."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            with contextlib.suppress(ValueError, OSError):
                wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                self._file_limit = soft

    def start(self, rank: LocalRank, attempt: int) -> Tuple[int, str]:
        """Start a rank with a new log. Return (pid, "") or (exit code, reason): 127, or 126 also if there can be no log."""
        rank.attempt = attempt
        pid, why = self._open_log(rank)
        if not why:
            pid, why = rank_process.start(
                self._spec, rank.spec, attempt, self._job, rank.log, self._umask, self._file_limit
            )
        if not why:
            rank.pid = pid
            rank.oom = pressure.OomWatch(pid)
            self.running[pid] = rank
        return pid, why

    def _open_log(self, rank: LocalRank) -> Tuple[int, str]:
        """Return (0, ""), or (126, reason) if the disk is full, or the job has put something in the log's place."""
        rank.log_name, rank.recorded_size, rank.recorded_at = self._paths.log(*rank.key, rank.attempt), 0, 0.0
        if rank.log >= 0:
            os.close(rank.log)
        rank.log = rank.log_size = -1
        try:
            rank.log = files.open_append(self._job, rank.log_name)
        except OSError as error:
            return rank_process.NOT_EXECUTABLE, f"cannot open {rank.log_name}: {error.strerror}"
        return 0, ""

    def reaped(self, rank: LocalRank) -> None:
        del self.running[rank.pid]
        rank.pid = 0

    def growth(self, at_once: bool = False) -> Sequence[Growth]:
        """Return (time, log, size) of logs that grew, each at most twice a second, or `at_once`.

        That is enough to merge the output of ranks by time later.
        """
        at, clock, lines = round(time.time(), 2), time.monotonic(), []
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # no log yet (-1), or a file system that is away
                rank.log_size = os.fstat(rank.log).st_size
                if rank.log_size != rank.recorded_size and (at_once or clock >= rank.recorded_at + _GROWTH_EVERY):
                    rank.recorded_size, rank.recorded_at = rank.log_size, clock
                    lines.append([at, rank.log_name, rank.log_size])
        return lines

    def snapshot(self) -> List[Running]:
        """Return the running ranks, for the recorder's thread."""
        return [Running(*rank.key, rank.attempt, rank.pid, rank.log_size) for rank in self.running.values()]
