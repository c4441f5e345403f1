"""The probe of `check` reads the facts of each probe, and those that take longer."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Tuple

from clustertool.node.devices import locks
from clustertool.node.jobs.job_processes import JobProcesses
from clustertool.node.probe import job_environment
from clustertool.node.probe.name_service import resolved
from clustertool.node.probe.probe import probe, timed
from clustertool.node.system import logind, processes
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import ProbeRequest


def probe_for_check(node: NodeContext, request: ProbeRequest) -> ProbeAnswer:
    """All fields of model.facts.Facts that `check` reads. Needs the field `job`."""
    began = time.monotonic()
    answer = probe(node, request)
    problems = answer["problems"]
    if request["job"]:
        versions, wrong = job_environment.read_versions(request["job"])
        answer.update(versions)
        problems += wrong
    ends, fix = logind.warning()
    if ends:
        problems.append(("limits", "warn", ends, fix))
    wrong_lock = locks.trouble()
    if wrong_lock:
        fix = "jobs go on without it, by their own lock files; ask that user, or root, to end it or remove the file"
        problems.append(("devices", "warn", f"the lock for taking devices: {wrong_lock}", fix))
    answer["leftovers"] = _leftovers(answer["root"])
    answer["own"] = answer["own"] or resolved(socket.gethostname())
    answer["examined"] = True
    return timed(answer, began)


# -- processes of jobs whose supervisor and guard have ended ---


def _leftovers(root: str) -> List[Tuple[str, int]]:
    """(job, how many processes), by job."""
    found: Dict[Tuple[str, str], int] = {}
    for pid, variables in processes.of_jobs():
        place = _place(pid, variables)
        if place and (place[0] == root or os.path.dirname(place[0]) == root):
            found[place] = found.get(place, 0) + 1
    left = {place: count for place, count in found.items() if not JobProcesses(*place, {"id": place[1]}).caretakers()}
    return sorted((job, count) for (_, job), count in left.items())


def _place(pid: int, variables: Mapping[bytes, bytes]) -> Optional[Tuple[str, str]]:
    """(base directory, job) of a job's living process, from its environment."""
    if processes.MARK not in variables or b"CLUSTERTOOL_OUTPUT" not in variables:
        return None
    job = os.fsdecode(variables[processes.MARK].partition(b"/")[0])
    base, found, _ = os.fsdecode(variables[b"CLUSTERTOOL_OUTPUT"]).rpartition(f"/JOB{job}")
    process = processes.identify(pid)
    return (base, job) if found and process and processes.alive(process) else None
