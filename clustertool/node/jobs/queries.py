"""Find the records that a request names, and list them.

A request has the id of one job (job, exact), or what a user calls jobs: a name, an id or its beginning, "" for all.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Sequence, Tuple, cast

from clustertool.errors import NotFound, PreflightError
from clustertool.model.hints import PROGRAM
from clustertool.model.job.caretakers import CARETAKERS, CaretakerRecord
from clustertool.model.job.node_status import EarlierRow, NodePart, NodeRecord
from clustertool.model.job.outcome import Key as RankKey
from clustertool.model.job.state_names import JobState
from clustertool.model.quantities import whole
from clustertool.node.jobs import descendants, remains
from clustertool.node.jobs.records import Key, Record, find, find_shared
from clustertool.node.jobs.remains import MOST, Remains
from clustertool.node.storage import files, tree_copy
from clustertool.node.system import processes
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as a
    from clustertool.model.wire import agent_requests as r
    from clustertool.model.wire.event_types import JobHeader

_EARLIER = 20  # jobs of one kind
_FOREIGN = 100  # orphans below other ROOT_DIRs
_FILES = 10  # names of one job


def ranks_left(record: Record, part: NodePart, found: Mapping[str, Remains]) -> List[RankKey]:
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


def records(node: NodeContext, request: r.JobRequest) -> List[Record]:
    """Find the records that the request names, newest first."""
    if node.base is not None:
        return find_shared(node.root, node.base, request["job"], request.get("exact", False))
    return find(node.root, node.entry, os.uname().nodename, request["job"], request.get("exact", False))


def records_and_orphans(node: NodeContext, request: r.JobRequest) -> List[Record]:
    """Return the same, and what stands for the record of a job that has none here, but processes: see orphan_record.py."""
    found = records(node, request)
    return found if node.base is not None else [*found, *_orphans(node, request, remains.living())]


def _orphans(node: NodeContext, request: r.JobRequest, living: Mapping[str, remains.Remains]) -> List[Record]:
    job, exact = request["job"], request.get("exact", False)
    own = map(OrphanRecord, remains.orphans(node.root, living.values())[0])
    return [record for record in own if (record.job == job if exact and job else record.called(job))]


def record_of(node: NodeContext, job: str) -> Record:
    """Find the record of one job. Raises NotFound, PreflightError."""
    wanted: r.JobRequest = {"job": job, "exact": True}
    found = records(node, wanted) or records_and_orphans(node, wanted)
    if not found:
        raise NotFound(f"no job {job} here", f"{PROGRAM} jobs lists the jobs")
    if found[0].trouble:
        raise found[0].trouble
    return found[0]


def list_earlier(
    node: NodeContext, wanted: r.EarlierWanted, problems: List[Tuple[str, str, str, str]]
) -> List[Dict[str, object]]:
    """List the jobs that a new one may belong to, the newest ones of each kind.

    Those are the ones that --job-id or --resume mean, or of the same name or workspace. `problems` gets what keeps the node
    from
    reading its jobs.
    """
    try:
        found = find(node.root, node.entry, os.uname().nodename)
    except PreflightError as error:
        problems.append(("root", "error", error.what, error.fix))
        return []
    chosen: Dict[str, Record] = {}
    for belongs in (_asked, _resumed, _same_work):
        fitting = [record for record in found if belongs(record, wanted)]
        chosen.update((record.job, record) for record in fitting[:_EARLIER])
    return [_earlier_row(record, wanted["keep"])._asdict() for record in chosen.values()]


def _asked(record: Record, wanted: r.EarlierWanted) -> bool:
    """Check whether a job has the id that is asked for, or that with a number after it, which is then not free."""
    asked = wanted["asked"]
    head, _, number = record.job.rpartition("-")
    return bool(asked) and (asked in (record.job, record.asked) or (head == asked and number.isdigit()))


def _resumed(record: Record, wanted: r.EarlierWanted) -> bool:
    return bool(wanted["resume"]) and record.called(wanted["resume"])


def _same_work(record: Record, wanted: r.EarlierWanted) -> bool:
    header = record.header
    if wanted["name"] and wanted["name"] in (record.name, record.asked):
        return True
    place = header.get("owner"), header.get("workspace", "")
    return bool(wanted["workspace"]) and place == (wanted["owner"], wanted["workspace"])


def _earlier_row(record: Record, keep: Sequence[str]) -> EarlierRow:
    part = _part(record)
    summary = record.summary(part)
    return EarlierRow(
        id=record.job,
        asked=record.asked,
        name=record.name,
        owner=summary["owner"],
        workspace=record.header.get("workspace", ""),
        command=summary["command"],
        created=summary["created"],
        node=summary["node"],
        state=part.state,
        code=summary["code"],
        reason="",
        start=part.start,
        final=part.final,
        output=tree_copy.has_files(record.output),
        kept=tuple(path for path in keep if os.path.exists(record.paths.of(path))),
        files=tuple(_own_files(record)),
    )


def _own_files(record: Record) -> List[str]:
    """List the files that the job's programs have written into its directory, outside of the folders there.

    The workspace was copied before the supervisor wrote its first event. A working directory that jobs share keeps its files.
    """
    began = record.header.get("t")
    found: List[str] = []
    if not isinstance(began, (int, float)) or record.header.get("work_dir", record.paths.dir) != record.paths.dir:
        return found
    with contextlib.suppress(OSError):
        with os.scandir(record.paths.dir) as entries:
            for entry in entries:
                regular = entry.is_file(follow_symlinks=False) and not entry.name.startswith(".")
                if regular and entry.stat(follow_symlinks=False).st_ctime > began:
                    found.append(entry.name)
    return sorted(found)[:_FILES]


def list_jobs(node: NodeContext, request: r.JobRequest) -> a.JobsAnswer:
    """Summarize each job in one line. A record that cannot be read is in state "unknown", with the reason."""
    living = {} if node.base is not None else remains.living()
    others = remains.orphans(node.root, living.values())[1]
    found: List[a.JobSummary] = []
    for record in [*records(node, request), *_orphans(node, request, living)]:
        part = _part(record)
        found.append({**record.summary(part), "left": ranks_left(record, part, living)})
    return {"jobs": found, "orphans": [(one.dir, len(one.processes)) for one in others[:_FOREIGN]]}


def _part(record: Record) -> NodePart:
    """Return the part of a record; unknown where its records make this fail: one job's records must not hide another's."""
    try:
        return record.part()
    except Exception as error:  # noqa: BLE001 - see above
        return NodePart(record.node, JobState.UNKNOWN, reason=bug(error))


def bug(error: Exception) -> str:
    """Describe an unexpected error and its place, in one line."""
    place = error.__traceback__
    assert place is not None, "it was raised"
    while place.tb_next is not None:
        place = place.tb_next
    where = f"{os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno}"
    return f"a bug of clustertool on this node, {where}: {error!r}"
