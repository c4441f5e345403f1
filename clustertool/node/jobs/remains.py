"""This module finds processes of jobs that no supervisor ends any more: what a job has left on its node, and orphans.

A process names its job, the job's directory and its rank by its environment. It is an orphan only if this directory does not
exist, or has no record of the job: a program has removed it, and so no record leads to the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, cast

from clustertool.errors import PreflightError
from clustertool.model.job.caretakers import CARETAKERS, CaretakerRecord
from clustertool.model.job.node_status import NodePart, NodeRecord
from clustertool.model.job.outcome import Key as RankKey
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import is_base, is_job_id
from clustertool.model.roles import ROLES
from clustertool.node.jobs import descendants
from clustertool.node.jobs.job_processes import JobProcesses
from clustertool.node.jobs.records import Key, Record, names
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import JobHeader

_MOUNTS = "ns/mnt"


class Remains(NamedTuple):
    """The living processes with one mark: of one job on one node. ranks: those to which they belong, as far as known."""

    base: str
    job: str
    mark: str
    ranks: Set[RankKey]
    processes: List[Process]

    @property
    def dir(self) -> str:
        """The directory of the job, as the processes name it."""
        return os.path.join(self.base, f"JOB{self.job}")

    def is_below(self, root: str) -> bool:
        """Whether it is a job of this ROOT_DIR."""
        parent, name = os.path.split(self.base)
        return self.base == root or (parent == root and is_base(name))

    @property
    def orphaned(self) -> bool:
        """Whether there is no record of the job. Processes with another file system do not count: their paths are not ours."""
        try:
            if self.job in names(self.base, self.job):
                return False
        except PreflightError:  # the file server does not answer
            return False
        return any(_mounts(process.pid) == _mounts(os.getpid()) != "" for process in self.processes)


def living() -> Dict[str, Remains]:
    """What lives of all jobs of this user, by mark. Processes that have changed their environment are not found."""
    found: Dict[str, Remains] = {}
    for pid, variables in processes.of_jobs():
        mark, output = (os.fsdecode(variables.get(name, b"")) for name in (processes.MARK, b"CLUSTERTOOL_OUTPUT"))
        job = mark.partition("/")[0]
        base, inside, _ = output.rpartition(f"/JOB{job}")
        process = processes.identify(pid)
        if not inside or not is_job_id(job) or process is None or not processes.alive(process):
            continue
        remains = found.setdefault(mark, Remains(base, job, mark, set(), []))
        remains.processes.append(process)
        role, rank = (os.fsdecode(variables.get(name, b"")) for name in (b"CLUSTERTOOL_ROLE", b"CLUSTERTOOL_RANK"))
        if role in ROLES and rank.isdigit():
            remains.ranks.add((role, int(rank)))
    return found


def of_record(record: Record, part: NodePart, found: Mapping[str, Remains]) -> List[RankKey]:
    """The ranks of which something lives on this node after supervisor and guard have ended. found: see living()."""
    if isinstance(record, OrphanRecord):
        return sorted(record.remains.ranks)
    if not record.here or part.state in (JobState.RUNNING, JobState.STARTING):
        return []
    own = record.last()
    key = record.key()
    if own.clean or key is None or record.caretakers(own):
        return []
    if key.mark in found:
        return sorted(found[key.mark].ranks)
    if not record.process("supervisor", own) or not any(map(processes.alive, _recorded(record))):
        return []
    return sorted((str(one["role"]), int(one["rank"])) for one in record.header.get("processes", ()))


def _recorded(record: Record) -> List[Process]:
    with files.closing(files.open_job_dir(record.paths.dir)) as job:
        return descendants.recorded(job)


class OrphanRecord(Record):
    """A job without a record, as its processes name it."""

    def __init__(self, remains: Remains) -> None:
        node = remains.mark.split("/")[1:2]
        number = int(node[0]) if node and node[0].isdigit() else 0
        super().__init__(
            remains.base, remains.job, cast("JobHeader", {"id": remains.job, "node": number, "created": 0.0})
        )
        self.remains = remains

    def own(self) -> NodeRecord:
        return NodeRecord()

    def last(self) -> NodeRecord:
        return NodeRecord()

    def key(self) -> Key:
        return Key(self.remains.mark, False)

    def blank(self) -> bool:
        return False

    def supervised(self, own: Optional[NodeRecord] = None) -> bool:
        """False: a supervisor that moves ends the job by itself, and no command reaches it."""
        return False

    def process(self, kind: str, own: Optional[CaretakerRecord] = None) -> Optional[Process]:
        """A supervisor is the parent of a process of the job, guard and gauge are its children."""
        parents = {getattr(processes.stat(process.pid), "parent", 0) for process in self.remains.processes}
        heads = [pid for pid in parents if processes.named(pid)[0] == f"ct-{CARETAKERS[0]}"]
        near = heads if kind == CARETAKERS[0] else [child for pid in heads for child in processes.children(pid)]
        return next((processes.identify(pid) for pid in near if processes.named(pid)[0] == f"ct-{kind}"), None)

    def unknown(self) -> str:
        left = [process for process in self.remains.processes if processes.alive(process)]
        if not left:
            return ""
        return f"{self.remains.dir} was removed, and processes of the job run: {len(left)}"


def orphans(root: str, found: Mapping[str, Remains]) -> Tuple[List[OrphanRecord], List[Remains]]:
    """Of what lives (see living()): the orphans of this ROOT_DIR, and those of others."""
    own: List[OrphanRecord] = []
    others: List[Remains] = []
    for remains in found.values():
        if remains.orphaned:
            if remains.is_below(root):
                own.append(OrphanRecord(remains))
            else:
                others.append(remains)
    return own, others


def without_caretakers(root: str, found: Mapping[str, Remains]) -> List[Tuple[str, int]]:
    """The jobs of a ROOT_DIR whose supervisor and guard have ended, and how many processes live of each."""
    own = [one for one in found.values() if one.is_below(root)]
    left = [one for one in own if not JobProcesses(one.base, one.job, {"id": one.job}).caretakers()]
    return sorted((one.job, len(one.processes)) for one in left)


def _mounts(pid: int) -> str:
    """The space of mounts of a process, "" if it cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/{_MOUNTS}")
    except OSError:
        return ""
