"""These handlers answer requests about one job: events, what is left of its processes, its logs, and the report about it.

The report is one answer of limited size, made of usage.jsonl, spec.json (secrets are masked in it) and parts of the logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from itertools import groupby
from typing import TYPE_CHECKING, Dict, List, Mapping, Sequence, Tuple, cast

from clustertool.errors import NotFound
from clustertool.model.job import usage
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import NOTHING, Metrics, find_metrics
from clustertool.model.job.state import ranks_of
from clustertool.model.job.state_names import RankState
from clustertool.model.paths import CUT, OURS, STACKS, JobPaths
from clustertool.model.shape import to_plain
from clustertool.node.jobs import rank_log
from clustertool.node.jobs.queries import record_of
from clustertool.node.jobs.rank_log import RankLog, last_lines, progress
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.field_types import RankOutput
    from clustertool.model.wire import agent_answers as answers
    from clustertool.model.wire import agent_requests as requests

_PLACES = 60  # places of a log where its progress is read
_PIECE = 8192  # bytes at each of them, and at the end
_NEAR = 1.0  # seconds between two of them; a shorter distance is merged into the later one
_LAST_LINES = 3  # lines of a rank that did not fail
_SEARCHED = 400  # lines of a failed rank, which are searched for a traceback
_FAILED = 4  # failed ranks of a node with long excerpts; more of them usually failed alike
_Lines = List[usage.UsageLine]
_LONGEST = 2000  # characters of a command
_NEWEST = 1 << 17  # bytes of metrics.jsonl in which the newest numbers of ranks are
_FEW = 5  # newest different losses of a rank
_ATTEMPTS = 100  # of a rank, the newest ones
_LARGEST_STACKS = 16 << 20  # bytes at the end of stacks.jsonl
_ROWS = 150_000  # of all ranks in an answer


def status(node: NodeContext, request: requests.JobRequest) -> answers.StatusAnswer:
    """Collect all events of a job on this node, its ranks' progress and CPU and memory, and the supervisor's heartbeat.

    A job that was only placed has one event. CPU and memory: of the main processes of ranks that live on this node.
    """
    return _collect_status(record_of(node, request["job"]))


def _collect_status(record: Record, points: int = 0) -> answers.StatusAnswer:
    """Collect the answer of status(): a record's events, heartbeat and output, and the usage of its ranks' main processes.

    {node, dir, heartbeat, events, output, metrics, supervised, unknown, usage: {pid: (CPU seconds, bytes)}}. points: see
    _read_output().
    """
    events = record.events() or [record.first_event()]
    ranks = ranks_of(events)
    started = [processes.Process(rank.pid, rank.start) for rank in ranks if rank.pid and record.here]
    output, rows = _read_output(record, ranks, points)
    living = [(process.pid, processes.stat(process.pid)) for process in started if processes.alive(process)]
    return {
        "node": record.node,
        "dir": record.paths.dir,
        "heartbeat": record.heartbeat(),
        "events": events,
        "output": output,
        "metrics": rows,
        "supervised": record.supervised(),
        "unknown": record.unknown(),
        "usage": {str(pid): (found.cpu, found.memory) for pid, found in living if found},
    }


def report(node: NodeContext, request: requests.ReportRequest) -> answers.ReportAnswer:
    """Collect what status() answers, and curves of usage, ends of logs, and the commands and policy of the job."""
    record = record_of(node, request["job"])
    found = _collect_status(record, request["points"])
    return {**found, "now": time.time(), **_summarize_usage(record, ranks_of(found["events"]), request["points"])}


def tail(node: NodeContext, request: requests.TailRequest) -> answers.TailAnswer:
    """Read the last lines of one log, as the request demands, at most 64 KiB: {text}, "" if the log cannot be read.

    Raises NotFound without the job or its directory, PreflightError if its record is unusable.
    """
    with files.closing(files.open_job_dir(record_of(node, request["job"]).paths.dir)) as job:
        with contextlib.suppress(OSError):
            return {"text": last_lines(job, request["log"], request["lines"])}
    return {"text": ""}


def list_files(node: NodeContext, request: requests.JobRequest) -> answers.FilesAnswer:
    """List the files below a job's log/: {files: {name: bytes}}; links and saved parts of logs are left out.

    Includes folders of restarts. The names are relative to log/.
    """
    found: Dict[str, int] = {}
    paths = record_of(node, request["job"]).paths
    for logs in (paths.of(paths.written("log")), paths.of("log")):  # a program may have taken or removed a name
        for folder, _, names in os.walk(logs):
            step()
            for name in names:
                path = os.path.join(folder, name)
                if not (os.path.islink(path) or name.endswith(CUT)):
                    found[os.path.relpath(path, logs)] = os.lstat(path).st_size
    return {"files": found}


def _summarize_usage(record: Record, found: Sequence[ProcessStatus], points: int) -> answers.JobUsage:
    """Collect {machine, cards, ranks: curves, tails: ends of logs, plan}. points: how many values a curve may have."""
    with files.closing(files.open_job_dir(record.paths.dir)) as job:
        lines: _Lines = []
        with contextlib.suppress(OSError):
            lines = list(usage.read_lines(files.read(job, f"{OURS}/usage.jsonl")))
        attempts = {rank.key: rank.attempt for rank in found}
        return {
            "machine": _machine_curve(lines, points),
            "cards": _card_curves(lines, points),
            "ranks": _rank_curves(record, job, lines, attempts, points),
            "tails": _read_log_ends(record, job, found),
            "plan": _read_plan(job),
            "stacks": _read_stacks(job),
        }


def _read_stacks(job: int) -> answers.RecordedStacks:
    """Read the newest stacks that were taken since no rank made progress: (time, samples); (0.0, []) without any."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        with open(files.open_read(job, STACKS), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LARGEST_STACKS))
            found = json.loads(file.read().splitlines()[-1])
            return found["t"], found["rounds"][-1]
    return 0.0, []


