"""The probe of `check` reads the facts of each probe, and those that take longer."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from clustertool.model.hints import PROGRAM
from clustertool.node.devices import locks
from clustertool.node.jobs import remains
from clustertool.node.probe import job_environment
from clustertool.node.probe.network_addresses import resolved
from clustertool.node.probe.probe import probe, timed
from clustertool.node.system import logind, private_directory, processes, programs
from clustertool.node.system.node_context import NodeContext

_RSYNC = 5.0  # seconds for its version

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import ProbeRequest


def probe_for_check(node: NodeContext, request: ProbeRequest) -> ProbeAnswer:
    """Collect the facts of probe(), and those that take longer: versions, problems of /tmp, logind and locks, leftovers.

    The request has the field `job`, with what starts the job's Python.
    """
    began = time.monotonic()
    answer = probe(node, request)
    problems = answer["problems"]
    if request["job"]:
        versions, wrong = job_environment.read_versions(request["job"])
        answer.update(versions)
        problems += wrong
    rsync = programs.find("rsync")
    code, _, err = programs.output([rsync, "--version"], _RSYNC) if rsync else (0, "", "")
    if code:
        first = err.strip().partition("\n")[0]
        answer["rsync_error"] = first[:200] or f"it ends with exit code {code}"
    few, fix = private_directory.low_space()
    if few and not any(column == "tmp" for column, _, _, _ in problems):
        problems.append(("tmp", "warn", few, fix))
    ends, fix = logind.logout_warning()
    if ends:
        problems.append(("limits", "warn", ends, fix))
    wrong_lock = locks.trouble()
    if wrong_lock:
        fix = "jobs go on without it, by their own lock files; ask that user, or root, to end it or remove the file"
        problems.append(("devices", "warn", f"the lock for taking devices: {wrong_lock}", fix))
    living = remains.find_living()
    answer["leftovers"] = remains.without_caretakers(answer["root"], living)
    for one in remains.orphans(answer["root"], living.values())[1]:
        what = f"{len(one.processes)} left of a job whose directory was removed: {one.dir}"
        problems.append(("jobs", "warn", what, f"{PROGRAM} stop --all with a conf.py that has its ROOT_DIR ends them"))
    answer["own"] = answer["own"] or resolved(socket.gethostname())
    answer["ptrace_scope"] = processes.ptrace_scope()
    answer["examined"] = True
    return timed(answer, began)
