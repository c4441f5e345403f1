"""An engine as local_process.py, without a way to the nodes: its agent reads records on the directory that the nodes share.

ENGINE = "shared-process", SHARED_PROCESS = {"spool": DIR, "nodes": 2, "shared": True}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from local_process import LocalProcess, LocalStart, read_state, root_dir

from clustertool.engines.base import Answers, Description, Engine
from clustertool.engines.job_request import RunRequest
from clustertool.engines.known_engines import Capabilities, EngineEntry, register
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.hosts import Host
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.model.wire.agent_requests import StopHow

register(
    EngineEntry(
        "shared-process",
        f"{__name__}:SharedProcess",
        f"{__name__}:SharedStart",
        Capabilities(needs_hosts=False, queues=True, sends_workspace=True, live_channels=False),
    )
)


class SharedProcess(LocalProcess):
    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        root = root_dir(self.fleet.cluster, 0)
        return self.fleet.open_shared(Host(0, "login", root_dir=root, name="login", here=True))

    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        return {path.parent.name: read_state(path) for path in self.spool.glob("*/state")}

    def cancel(self, job: str, how: StopHow) -> Answers:
        """As the engine's own programs would do it, which reach the nodes."""
        with LocalProcess(replace(self.fleet.cluster, engine="local-process"), self.caller) as engine:
            engine.open()
            engine.cancel(job, how)
        return {}


class SharedStart(LocalStart):
    def __init__(self, engine: Engine, request: RunRequest) -> None:
        super().__init__(LocalProcess(replace(request.cluster, engine="local-process"), engine.caller), request)
