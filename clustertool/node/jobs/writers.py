"""This module finds the jobs that may have written a folder: several can work in the same one (--job-workspace, clusterrun)."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Dict, Iterator, Optional

from clustertool.model.job.file_origin import WriteSpan
from clustertool.model.paths import OURS, folder_of
from clustertool.node.jobs import ledger
from clustertool.node.jobs.queries import record_of
from clustertool.node.jobs.records import Record, bases
from clustertool.node.storage.files import MARKER
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import SpansAnswer
    from clustertool.model.wire.agent_requests import SpansRequest


def spans(node: NodeContext, request: SpansRequest) -> SpansAnswer:
    """List the time span of each job that may have written the folder or file of the request, its own job included.

    These are jobs for which the same path leads to it; a span is (job, placing, last event or None if it may run), in ns.
    Returns no spans for a path inside of the job's own directory, or of its folder on a volume of pods. Raises NotFound if
    there is no such job, and PreflightError if its records cannot be used.
    """
    job, folder = request["job"], os.path.realpath(request["dir"])
    top = os.path.realpath(record_of(node, job).paths.dir)
    if os.path.commonpath([top, folder]) == top or any(_is_node_folder(name, job) for name in folder.split("/")):
        return {"spans": []}
    device = os.stat(folder).st_dev if os.path.exists(folder) else 0
    found: Dict[str, WriteSpan] = {}
    for record in _read_all(node.root):
        step()
        if record.job == job or folder in _resolve_folders(record, request["path"]):
            span = _read_span(record, device)
            found[record.job] = _merge_spans(found[record.job], span) if record.job in found else span
    return {"spans": list(found.values())}


def _is_node_folder(name: str, job: str) -> bool:
    """Check whether a name is that of a folder of this job, or of one of its nodes, on a volume of pods (output_volume.py)."""
    own = folder_of(job)
    return name == own or (name.startswith(f"{own}-node") and name[len(f"{own}-node") :].isdigit())


def _read_all(root: str) -> Iterator[Record]:
    """Yield the records below ROOT_DIR, also those of other nodes, which may work in the same folder."""
    for base, _ in bases(root):
        for name, marked in ledger.find_jobs(base, "").items():
            if marked:
                yield Record.read(base, name)


def _resolve_folders(record: Record, path: str) -> Iterator[str]:
    """Yield the real paths of `path` below a job's directory and below its working directory."""
    for top in (record.paths.dir, record.header.get("work_dir")):
        if isinstance(top, str):
            yield os.path.realpath(os.path.join(top, path))


def _read_span(record: Record, device: int) -> WriteSpan:
    """Read the time from the placing of a job to its last event; without an end if it may run. device: of the folder.

    Where the job's records are on the same file system, their times have the same clock as the files of the folder, also if
    that is the clock of a file server.
    """
    times = [_change_time(record.paths.of(OURS, name), device) for name in (MARKER, "spec.json")]
    made = [time for time in times if time]
    own = record.last()
    if own.ended is None and not own.clean and (record.supervised(own) or record.unknown()):
        end = None
    else:
        end = _change_time(record.paths.events, device) or int(own.ended_at * 1e9) or None
    return WriteSpan(record.job, min(made, default=int((record.header["created"] + record.skew) * 1e9)), end)


def _change_time(path: str, device: int) -> Optional[int]:
    """Read the time of the last change of a file, in ns; None if it is missing or on another file system than `device`."""
    with contextlib.suppress(OSError):
        info = os.lstat(path)
        return info.st_ctime_ns if info.st_dev == device else None
    return None


def _merge_spans(one: WriteSpan, other: WriteSpan) -> WriteSpan:
    """Merge two spans of a job that has records of several nodes here: the earlier start, and the later end, if both ended."""
    end = None if None in (one.end, other.end) else max(one.end or 0, other.end or 0)
    return WriteSpan(one.job, min(one.start, other.start), end)
