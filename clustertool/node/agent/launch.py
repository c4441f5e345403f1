"""The handler of a job's start detaches the supervisor from ssh (fork, setsid) and waits for its report."""

from __future__ import annotations

import json
import marshal
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, NoReturn, Optional, cast

import clustertool
from clustertool.errors import ClustertoolError, as_wire, from_wire
from clustertool.model.paths import OURS
from clustertool.node.devices import nvml
from clustertool.node.storage import files
from clustertool.node.supervisor.supervisor import Supervisor
from clustertool.node.system import logind, processes, programs

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import LaunchRequest
    from clustertool.model.wire.spec_types import Spec
    from clustertool.node.agent.loop import Agent

_ERRORS = f"{OURS}/supervisor.err"
_SKEW = 5.0  # seconds of difference to the laptop's clock; less may be the delay of its request, and counts as none
_BEGAN = b"!"  # the first byte of the Python in a scope: systemd-run has done its part
_SCOPE_PATIENCE = 5.0  # seconds for it
_CODE = """\
import marshal, sys
sys.path[:] = [entry for entry in sys.path if entry]
with open(0, "rb", closefd=False) as file:
    place, arguments = marshal.load(file)
sys.path.insert(0, place)
from clustertool.node.agent import launch
launch.resume(*arguments)
"""


def start(agent: Agent, request: LaunchRequest) -> Answer:
    """Raises what the supervisor raised."""
    skew = time.time() - request["now"]
    job = files.open_job_dir(request["job_dir"])
    spec: Spec = json.loads(files.read(job, f"{OURS}/spec.json"))
    spec["secrets"], spec["certificate"], spec["key"] = request["secrets"], request["certificate"], request["key"]
    spec["header"]["skew"] = counted_skew(skew)
    nvml.end()  # with --devices auto, this agent has read the cards
    try:
        with open(_begin(spec, job, agent.umask), "rb") as file:
            reply = json.loads(file.read() or _died(job))
    finally:
        os.close(job)
    if reply:
        raise from_wire(reply["kind"], reply["what"], reply["fix"])
    agent.placed = ""
    return {}


def counted_skew(skew: float) -> float:
    """The difference to the clock of the machine that starts the job, as the first event has it."""
    return round(skew, 1) if abs(skew) >= _SKEW else 0


def _begin(spec: Spec, job: int, umask: int) -> int:
    """Start the supervisor. Returns the descriptor from which its report is read."""
    report = _begin_in_scope(spec, job, umask)
    if report is not None:
        return report
    ours, theirs = os.pipe()
    if os.fork() == 0:
        _supervise(spec, job, theirs, umask)
    os.close(theirs)
    return ours


def _begin_in_scope(spec: Spec, job: int, umask: int) -> Optional[int]:
    """The same where logind would end the supervisor with the session: in a scope of the user's own manager, else None.

    systemd-run becomes the program that it starts, so this is a new Python. It gets the directory of the node's code, the spec
    and the secrets from a file in memory, and sends _BEGAN before the report.
    """
    state, tool = logind.logout(), programs.find("systemd-run")
    if not (state.kills and state.lingers and tool and sys.executable and hasattr(os, "memfd_create")):
        return None
    ours, theirs = os.pipe()
    sent = os.memfd_create("clustertool")
    place = os.path.dirname(os.path.dirname(os.path.abspath(clustertool.__file__)))
    with open(sent, "wb", closefd=False) as file:
        marshal.dump((place, (cast(Any, spec), job, theirs, umask, dict(os.environ))), file)
    os.lseek(sent, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _become(tool, sent, job, theirs)
    os.close(theirs)
    os.close(sent)
    if select.select([ours], [], [], _SCOPE_PATIENCE)[0] and os.read(ours, 1) == _BEGAN:
        return ours
    processes.reap(pid, 0.0)
    os.close(ours)
    return None


def _become(tool: str, sent: int, job: int, ready: int) -> NoReturn:
    """In the child. XDG_RUNTIME_DIR is where the user's manager is reached; not every kind of session has it."""
    try:
        null, log = os.open(os.devnull, os.O_WRONLY), files.open_append(job, _ERRORS)
        processes.detach(job, ready, stdio=(sent, null, log))
        os.set_inheritable(job, True)
        os.set_inheritable(ready, True)
        environ = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
        argv = [tool, "--user", "--scope", sys.executable, "-ESs", "-c", _CODE, "clustertool-supervisor"]
        os.execve(tool, argv, environ)
    finally:
        processes.leave(127)


def resume(spec: Spec, job: int, ready: int, umask: int, environ: Dict[str, str]) -> None:
    """The supervisor in a scope of its own, which is a new process of Python: never returns."""
    os.write(ready, _BEGAN)
    os.set_inheritable(job, False)
    os.set_inheritable(ready, False)
    os.environ.clear()  # systemd-run adds to it
    os.environ.update(environ)
    _supervise(spec, job, ready, umask)


def _died(job: int) -> bytes:
    """The error of a supervisor that ended without a report."""
    output = files.read(job, _ERRORS).decode(errors="replace").strip().splitlines()
    what = ": ".join(["the supervisor died at birth", *output[-1:]])
    return json.dumps({"kind": "InternalError", "what": what, "fix": ""}).encode()


def _supervise(spec: Spec, job: int, ready: int, umask: int) -> NoReturn:
    """In the child, which becomes the supervisor. It may outlive the agent, or be its zombie for a while.

    No descriptor of the agent stays open, or ssh would wait for it; stderr goes to a file of the job.
    """
    try:
        null, log = os.open(os.devnull, os.O_RDWR), files.open_append(job, _ERRORS)
        processes.detach(job, ready, stdio=(null, null, log))
        supervisor = Supervisor(spec, job, umask)
        try:
            supervisor.prepare()
        except ClustertoolError as error:
            supervisor.leave()
            os.write(ready, json.dumps(as_wire(error)).encode())
        else:
            os.write(ready, b"{}")
            os.close(ready)
            supervisor.run()
    finally:
        processes.leave(0)
