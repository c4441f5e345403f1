"""The recorder is a thread of the supervisor that records what ranks use and when their logs grew.

A slow disk or driver costs lines, never a heartbeat. The loop only passes the list of living processes and grown logs. The
thread samples /proc and the cards, and writes; while it is busy, further lists are dropped. model/job/usage.py defines the
lines and their thinning.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from clustertool.model.job import usage
from clustertool.model.job.outcome import Key
from clustertool.model.job.usage import CardUsage, RankUsage, UsageLine
from clustertool.model.paths import OURS, JobPaths
from clustertool.node.jobs.rank_log import progress
from clustertool.node.storage import files
from clustertool.node.storage.disk_worker import DiskWorker
from clustertool.node.system import pressure, processes
from clustertool.node.system.processes import Process, Stat

EVERY = 2.0  # seconds between two lines
_SHARE = 500  # a sample of thousands of processes is less frequent: it may take this part of a core
_MORE = 1000  # new lines, after which the old ones are thinned out, or as many as had stayed
_WAITING = 1000  # calls for a thread that waits for its disk
_PROGRESS = 2048  # bytes of a log in which a step is searched
_FAREWELL = 0.5  # seconds the last lines get

Reached = Tuple[str, int, Optional[float], Optional[float], float]  # role, rank, epoch, step, time of its last output


class Running(NamedTuple):
    """A rank as the supervisor knows it."""

    role: str
    rank: int
    attempt: int
    pid: int
    log_size: int


Growth = Sequence[Any]  # time, log, size


class UsageRecorder:
    """turn() with each sample of the descendants; close() at the end. `cards` is called in the thread and may be slow."""

    def __init__(self, job: int, cards: Callable[[], Sequence[CardUsage]] = tuple) -> None:
        # Of the running ranks, at the newest sample; a new object after each change.
        self.progress: Tuple[Reached, ...] = ()
        self._job = job
        self._cards = cards
        self._at = 0.0
        self._pause = EVERY
        self._worker = DiskWorker()
        self._busy = False
        self._usage = Book(job, f"{OURS}/usage.jsonl")
        self._growth = Book(job, f"{OURS}/growth.jsonl")
        self._sampler = Sampler()
        self._sampled: FrozenSet[Running] = frozenset()  # the ranks at the newest sample

    def turn(self, members: Sequence[Process], ranks: Sequence[Running]) -> None:
        """Take a sample if it is due. members: every living descendant. Costs the caller nothing; called at any rate."""
        now = time.monotonic()
        if now < self._at or self._busy or not ranks:
            return
        self._at = now + self._pause
        self._busy = True  # before the thread can be done with it
        if not self._worker.put(self._use, time.time(), members, ranks):
            self._busy = False

    def grown(self, lines: Sequence[Growth]) -> None:
        """Record that logs have grown. Costs the caller nothing."""
        if lines and self._worker.waiting < _WAITING:
            self._worker.put(self._growth.write, lines[-1][0], *lines)

    def close(self) -> None:
        self._worker.end(_FAREWELL, self._usage.close, self._growth.close)

    # -- in the thread --

    def _use(self, t: float, members: Sequence[Process], ranks: Sequence[Running]) -> None:
        began = time.thread_time()
        line = self._sampler(t, members, ranks)
        self._read_logs(ranks)
        with contextlib.suppress(OSError, ValueError):
            cards = self._cards()
            if cards:
                line["d"] = list(cards)
        self._usage.write(t, line)
        self._pause = max(EVERY, _SHARE * (time.thread_time() - began))
        self._busy = False

    def _read_logs(self, ranks: Sequence[Running]) -> None:
        """Read the progress of the ranks, for the coordinator: it is all that is known of them if this node is lost.

        A log that has not grown since the newest sample is not read again.
        """
        before, found = {reached[:2]: reached for reached in self.progress}, []
        for rank in ranks:
            key = rank.role, rank.rank
            if key in before and rank in self._sampled:
                found.append(before[key])
                continue
            now = progress(self._job, JobPaths.log(*key, rank.attempt), _PROGRESS)
            if now is not None:
                found.append((*key, *now))
        self._sampled = frozenset(ranks)
        if tuple(found) != self.progress:
            self.progress = tuple(found)


class Book:
    """A file of lines, thinned out now and then. It is replaced whole, so a reader never sees half of it."""

    def __init__(self, job: int, name: str) -> None:
        self._job, self._name = job, name
        self._journal: Optional[files.Journal] = None
        self._fresh = self._stayed = 0

    def write(self, now: float, *lines: object) -> None:
        with contextlib.suppress(OSError):  # no room for the file: the lines are lost
            self._journal = self._journal or files.Journal(files.open_append(self._job, self._name))
            self._journal.write(*lines)
            self._fresh += len(lines)
            if self._fresh >= max(_MORE, self._stayed):
                self._fresh = 0
                self._thin(now)

    def _thin(self, now: float) -> None:
        data = usage.thinned(files.read(self._job, self._name), now)
        files.create(self._job, self._name + ".new", data, exclusive=False)
        os.rename(self._name + ".new", self._name, src_dir_fd=self._job, dst_dir_fd=self._job)
        self._stayed = data.count(b"\n")
        self.close()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


class Sampler:
    """One sample of all members: their ranks, and what each rank has used so far. Keeps the usage of ended processes."""

    def __init__(self) -> None:
        self._owners: Dict[Process, Optional[Key]] = {}
        self._used: Dict[Key, Tuple[int, float, float]] = {}  # (pid, seconds of the living then, seconds so far)

    def __call__(self, t: float, members: Sequence[Process], ranks: Sequence[Running]) -> UsageLine:
        stats = {}
        for member in members:
            found = processes.stat(member.pid)
            if found is not None and found.start == member.start:
                stats[member.pid] = found
        owned = self._owned(stats, {rank.pid: (rank.role, rank.rank) for rank in ranks})
        rows = [self._row(rank, owned.get((rank.role, rank.rank), ())) for rank in ranks]
        return {"t": round(t, 2), "n": machine(), "r": rows}

    def _row(self, rank: Running, stats: Sequence[Stat]) -> RankUsage:
        """Build the row of a rank.

        A process's time is added to its parent when it is waited for, so the sum over the living grows, except for orphans.
        """
        key = (rank.role, rank.rank)
        total = sum(stat.cpu + stat.waited for stat in stats)
        pid, before, seconds = self._used.get(key, (rank.pid, 0.0, 0.0))
        seconds += max(0.0, total - (before if pid == rank.pid else 0.0))
        self._used[key] = rank.pid, total, seconds
        living = [stat for stat in stats if stat.state not in "ZX"]
        memory = sum(stat.memory for stat in living)
        return rank.role, rank.rank, rank.attempt, round(seconds, 2), memory, len(living), max(rank.log_size, 0)

    def _owned(self, stats: Dict[int, Stat], ranks: Dict[int, Key]) -> Dict[Key, List[Stat]]:
        """Group members by rank. One stays a rank's when its parent dies and it becomes the supervisor's child."""
        self._owners = {process: key for process, key in self._owners.items() if process.pid in stats}
        self._owners.update((Process(pid, stats[pid].start), key) for pid, key in ranks.items() if pid in stats)
        found: Dict[Key, List[Stat]] = {}
        for pid, stat in stats.items():
            key = self._owner(pid, stats)
            if key is not None:
                found.setdefault(key, []).append(stat)
        return found

    def _owner(self, pid: int, stats: Dict[int, Stat]) -> Optional[Key]:
        """Find the rank of the nearest known parent; an orphan that was never seen with it is identified by its environment.

        A loop, since a program may nest more processes than Python nests calls.
        """
        process, below = Process(pid, stats[pid].start), []
        while process not in self._owners:
            below.append(process)
            parent = stats[process.pid].parent
            if parent not in stats:
                self._owners[process] = _by_environment(process.pid)
            else:
                process = Process(parent, stats[parent].start)
        owner = self._owners[process]
        self._owners.update(dict.fromkeys(below, owner))
        return owner


def _by_environment(pid: int) -> Optional[Key]:
    variables = processes.environment(pid)
    with contextlib.suppress(KeyError, ValueError):
        return variables[b"CLUSTERTOOL_ROLE"].decode(), int(variables[b"CLUSTERTOOL_RANK"])
    return None


def machine() -> Tuple[float, int, int, int]:
    """(busy CPU seconds, cores, bytes used, bytes there are) of this machine; zeros for what it does not tell."""
    total, available = pressure.memory()
    return round(pressure.cpu_ticks()[0] / processes.TICKS, 2), os.cpu_count() or 0, total - available, total
