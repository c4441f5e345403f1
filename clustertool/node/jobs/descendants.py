"""This module finds the processes of a job: the living descendants of its supervisor, and what a stop without it searches.

The supervisor records each descendant on disk, for a stop without supervisor.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Dict, Iterable, List, Mapping, Optional, Set

from clustertool.model.paths import OURS
from clustertool.node.jobs.remains import rank_of
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.processes import Process, Stat

if TYPE_CHECKING:
    from clustertool.model.job.outcome import Key

_SEEN = f"{OURS}/seen"
_MOST = 20_000  # lines, after which the dead are struck off
_FEW = 100  # threads of all members together
# Pids of children that are no processes of the job, with all that they start: they send its notifications (notifier.py). The
# set is that of this process, since they may outlive an epoch of an elastic job.
APART: Set[int] = set()


class Descendants:
    """The living descendants of a supervisor, its members, which it records in a file of the job.

    spare: the pids of children that are no members: the guard and the gauge. others: processes of the job that are no
    descendants, since a daemon has started them; what they start are members, too.
    """

    def __init__(self, job: int, head: Process) -> None:
        self.head = head
        self.spare: Set[int] = set()
        self.others: Set[Process] = set()
        self._job = job
        self._members: Dict[int, Process] = {}
        self._last: Set[int] = set()
        self._settled: Set[int] = set()
        self._book = files.Journal(files.open_append(job, _SEEN))
        self._lines = 0

    @property
    def members(self) -> List[Process]:
        """The members that lived at the last sample."""
        return list(self._members.values())

    def living(self) -> List[Process]:
        """Find the members that live now: all descendants but `spare` and APART, and `others` with theirs.

        Record new ones, drop dead others.
        """
        APART.intersection_update(processes.children(self.head.pid) if APART else ())
        below = processes.descendants(self.head.pid, APART)
        found = [process for process in below if process.pid not in self.spare]
        self.others = {process for process in self.others if processes.alive(process)}
        for other in self.others.difference(found):
            found += [other, *processes.descendants(other.pid)]
        self.write_down(found)
        self._members = {process.pid: process for process in found}
        return [process for process in found if processes.alive(process)]

    def has_children(self) -> bool:
        """Check whether the supervisor has children of the job, dead ones included. Without them it has no descendants at all.

        A process may start another one and end while living() searches, so that living() finds neither. But the supervisor is
        their subreaper: an orphan becomes its child at once, and each child stays one until the supervisor reaps it.
        """
        return any(pid not in self.spare | APART for pid in processes.children(self.head.pid))

    def update(self) -> None:
        """Find and record members that are new since the last sample.

        If the members have more than 100 threads in all, only new pids are read: this is called twice a second.
        """
        found = (processes.stat(pid) for pid in self._members)
        if sum(member.threads for member in found if member) > _FEW:
            self._add_newcomers()
        else:
            self._last, self._settled = set(), set()
            self.living()

    def _add_newcomers(self) -> None:
        """Find and record new members among the pids that are new on this machine, and drop ended ones: for many threads.

        A new process is read twice, since its parent may end during the first time.
        """
        now = set(processes.pids())
        new = {pid: found for pid, found in ((pid, processes.stat(pid)) for pid in now - self._settled) if found}
        self._last, self._settled = now, now & self._last
        self._members = {pid: member for pid, member in self._members.items() if pid in now}
        parents = {self.head.pid, *(stat.parent for stat in new.values() if self._is_member(stat.parent))}
        while parents:
            below = (Process(pid, stat.start) for pid, stat in new.items() if stat.parent in parents)
            born = [process for process in below if process.pid not in self.spare | APART]
            self.write_down(born)
            parents = {process.pid for process in born}

    def _is_member(self, pid: int) -> bool:
        """Check whether a pid is that of a member, and not of a later process with the same number."""
        return pid in self._members and processes.identify(pid) == self._members[pid]

    def add(self, process: Process) -> None:
        """Add a child that is no member, but must end with the supervisor, to `spare` and to the file."""
        self.spare.add(process.pid)
        self._book.lines([b"%d %d" % process])

    def close(self) -> None:
        """Close the file."""
        self._book.close()

    def write_down(self, found: Iterable[Process]) -> None:
        """Add processes to the members, and those that are new to the file; remove dead ones from it after 20,000 lines."""
        fresh = [process for process in found if self._members.get(process.pid) != process]
        self._members.update((process.pid, process) for process in fresh)
        self._book.lines(b"%d %d" % process for process in fresh)
        self._lines += len(fresh)
        if self._lines > _MOST:
            self._remove_dead()

    def _remove_dead(self) -> None:
        """Replace the file by one with the living processes only.

        A job that starts a program every second for a month must not fill the disk.
        """
        known = {*recorded(self._job), *self._members.values()}
        living = b"".join(b"%d %d\n" % process for process in known if processes.alive(process))
        self._lines = 0
        with contextlib.suppress(OSError):
            files.create(self._job, _SEEN + ".new", living, exclusive=False)
            os.rename(_SEEN + ".new", _SEEN, src_dir_fd=self._job, dst_dir_fd=self._job)
            self._book.close()
            self._book = files.Journal(files.open_append(self._job, _SEEN))


class Owners:
    """The ranks of processes, as far as known."""

    def __init__(self) -> None:
        self._known: Dict[Process, Optional[Key]] = {}

    def find(self, stats: Mapping[int, Stat], ranks: Mapping[int, Key]) -> Dict[int, Key]:
        """Find the rank of each of these processes; leave out those of no rank. ranks: those of the ranks' own programs.

        A process stays with its rank when its parent dies and it becomes the supervisor's child.
        """
        self._known = {process: key for process, key in self._known.items() if process.pid in stats}
        self._known.update((Process(pid, stats[pid].start), key) for pid, key in ranks.items() if pid in stats)
        found = {pid: self._find_one(pid, stats) for pid in stats}
        return {pid: key for pid, key in found.items() if key is not None}

    def _find_one(self, pid: int, stats: Mapping[int, Stat]) -> Optional[Key]:
        """Find the rank of the nearest parent that is known, and remember it; None if the process belongs to none.

        An orphan that was never seen with its parent is identified by its environment. A loop, since a program may nest more
        processes than Python nests calls.
        """
        process, below = Process(pid, stats[pid].start), []
        while process not in self._known:
            below.append(process)
            parent = stats[process.pid].parent
            if parent not in stats:
                self._known[process] = rank_of(processes.environment(process.pid))
            else:
                process = Process(parent, stats[parent].start)
        owner = self._known[process]
        self._known.update(dict.fromkeys(below, owner))
        return owner


def recorded(job: int) -> List[Process]:
    """Read the descendants that a supervisor has recorded, alive or not; [] if the file cannot be read.

    job: the job directory's descriptor. Dead ones are removed from the file now and then.
    """
    found = []
    with contextlib.suppress(OSError):
        for line in files.read(job, _SEEN).splitlines():
            fields = line.split()
            if len(fields) == 2 and all(field.isdigit() for field in fields):
                found.append(Process(int(fields[0]), int(fields[1])))
    return found


class JobSearch:
    """A search for the processes of a job on a node: those that are known or have its marker, and their children.

    known: processes of the job, alive or not. mark: its marker in their environment.
    """

    def __init__(self, known: Iterable[Process], mark: str) -> None:
        self.known = set(known)
        self.mark = mark

    def living(self) -> List[Process]:
        """Find the living processes that are known or have the mark, and their descendants, without this process.

        They stay known: a parent may be dead at the next search. One that has ended since may have started others: search
        again.
        """
        seeds = {*filter(processes.alive, self.known), *processes.find_marked(self.mark)}
        found: Dict[int, Process] = {process.pid: process for process in seeds}
        for process in seeds:
            found.update((child.pid, child) for child in filter(processes.alive, processes.descendants(process.pid)))
        found.pop(os.getpid(), None)
        self.known.update(found.values())
        return list(found.values())
