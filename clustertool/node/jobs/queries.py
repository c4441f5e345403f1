"""Find the records that a request names, and list them.

A request has the id of one job (job, exact), or what a user calls jobs: a name, an id or its beginning, "" for all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, List, Mapping, Optional, cast

from clustertool.errors import NotFound
from clustertool.model.hints import PROGRAM
from clustertool.model.job.caretakers import CARETAKERS, CaretakerRecord
from clustertool.model.job.node_status import NodePart, NodeRecord
from clustertool.model.job.outcome import Key as RankKey
from clustertool.model.job.state_names import JobState
from clustertool.model.quantities import whole
from clustertool.node.jobs import descendants, remains
from clustertool.node.jobs.records import Key, Record, find, find_shared
from clustertool.node.jobs.remains import MOST, Remains
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as answers
    from clustertool.model.wire import agent_requests as requests
    from clustertool.model.wire.event_types import JobHeader

_FOREIGN = 100  # orphans below other ROOT_DIRs


def ranks_left(record: Record, part: NodePart, found: Mapping[str, Remains]) -> List[RankKey]:
    """List (role, rank) of the ranks of which a process lives on this node although supervisor and guard have ended.

    All ranks, if only recorded processes live that have no mark; none of a job that starts, runs or was recorded as clean.
    found: of find_living().
    """
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
    if not record.process("supervisor", own) or not any(map(processes.alive, _recorded_processes(record))):
        return []
    return sorted((str(one["role"]), int(one["rank"])) for one in record.header.get("processes", ()))


def _recorded_processes(record: Record) -> List[Process]:
    """Read the descendants that the job's supervisor has recorded."""
    with files.closing(files.open_job_dir(record.paths.dir)) as job:
        return descendants.recorded(job)


class OrphanRecord(Record):
    """The record of a job that has none on this node, made from the environment of its processes."""

    def __init__(self, remains: Remains) -> None:
        number = whole(remains.mark.partition("/")[2].partition("/")[0], 0, MOST) or 0
        header = cast("JobHeader", {"id": remains.job, "node": number, "created": 0.0})
        super().__init__(remains.base, remains.job, header)
        self.remains = remains

    def own(self) -> NodeRecord:
        """Return an empty record: there are no events."""
        return NodeRecord()

    def last(self) -> NodeRecord:
        """Return an empty record: there are no events."""
        return NodeRecord()

    def key(self) -> Key:
        """Return the mark of the processes; whether this node coordinates is not known, and counts as False."""
        return Key(self.remains.mark, False)

    def blank(self) -> bool:
        """Return False: processes of the job live, so it has started."""
        return False

    def supervised(self, own: Optional[NodeRecord] = None) -> bool:
        """Return False: the job has no record here, so no command reaches its supervisor, which ends the job by itself."""
        return False

    def process(self, kind: str, own: Optional[CaretakerRecord] = None) -> Optional[Process]:
        """Find a caretaker by its process name: a supervisor among the parents of the job's processes, others as its children.

        Returns None if there is none.
        """
        parents = {getattr(processes.stat(process.pid), "parent", 0) for process in self.remains.processes}
        heads = [pid for pid in parents if processes.named(pid)[0] == f"ct-{CARETAKERS[0]}"]
        near = heads if kind == CARETAKERS[0] else [child for pid in heads for child in processes.children(pid)]
        return next((processes.identify(pid) for pid in near if processes.named(pid)[0] == f"ct-{kind}"), None)

    def unknown(self) -> str:
        """Describe that the directory was removed and how many processes of the job live; "" if none does."""
        left = [process for process in self.remains.processes if processes.alive(process)]
        if not left:
            return ""
        return f"{self.remains.dir} was removed, and processes of the job run: {len(left)}"


def records(node: NodeContext, request: requests.JobRequest) -> List[Record]:
    """Find the records that the request names, newest first: those of this node, or of its base on a shared directory."""
    if node.base is not None:
        return find_shared(node.root, node.base, request["job"], request.get("exact", False))
    return find(node.root, node.entry, os.uname().nodename, request["job"], request.get("exact", False))


def records_and_orphans(node: NodeContext, request: requests.JobRequest) -> List[Record]:
    """Find the records that the request names, and an OrphanRecord for each job that has only processes here.

    For the folder of another node (base) there are no orphans.
    """
    found = records(node, request)
    return found if node.base is not None else [*found, *_find_orphans(node, request, remains.find_living())]


def _find_orphans(
    node: NodeContext, request: requests.JobRequest, living: Mapping[str, remains.Remains]
) -> List[Record]:
    """Build an OrphanRecord for each job that the request names, has living processes below ROOT_DIR, and no record."""
    job, exact = request["job"], request.get("exact", False)
    own = map(OrphanRecord, remains.orphans(node.root, living.values())[0])
    return [record for record in own if (record.job == job if exact and job else record.called(job))]


def record_of(node: NodeContext, job: str) -> Record:
    """Find the record of one job by its id, or its OrphanRecord.

    Raises NotFound if there is none, and PreflightError if the record is unusable.
    """
    wanted: requests.JobRequest = {"job": job, "exact": True}
    found = records(node, wanted) or records_and_orphans(node, wanted)
    if not found:
        raise NotFound(f"no job {job} here", f"{PROGRAM} jobs lists the jobs")
    if found[0].trouble:
        raise found[0].trouble
    return found[0]


def list_jobs(node: NodeContext, request: requests.JobRequest) -> answers.JobsAnswer:
    """Summarize each job that the request names, and list up to 100 orphans below other ROOT_DIRs: (directory, processes).

    A record that cannot be read is in state "unknown", with the reason.
    """
    living = {} if node.base is not None else remains.find_living()
    others = remains.orphans(node.root, living.values())[1]
    found: List[answers.JobSummary] = []
    for record in [*records(node, request), *_find_orphans(node, request, living)]:
        part = known_part(record)
        found.append({**record.summary(part), "left": ranks_left(record, part, living)})
    return {"jobs": found, "orphans": [(one.dir, len(one.processes)) for one in others[:_FOREIGN]]}


def known_part(record: Record) -> NodePart:
    """Return the node's part in a job; after any error one in state UNKNOWN, so that a job's records do not hide other jobs."""
    try:
        return record.part()
    except Exception as error:  # noqa: BLE001 - see above
        return NodePart(record.node, JobState.UNKNOWN, reason=bug(error))


def bug(error: Exception) -> str:
    """Describe an unexpected error and the file and line that raised it, in one line."""
    place = error.__traceback__
    assert place is not None, "it was raised"
    while place.tb_next is not None:
        place = place.tb_next
    where = f"{os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno}"
    return f"a bug of clustertool on this node, {where}: {error!r}"
