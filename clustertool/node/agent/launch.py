"""The handler of a job's start detaches the supervisor from ssh (fork, setsid) and waits for its report."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from clustertool.errors import ClustertoolError, as_wire, from_wire
from clustertool.model.paths import OURS, SUPERVISOR_ERRORS
from clustertool.node.agent import detach
from clustertool.node.devices import nvml
from clustertool.node.storage import files
from clustertool.node.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import LaunchRequest
    from clustertool.model.wire.spec_types import Spec
    from clustertool.node.agent.loop import Agent

_SKEW = 5.0  # seconds of difference to the laptop's clock; less may be the delay of its request, and counts as none


def start(agent: Agent, request: LaunchRequest) -> Answer:
    """Start the supervisor of a placed job, with its secrets and keys, as a detached process, and wait until it is prepared.

    Raises what the supervisor raised, or the error of its death.
    """
    skew = time.time() - request["now"]
    job = files.open_job_dir(request["job_dir"])
    spec: Spec = json.loads(files.read(job, f"{OURS}/spec.json"))
    spec["secrets"], spec["certificate"], spec["key"] = request["secrets"], request["certificate"], request["key"]
    spec["notify"], spec["header"]["skew"] = request["notify"], counted_skew(skew)
    nvml.end()  # with --devices auto, this agent has read the cards
    with files.closing(job):
        with files.closing(files.open_append(job, SUPERVISOR_ERRORS)) as log:
            started = detach.begin("agent.launch:supervise", (spec, job, agent.start.umask), log, (job,))
        with open(started.report, "rb") as file:
            report = file.read()
        if not report:
            output = files.read(job, SUPERVISOR_ERRORS).decode(errors="replace").strip().splitlines()
            raise detach.death(started.pid, "the supervisor", "".join(output[-1:]))
        reply = json.loads(report)
    if reply:
        raise from_wire(reply["kind"], reply["what"], reply["fix"])
    agent.placed = ""
    return {}


def counted_skew(skew: float) -> float:
    """Round a difference of clocks to tenths of a second; less than 5 s is 0, since it may be the delay of a request."""
    return round(skew, 1) if abs(skew) >= _SKEW else 0


def supervise(report: int, spec: Spec, job: int, umask: int) -> None:
    """Prepare the supervisor, report an error or {} to the agent, and run it, in the detached process.

    job: a descriptor of the job's directory.
    """
    supervisor = Supervisor(spec, job, umask)
    try:
        supervisor.prepare()
    except ClustertoolError as error:
        supervisor.leave()
        os.write(report, json.dumps(as_wire(error)).encode())
    else:
        os.write(report, b"{}")
        os.close(report)
        supervisor.run()
