"""A workspace that does not fit into a Secret is sent once, to the first pod. The others get it from there.

It is a usual dispatch to an agent in that pod, whose store has what an earlier attempt has brought. The joining process of the
pod waits for the release (node/join/pods/workspace_upload.py).
"""

from __future__ import annotations

import time
from dataclasses import replace

from clustertool.engines.base import EngineState
from clustertool.engines.caller import Caller
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.engines.preflight import probe
from clustertool.engines.send_workspace import portions, send
from clustertool.errors import PreflightError, raise_all
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.hosts import Host
from clustertool.model.facts import read_facts
from clustertool.model.hints import PROGRAM

_POLL = 1.0  # seconds between two questions about the pod
_TURN = 0.05
_ATTEMPTS = 5  # connections that may break
_PAUSE = 2.0


def send_to_first_pod(engine: KubernetesEngine, job: str, workspace: Workspace) -> None:
    """Wait until the first pod runs, then send the workspace there.

    Raises what the caller's check raises, PreflightError if the job ends before, and why the dispatch has failed.
    """
    caller = engine.caller
    for attempt in range(_ATTEMPTS):
        host = _running(engine, caller, job)
        try:
            _send(engine, host, workspace)
            return
        except PreflightError as error:
            if attempt + 1 == _ATTEMPTS:
                raise
            caller.warn(f"{host.name}: {error.what}; the workspace is sent again, without what has arrived")
            _wait(caller, _PAUSE)


def _running(engine: KubernetesEngine, caller: Caller, job: str) -> Host:
    """Wait until the first pod runs, and show its reasons to wait. Raises PreflightError."""
    shown = ""
    while True:
        found = engine.store.describe().get(job)
        host = engine.first_pod(job)
        if host is not None:
            return host
        if found is None or found.state is EngineState.ENDED:
            why = found.why if found is not None else "its objects were deleted"
            what = f"job {job} has ended before its workspace was sent: {why}"
            raise PreflightError(what, f"{PROGRAM} run starts it again")
        if found.reason != shown:
            shown = found.reason
            why = f": {shown}" if shown else ""
            caller.note(f"job {job}: {found.state}{why}; its workspace is sent when its first pod runs")
        _wait(caller, _POLL)


def _send(engine: KubernetesEngine, host: Host, workspace: Workspace) -> None:
    cluster = replace(engine.fleet.cluster, hosts=(host,), dispatch="swarm")
    with Fleet(cluster, engine.caller.check, None, None, engine.reach) as fleet:
        gathered = probe(fleet.open(), {})
        raise_all([*fleet.failed.values(), *gathered.failed.values()])
        facts = {node: read_facts(node, answer) for node, answer in gathered.ok.items()}
        done = send(engine.caller, fleet, workspace, portions(workspace, cluster, facts, None), facts)
        raise_all(list(done.failed.values()))


def _wait(caller: Caller, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        caller.check()
        time.sleep(_TURN)
