"""This module builds a node's part of the report about a job, as one answer of limited size.

It reads usage.jsonl, spec.json (secrets are masked in it) and some parts of the logs.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Dict, Iterable, List, Mapping, Sequence, Tuple

from clustertool.model.job import progress as steps
from clustertool.model.job import usage
from clustertool.model.job.outcome import Key
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state_names import RankState
from clustertool.model.paths import OURS
from clustertool.node.jobs.follow import last_lines
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system.work_counter import step

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as a

_PLACES = 60  # places of a log where its progress is read
_PIECE = 8192  # bytes at each of them
_NEAR = 1.0  # seconds between two of them; a shorter distance is merged into the later one
_LAST_LINES = 3  # lines of a rank that did not fail
_SEARCHED = 400  # lines of a failed rank, which are searched for a traceback
_FAILED = 4  # failed ranks of a node with long excerpts; more of them usually failed alike
_LONGEST = 2000  # characters of a command


def report(record: Record, found: Sequence[ProcessStatus], points: int) -> a.JobUsage:
    """`found`: the ranks of this node. `points`: how many values a curve may have."""
    job = files.open_job_dir(record.paths.dir)
    try:
        lines = _lines(job)
        attempts = {rank.key: rank.attempt for rank in found}
        return {
            "machine": _machine(lines, points),
            "cards": _cards(lines, points),
            "ranks": _ranks(record, job, lines, attempts, points),
            "tails": _tails(record, job, found),
            "plan": _plan(job),
        }
    finally:
        os.close(job)


def _lines(job: int) -> List[usage.UsageLine]:
    try:
        return list(usage.read_lines(files.read(job, f"{OURS}/usage.jsonl")))
    except OSError:
        return []


def _machine(lines: Iterable[usage.UsageLine], points: int) -> a.MachineCurve:
    """rows: (time, busy CPU seconds, bytes used)."""
    rows: List[usage.Row] = []
    cores = total = 0
    for line in lines:
        busy, cores, used, total = line["n"]
        rows.append((line["t"], busy, used))
    return {"cores": cores, "total": total, "rows": usage.fewer(rows, points, usage.last, max)}


def _cards(lines: Iterable[usage.UsageLine], points: int) -> List[a.CardCurve]:
    """rows: (time, utilisation in percent, bytes used)."""
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


def _ranks(
    record: Record, job: int, lines: Iterable[usage.UsageLine], attempts: Mapping[Key, int], points: int
) -> List[a.RankCurve]:
    """rows: (time, CPU seconds, bytes resident, processes); progress, of the last attempt: (time, epoch, step)."""
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
            **_log(job, record.paths.log(*key, attempts[key]), sizes[key]),
        }
        for key in attempts
    ]


def _log(job: int, name: str, sizes: Sequence[Tuple[float, int]]) -> a.LogCurve:
    """The progress that the program reported, at the times when its log had that size."""
    try:
        fd = files.open_read(job, name)
    except OSError:
        return {"log_size": 0, "progress": []}
    try:
        about = os.fstat(fd)
        grown = [pair for pair, before in zip(sizes, [(0.0, 0), *sizes]) if pair[1] > before[1]]
        places = [(t, int(size)) for t, size in usage.fewer(grown, _PLACES, usage.last)]
        if places and about.st_mtime - places[-1][0] < _NEAR:  # age of the last sample at most
            places.pop()
        places.append((about.st_mtime, about.st_size))
        step()
        found = []
        for t, size in places:
            start = max(0, size - _PIECE)
            progress = steps.find(os.pread(fd, size - start, start).decode("utf-8", "replace"))
            if progress is not None:
                found.append((round(t, 2), progress.epoch, progress.step))
        return {"log_size": about.st_size, "progress": found}
    finally:
        os.close(fd)


def _tails(record: Record, job: int, ranks: Sequence[ProcessStatus]) -> List[Tuple[str, int, str]]:
    """[role, rank, text]: long excerpts of the first failed ranks, the last lines of all others."""
    failed = sorted((rank for rank in ranks if rank.state is RankState.FAILED), key=lambda rank: rank.since)[:_FAILED]
    found: List[Tuple[str, int, str]] = []
    for rank in ranks:
        with contextlib.suppress(OSError):
            lines, limit = (_SEARCHED, 64 << 10) if rank in failed else (_LAST_LINES, 1 << 10)
            text = last_lines(job, record.paths.log(*rank.key, rank.attempt), lines, limit)
            found.append((*rank.key, text.decode("utf-8", "backslashreplace")))
    return found


def _plan(job: int) -> a.JobPlan:
    """Commands and policy of the spec, without environments."""
    try:
        spec = json.loads(files.read(job, f"{OURS}/spec.json"))
    except (OSError, ValueError):
        return {}
    processes: List[a.RankPlan] = [
        {
            "role": process["role"],
            "rank": process["rank"],
            "devices": process["devices"],
            "shards": len(process["shards"]),
            "command": " ".join(process["argv"])[:_LONGEST],
        }
        for process in spec["processes"]
    ]
    return {"policy": spec["policy"], "work_dir": spec["work_dir"], "processes": processes}