def _machine_curve(lines: _Lines, points: int) -> answers.MachineCurve:
    """Build the curve of the machine: {cores, total: bytes of memory, rows}.

    Rows: (time, busy CPU seconds since the boot, bytes used). The first one is kept, and the others are reduced to at most
    `points`: the last sum of seconds, the most memory.
    """
    rows: List[usage.Row] = []
    cores = total = 0
    for line in lines:
        busy, cores, used, total = line["n"]
        rows.append((line["t"], busy, used))
    return {"cores": cores, "total": total, "rows": usage.fewer(rows, points, usage.last, max)}


def _card_curves(lines: _Lines, points: int) -> List[answers.CardCurve]:
    """Build a curve for each card, sorted by index: {index, total: bytes of memory, rows}.

    Rows: (time, utilisation in percent, bytes used). The first one is kept, and the others are reduced to at most `points`:
    the mean of the utilisation, the most memory.
    """
    rows: Dict[int, List[usage.Row]] = {}
    totals: Dict[int, int] = {}
    for line in lines:
        for index, utilisation, used, total in line.get("d", ()):
            rows.setdefault(index, []).append((line["t"], utilisation, used))
            totals[index] = total
    return [
        {"index": index, "total": totals[index], "rows": usage.fewer(rows[index], points, usage.mean, max)}
        for index in sorted(rows)
    ]


def _rank_curves(
    record: Record, job: int, lines: _Lines, attempts: Mapping[Key, int], points: int
) -> List[answers.RankCurve]:
    """Build a curve for each rank: {role, rank, rows, log_size, progress}.

    The first row and up to `points` others: (time, CPU seconds, bytes resident, processes). Size and progress, (time, epoch,
    step), are of the last attempt's log.
    """
    rows: Dict[Key, List[usage.Row]] = {key: [] for key in attempts}
    sizes: Dict[Key, List[Tuple[float, int]]] = {key: [] for key in attempts}
    for line in lines:
        for role, rank, attempt, cpu, memory, count, size in line["r"]:
            key = (str(role), int(rank))
            if key in rows:
                rows[key].append((line["t"], cpu, memory, count))
                if attempt == attempts[key]:
                    sizes[key].append((line["t"], size))
    return [
        {
            "role": key[0],
            "rank": key[1],
            "rows": usage.fewer(rows[key], points, usage.last, max, max),
            **_log_curve(job, record.paths.log(*key, attempts[key]), sizes[key]),
        }
        for key in attempts
    ]


