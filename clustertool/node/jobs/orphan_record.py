"""This module has what stands for the record of a job whose record was removed, and the ranks that a record has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Mapping, Optional, cast

from clustertool.model.job.caretakers import CARETAKERS, CaretakerRecord
from clustertool.model.job.node_status import NodePart, NodeRecord
from clustertool.model.job.outcome import Key as RankKey
from clustertool.model.job.state_names import JobState
from clustertool.model.quantities import whole
from clustertool.node.jobs import descendants
from clustertool.node.jobs.records import Key, Record
from clustertool.node.jobs.remains import MOST, Remains
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import JobHeader


def of_record(record: Record, part: NodePart, found: Mapping[str, Remains]) -> List[RankKey]:
    """Return the ranks of which something lives on this node after supervisor and guard have ended. found: see living()."""
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
        number = whole(remains.mark.partition("/")[2].partition("/")[0], 0, MOST) or 0
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
        """Return False: a supervisor that moves ends the job by itself, and no command reaches it."""
        return False

    def process(self, kind: str, own: Optional[CaretakerRecord] = None) -> Optional[Process]:
        """Find a caretaker: a supervisor is the parent of a process of the job, guard and gauge are its children."""
        parents = {getattr(processes.stat(process.pid), "parent", 0) for process in self.remains.processes}
        heads = [pid for pid in parents if processes.named(pid)[0] == f"ct-{CARETAKERS[0]}"]
        near = heads if kind == CARETAKERS[0] else [child for pid in heads for child in processes.children(pid)]
        return next((processes.identify(pid) for pid in near if processes.named(pid)[0] == f"ct-{kind}"), None)

    def unknown(self) -> str:
        left = [process for process in self.remains.processes if processes.alive(process)]
        if not left:
            return ""
        return f"{self.remains.dir} was removed, and processes of the job run: {len(left)}"
