"""Launching detaches the supervisor from ssh (fork, setsid) and waits for its report that all is ready."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Dict

from clustertool.errors import ClustertoolError, from_wire
from clustertool.model.paths import OURS
from clustertool.node.agent import systemd_scope
from clustertool.node.devices import nvml
from clustertool.node.storage import files
from clustertool.node.supervisor.supervisor import Supervisor
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import LaunchRequest
    from clustertool.model.wire.spec_types import Spec

_ERRORS = f"{OURS}/supervisor.err"
_SKEW = (
    5.0  # seconds of difference to the laptop's clock; less may be the delay of its request, and is reported as none
)


def launch(request: LaunchRequest, umask: int) -> None:
    """request: job_dir, and what never lies on a disk: secrets, certificate, key. Raises what the supervisor raised."""
    skew = time.time() - request["now"]
    job = files.open_job_dir(request["job_dir"])
    spec: Spec = json.loads(files.read(job, f"{OURS}/spec.json"))
    spec["secrets"], spec["certificate"], spec["key"] = request["secrets"], request["certificate"], request["key"]
    spec["header"]["skew"] = round(skew, 1) if abs(skew) >= _SKEW else 0
    nvml.end()  # with --devices auto, this agent has read the cards
    try:
        with open(_begin(spec, job, umask), "rb") as file:
            reply = json.loads(file.read() or _died(job))
    finally:
        os.close(job)
    if reply:
        raise from_wire(reply["kind"], reply["what"], reply["fix"])


def _begin(spec: Spec, job: int, umask: int) -> int:
    """Start the supervisor. Returns the descriptor from which its report is read."""
    report = systemd_scope.start(spec, job, umask, _ERRORS)
    if report is not None:
        return report
    ours, theirs = os.pipe()
    if os.fork() == 0:
        _detach(spec, job, theirs, umask)
    os.close(theirs)
    return ours


def resume(spec: Spec, job: int, ready: int, umask: int, environ: Dict[str, str]) -> None:
    """The supervisor in a scope of its own, which is a new process of Python (node/agent/systemd_scope.py): never returns."""
    try:
        os.write(ready, systemd_scope.BEGAN)
        os.set_inheritable(job, False)
        os.set_inheritable(ready, False)
        os.environ.clear()  # systemd-run adds to it
        os.environ.update(environ)
        _settle(job, ready)
        _supervise(Supervisor(spec, job, umask), ready)
    finally:
        processes.leave(0)


def _died(job: int) -> bytes:
    """The error of a supervisor that ended without a report."""
    output = files.read(job, _ERRORS).decode(errors="replace").strip().splitlines()
    what = ": ".join(["the supervisor died at birth", *output[-1:]])
    return json.dumps({"kind": "InternalError", "what": what, "fix": ""}).encode()


def _detach(spec: Spec, job: int, ready: int, umask: int) -> None:
    """In the child, which becomes the supervisor: never returns. It may outlive the agent, or be its zombie for a while."""
    try:
        _settle(job, ready)
        _supervise(Supervisor(spec, job, umask), ready)
    finally:
        processes.leave(0)


def _supervise(supervisor: Supervisor, ready: int) -> None:
    try:
        supervisor.prepare()
    except ClustertoolError as error:
        supervisor.leave()
        os.write(ready, json.dumps({"kind": type(error).__name__, "what": error.what, "fix": error.fix}).encode())
        return
    os.write(ready, b"{}")
    os.close(ready)
    supervisor.run()


def _settle(job: int, ready: int) -> None:
    """No descriptor of the agent stays open, or ssh would wait for it; stderr goes to a file of the job."""
    log = files.open_append(job, _ERRORS)
    null = os.open(os.devnull, os.O_RDWR)
    processes.detach(job, ready, stdio=(null, null, log))
