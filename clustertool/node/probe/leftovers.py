"""Leftovers are processes of a job of this ROOT_DIR whose supervisor and guard have ended."""

from __future__ import annotations

import os
from typing import Dict, List, Tuple

from clustertool.node.jobs.records import Record
from clustertool.node.system import processes

_MARK, _OUTPUT = b"CLUSTERTOOL_MARK", b"CLUSTERTOOL_OUTPUT"


def leftovers(root: str) -> List[Tuple[str, int]]:
    """(job, how many processes), by job."""
    found: Dict[Tuple[str, str], int] = {}
    for pid in processes.pids():
        place = _place(pid)
        if place and (place[0] == root or os.path.dirname(place[0]) == root):
            found[place] = found.get(place, 0) + 1
    return sorted((job, count) for (base, job), count in found.items() if not _is_supervised(Record(base, job, {})))


def _place(pid: int) -> "Tuple[str, str] | None":
    """(base directory, job) of a job's living process, from its environment."""
    variables = processes.environment(pid)
    if _MARK not in variables or _OUTPUT not in variables:
        return None
    job = os.fsdecode(variables[_MARK].partition(b"/")[0])
    base, found, _ = os.fsdecode(variables[_OUTPUT]).rpartition(f"/JOB{job}")
    process = processes.identify(pid)
    return (base, job) if found and process and processes.alive(process) else None


def _is_supervised(record: Record) -> bool:
    known = [record.process(kind) for kind in ("supervisor", "guard")]
    return any(process and processes.alive(process) for process in known)
