"""This module finds processes of jobs that no supervisor ends any more: what a job has left on its node, and orphans.

A process names its job, the job's directory and its rank by its environment. It is an orphan only if this directory does not
exist, or has no record of the job: a program has removed it, and so no record leads to the process. queries.OrphanRecord
stands for such a record. Each probe imports this module, and so it needs neither the records nor the fold of their events.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from clustertool.errors import PreflightError
from clustertool.model.paths import is_base, is_job_id
from clustertool.model.quantities import whole
from clustertool.model.roles import ROLES
from clustertool.node.jobs import ledger
from clustertool.node.jobs.job_processes import JobProcesses
from clustertool.node.system import processes
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.job.outcome import Key as RankKey


_LONGEST = 4096  # bytes of a path, as Linux has them
MOST = 99_999  # ranks and nodes, as answers have them


class Remains:
    """The living processes with one mark: of one job on one node. ranks: those to which they belong, as far as known."""

    def __init__(self, base: str, job: str, mark: str) -> None:
        self.base, self.job, self.mark = base, job, mark
        self.ranks: Set[RankKey] = set()
        self.processes: List[Process] = []

    @property
    def dir(self) -> str:
        """The directory of the job, as the processes name it."""
        return os.path.join(self.base, f"JOB{self.job}")

    def is_below(self, root: str) -> bool:
        """Check whether the job's directory is in this ROOT_DIR, or in the folder of a node below it."""
        parent, name = os.path.split(self.base)
        return self.base == root or (parent == root and is_base(name))

    @property
    def orphaned(self) -> bool:
        """Whether there is no record of the job, and one of its processes has this process's file system.

        In another one, paths have other meanings. False if the file server does not answer.
        """
        try:
            if self.job in ledger.find_jobs(self.base, self.job):
                return False
        except PreflightError:  # the file server does not answer
            return False
        own = processes.namespace("mnt")
        return own != "" and any(processes.namespace("mnt", str(process.pid)) == own for process in self.processes)


def find_living() -> Dict[str, Remains]:
    """Find the living processes of all jobs of this user by their environment: {mark: Remains}.

    Processes that have changed their environment are not found.
    """
    found: Dict[str, Remains] = {}
    for pid, variables in processes.find_job_processes():
        mark, output = (os.fsdecode(variables.get(name, b"")) for name in (processes.MARK, b"CLUSTERTOOL_OUTPUT"))
        job = mark.partition("/")[0]
        base, inside, _ = output.rpartition(f"/JOB{job}")
        process = processes.identify(pid)
        usable = inside and is_job_id(job) and len(output) < _LONGEST
        if not usable or process is None or not processes.alive(process):
            continue
        remains = found.setdefault(mark, Remains(base, job, mark))
        remains.processes.append(process)
        remains.ranks.update(filter(None, [rank_of(variables)]))
    return found


def rank_of(variables: Mapping[bytes, bytes]) -> Optional[RankKey]:
    """Read role and rank from the environment of a process; None if they are not there."""
    role, rank = (os.fsdecode(variables.get(name, b"")) for name in (b"CLUSTERTOOL_ROLE", b"CLUSTERTOOL_RANK"))
    number = whole(rank, 0, MOST)
    return (role, number) if role in ROLES and number is not None else None


def orphans(root: str, found: Iterable[Remains]) -> Tuple[List[Remains], List[Remains]]:
    """Select the orphans in `found` (see find_living()): those of this ROOT_DIR, and those of others."""
    orphaned = [one for one in found if one.orphaned]
    return [one for one in orphaned if one.is_below(root)], [one for one in orphaned if not one.is_below(root)]


def without_caretakers(root: str, found: Mapping[str, Remains]) -> List[Tuple[str, int]]:
    """List (job, number of living processes) for each job of a ROOT_DIR whose supervisor and guard have ended, sorted."""
    own = [one for one in found.values() if one.is_below(root)]
    left = [one for one in own if not JobProcesses(one.base, one.job, {"id": one.job}).caretakers()]
    return sorted((one.job, len(one.processes)) for one in left)
