"""Handlers of the requests about the jobs of a node: their records, what is left of their processes, their logs.

A request names one job (job, exact) or the beginning of its id, "" for all.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

from clustertool.errors import ClustertoolError, NotFound
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state import ranks_of
from clustertool.model.job.state_names import StopState
from clustertool.node.jobs import job_report, ledger
from clustertool.node.jobs.clean import remove, unlink
from clustertool.node.jobs.follow import last_lines
from clustertool.node.jobs.rank_progress import progress
from clustertool.node.jobs.records import Record, find
from clustertool.node.jobs.stop_request import lives, send_to_supervisor, stop
from clustertool.node.storage import files
from clustertool.node.system import mounts, processes
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.work_counter import step

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as a
    from clustertool.model.wire import agent_requests as r
    from clustertool.model.wire.event_types import RankOutput

_REPORT = "report it with the line above"
_RUNS = -1  # the size of a job that is not removed because it runs


def records(node: NodeContext, request: r.JobRequest) -> List[Record]:
    """The records that the request names."""
    found = find(node.root, node.entry, os.uname().nodename, request["job"])
    return [record for record in found if not request.get("exact") or record.job == request["job"]]


def record_of(node: NodeContext, job: str) -> Record:
    """The record of one job. Raises NotFound, PreflightError."""
    found = records(node, {"job": job, "exact": True})
    if not found:
        raise NotFound(f"no job {job} here", "inv jobs lists the jobs")
    if found[0].trouble:
        raise found[0].trouble
    return found[0]


def stop_jobs(node: NodeContext, request: r.StopRequest) -> a.StopAnswer:
    """Each job's answer. A job with unusable records does not keep the others running."""
    found: Dict[str, a.JobStop] = {}
    for record in records(node, request):
        try:
            found[record.job] = stop(record, request["by"], request["code"], request["grace"], request["force"])
        except Exception as error:  # noqa: BLE001 - one job's records must not hide another's
            found[record.job] = {"state": StopState.UNKNOWN, "survivors": [], "why": _bug(error)}
    return {"jobs": found}


def attached(node: NodeContext, request: r.JobRequest) -> a.Answer:
    """A laptop follows the job: for --lease. The supervisor may have ended."""
    send_to_supervisor(record_of(node, request["job"]), "attached", {})
    return {}


def list_jobs(node: NodeContext, request: r.JobRequest) -> a.JobsAnswer:
    """One line about each. A record that cannot be read is in state "unknown", with the reason."""
    found: List[a.JobSummary] = []
    for record in records(node, request):
        try:
            found.append(record.summary())
        except Exception as error:  # noqa: BLE001 - one job's records must not hide another's
            found.append(record.unreadable(_bug(error)))
    return {"jobs": found}


def status(node: NodeContext, request: r.JobRequest) -> a.StatusAnswer:
    """All events of a job on this node, and CPU and memory of its processes. A job that was only placed has one event."""
    return _status(record_of(node, request["job"]))


def _status(record: Record) -> a.StatusAnswer:
    events = record.events() or [record.first_event()]
    ranks = ranks_of(events)
    started = [processes.Process(rank.pid, rank.life.start) for rank in ranks if rank.pid]
    supervisor = record.process("supervisor")
    beat = None
    with contextlib.suppress(OSError):
        beat = max(0.0, round(time.time() - os.stat(record.paths.control).st_mtime, 1))
    return {
        "node": record.node,
        "dir": record.paths.dir,
        "heartbeat": beat,
        "events": events,
        "output": _output(record, ranks),
        "supervised": supervisor is not None and processes.alive(supervisor),
        "unknown": record.unknown(),
        "usage": {str(process.pid): _usage(process.pid) for process in started if processes.alive(process)},
    }


def report(node: NodeContext, request: r.ReportRequest) -> a.ReportAnswer:
    """What status answers, and a summary of what the job used, did and printed here."""
    record = record_of(node, request["job"])
    found = _status(record)
    return {**found, "now": time.time(), **job_report.report(record, ranks_of(found["events"]), request["points"])}


def tail(node: NodeContext, request: r.TailRequest) -> a.TailAnswer:
    """The last lines of one log, for a verdict."""
    job = files.open_job_dir(record_of(node, request["job"]).paths.dir)
    try:
        text = last_lines(job, request["log"], request["lines"])
    except OSError:
        text = b""
    finally:
        os.close(job)
    return {"text": text.decode("utf-8", "backslashreplace")}


def list_files(node: NodeContext, request: r.JobRequest) -> a.FilesAnswer:
    """Everything in a job's log/, restarts' folders included: names relative to log/, and sizes."""
    found: Dict[str, int] = {}
    logs = record_of(node, request["job"]).paths.of("log")
    for folder, _, names in os.walk(logs):
        step()
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                found[os.path.relpath(path, logs)] = os.lstat(path).st_size
    return {"files": found}


def clean(node: NodeContext, request: r.CleanRequest) -> a.CleanAnswer:
    """Remove finished jobs: one, or all older than some seconds. Those of which something lives stay and are named."""
    removed: List[str] = []
    running: List[str] = []
    freed = 0
    kept: Dict[str, Tuple[str, str]] = {}
    for record in records(node, request):
        step()
        try:
            size = _clean_one(record, request)
        except ClustertoolError as error:
            kept[record.job] = (error.what, error.fix)
            continue
        except Exception as error:  # noqa: BLE001 - one job's records must not keep the others
            kept[record.job] = (_bug(error), _REPORT)
            continue
        if size == _RUNS:
            running.append(record.job)
        elif size is not None:
            removed.append(record.job)
            freed += size
    return {"removed": removed, "running": running, "freed": freed, "kept": kept}


def _clean_one(record: Record, request: r.CleanRequest) -> Optional[int]:
    """The bytes freed; None for a job that is too young, _RUNS for one that lives. Raises ClustertoolError."""
    if request.get("exact") and record.other_machine() and not os.path.lexists(record.paths.dir):
        if not request.get("dry"):  # the user has removed its directory and names it: only the ledger's copy is left
            ledger.remove(record.paths)
        return 0
    if lives(record):
        return _RUNS
    if request["now"] - record.header["created"] < request.get("older_than", 0.0):
        return None  # by the laptop's clock, as `created` is
    mounts.require_none(record.paths.dir)  # before anything is changed
    if request.get("dry"):
        return 0
    unlink(record.paths.dir)
    return remove(record.paths.dir)


def _bug(error: Exception) -> str:
    """The error and its place, in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"a bug of clustertool on this node, {os.path.basename(where.filename)}:{where.lineno}: {error!r}"


def _output(record: Record, ranks: Sequence[ProcessStatus]) -> List[RankOutput]:
    """Of each rank that was started, of its last attempt."""
    try:
        job = files.open_job_dir(record.paths.dir)
    except NotFound:  # a program has removed it
        return []
    try:
        logs = {rank.key: record.paths.log(*rank.key, rank.attempt) for rank in ranks if rank.pid}
        found = [(key, progress(job, log)) for key, log in logs.items()]
    finally:
        os.close(job)
    return [(*key, now.epoch, now.step, now.output) for key, now in found if now is not None]


def _usage(pid: int) -> Tuple[float, int]:
    """(CPU seconds, resident bytes) of a process."""
    found = processes.stat(pid)
    if found is None:
        return 0.0, 0
    return found.ticks / os.sysconf("SC_CLK_TCK"), found.rss * os.sysconf("SC_PAGE_SIZE")