def _log_curve(job: int, name: str, sizes: Sequence[Tuple[float, int]]) -> answers.LogCurve:
    """Read the size of a log in bytes, and its progress at up to 60 places and at its end: {log_size, progress}.

    Progress is (time, epoch, step) of each place that has one. 0 and [] if the log cannot be opened. sizes: (time, size) of the
    log, by which a place has its time.
    """
    try:
        log = RankLog(job, name)
    except OSError:
        return {"log_size": 0, "progress": []}
    with contextlib.closing(log):
        size, mtime = log.size(), log.mtime()
        grown = [pair for pair, before in zip(sizes, [(0.0, 0), *sizes]) if pair[1] > before[1]]
        places = [(t, int(size)) for t, size in usage.fewer(grown, _PLACES, usage.last)]
        if places and mtime - places[-1][0] < _NEAR:  # age of the last sample at most
            places.pop()
        places.append((mtime, size))
        step()
        found = []
        for t, end in places:
            start = max(0, end - _PIECE)
            last = find_metrics(log.pread(end - start, start).decode("utf-8", "replace"))
            if last.epoch is not None or last.step is not None:
                found.append((round(t, 2), last.epoch, last.step))
        return {"log_size": size, "progress": found}


def _read_log_ends(record: Record, job: int, ranks: Sequence[ProcessStatus]) -> List[Tuple[str, int, str]]:
    """Read the ends of logs, [role, rank, text]: 400 lines of the first four failed ranks, three lines of the others.

    At most 64 KiB, or 1 KiB. Logs that cannot be read are left out.
    """
    failed = sorted((rank for rank in ranks if rank.state is RankState.FAILED), key=lambda rank: rank.since)[:_FAILED]
    found: List[Tuple[str, int, str]] = []
    for rank in ranks:
        with contextlib.suppress(OSError):
            lines, limit = (_SEARCHED, 64 << 10) if rank in failed else (_LAST_LINES, 1 << 10)
            found.append((*rank.key, last_lines(job, record.paths.log(*rank.key, rank.attempt), lines, limit)))
    return found


def _read_plan(job: int) -> answers.JobPlan:
    """Read {policy, work_dir, processes} from the spec; {} if it cannot be read.

    A process is {role, rank, devices, shards: how many, command: 2000 characters at most}, without its environment.
    """
    try:
        spec = json.loads(files.read(job, f"{OURS}/spec.json"))
    except (OSError, ValueError):
        return {}
    ranks: List[answers.RankPlan] = [
        {
            "role": process["role"],
            "rank": process["rank"],
            "devices": process["devices"],
            "shards": len(process["shards"]),
            "command": " ".join(process["argv"])[:_LONGEST],
        }
        for process in spec["processes"]
    ]
    return {"policy": spec["policy"], "work_dir": spec["work_dir"], "processes": ranks}


def _read_output(
    record: Record, ranks: Sequence[ProcessStatus], points: int
) -> Tuple[List[RankOutput], List[answers.RankMetrics]]:
    """Read the progress of each rank that was started, by its last attempt's log, and the numbers of ranks: (output, metrics).

    The time of an output is that of the last write. Ranks whose log cannot be read are left out. points: how many numbers of an
    attempt there may be, the newest included; 0: of the last attempts, up to five with different losses.
    """
    output: List[RankOutput] = []
    known: Dict[str, List[Tuple[float, Metrics]]] = {}
    with contextlib.suppress(NotFound):  # a program has removed the directory
        with files.closing(files.open_job_dir(record.paths.dir)) as job:
            for t, log, numbers in rank_log.metrics(job, -1 if points else _NEWEST):
                known.setdefault(log, []).append((t, numbers))
            for rank in filter(lambda rank: rank.pid, ranks):
                log = record.paths.log(*rank.key, rank.attempt)
                now = progress(job, log, _PIECE)
                if now is not None:
                    output.append((*rank.key, *now[:3]))
                    its = known.setdefault(log, [])
                    before = its[-1][1] if its else NOTHING
                    newest = now.numbers.after(before)
                    if not its or newest != before:  # the last record does not have it
                        its.append((now.output, newest))
    first = [(rank, max(0, rank.attempt - _ATTEMPTS) if points else rank.attempt) for rank in ranks]
    attempts = [(*rank.key, number) for rank, low in first for number in range(low, rank.attempt + 1)]
    found = {attempt: known[JobPaths.log(*attempt)] for attempt in attempts if JobPaths.log(*attempt) in known}
    most = max(1, min(points, _ROWS // max(1, len(found))))
    return output, [
        (*attempt, t, cast("Metrics", to_plain([*numbers])))
        for attempt, rows in found.items()
        for t, numbers in (_newest_losses(rows) if not points else rows[:: len(rows) // -most][::-1])
    ]


def _newest_losses(rows: Sequence[Tuple[float, Metrics]]) -> List[Tuple[float, Metrics]]:
    """Return the newest of those records with the same loss, of the newest five losses."""
    return [[*same][-1] for _, same in groupby(rows, lambda row: row[1].loss)][-_FEW:]
