"""An engine in one file: its nodes are children of this machine, and its queue runs one job at a time.

A conf.py that imports this module can name it: ENGINE = "local-process", LOCAL_PROCESS = {"spool": DIR, "nodes": 2}. With
"shared": True its nodes share ROOT_DIR. Each job
has a process of its own that waits for its turn, starts the job, and waits for its end. So a job starts while no command runs.

    spool/turn               locked by the process whose job has its turn; has the job's id
    spool/<job>/order.json   what --dry shows
    spool/<job>/bundle       the steps of the start, with the secrets; renamed once, by the start or by cancel()
    spool/<job>/state        what describe() answers
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool.engines import preflight
from clustertool.engines.base import (
    Answers,
    Description,
    Document,
    EngineState,
    Starter,
    Submission,
    Submitted,
)
from clustertool.engines.caller import Caller
from clustertool.engines.job_request import make_plan
from clustertool.engines.known_engines import Capabilities, EngineEntry, register
from clustertool.engines.send_workspace import portions, send
from clustertool.engines.ssh.ssh_engine import SshEngine
from clustertool.errors import ConfigError, raise_all
from clustertool.fleet import job_places
from clustertool.fleet.agent_client import Sink
from clustertool.fleet.fleet import Fleet, carry_out
from clustertool.fleet.identity import identity, job_id
from clustertool.fleet.this_machine import HereLink, Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.planning import requests
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import LIST_JOBS

register(
    EngineEntry(
        "local-process",
        f"{__name__}:LocalProcess",
        f"{__name__}:LocalStart",
        Capabilities(needs_hosts=False, queues=True, sends_workspace=True, live_channels=True),
    )
)


class LocalProcess(SshEngine):
    """Agents run on this machine, one for each node."""

    def __init__(self, cluster: Cluster, caller: Caller, sink: Sink | None = None) -> None:
        spool = cluster.settings.get("spool")
        if not isinstance(spool, str):
            raise ConfigError(f"LOCAL_PROCESS has no spool: {dict(cluster.settings)}", '{"spool": "/path"}')
        self.spool = Path(spool)
        super().__init__(located(cluster, int(str(cluster.settings.get("nodes", 1)))), caller, sink)

    def reach(self, host: Host) -> Link:
        """A program in front of the shell, as `srun` would be."""
        return HereLink(host, ("/bin/sh", "-c", f"NODE_NAME={host.name} exec /bin/sh"))

    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        return self.fleet if self.fleet.agents else self.fleet.open(lag)

    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        found = {path.parent.name: read_state(path) for path in self.spool.glob("*/state")}
        return {**super().describe(known), **found}

    def cancel(self, job: str, how: StopHow) -> Answers:
        folder = self.spool / job
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder / "bundle", folder / "cancelled")
            write_state(folder, EngineState.ENDED, "cancelled")
            return {}
        return super().cancel(job, how)

    def forget(self, jobs: Collection[str]) -> None:
        for job in jobs:
            shutil.rmtree(self.spool / job, ignore_errors=True)


class LocalStart(Starter):
    def prepare(self) -> Submission:
        request, fleet = self._request, self._engine.open()
        request = replace(request, cluster=fleet.cluster)
        probed = preflight.examine(fleet, {}, ports=False, ping=False)
        probed.require()
        mine = None if request.wish.dry else identity(request.job_id or job_id(), request.wish.job_id)
        made = make_plan(request, probed.facts, mine)
        order = {"job": made.job_id, "processes": [[*process.argv] for process in made.processes]}
        return Submission(made.job_id, made, (Document("order.json", json.dumps(order)),))

    def submit(self, submission: Submission) -> Submitted:
        engine, request, made = self._engine, self._request, submission.plan
        assert isinstance(engine, LocalProcess)
        assert made is not None
        engine.caller.starting(made.job_id)
        releases: Mapping[int, str] = {}
        if request.workspace is not None:
            facts = {node.host.index: node.facts for node in made.nodes}
            shares = portions(request.workspace, made.cluster, facts, request.spec)
            raise_all(list(send(engine.caller, engine.fleet, request.workspace, shares, facts).failed.values()))
            releases = {node: portion.release for node, portion in shares.items()}
        folder = engine.spool / made.job_id
        folder.mkdir(mode=0o700, parents=True)
        for document in submission.documents:
            (folder / document.name).write_text(document.text)
        with open(os.open(folder / "bundle", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            pickle.dump((requests.start(made, releases, request.secrets), made.cluster), file)
        write_state(folder, EngineState.QUEUED, "waits for its turn")
        argv = [sys.executable, __file__, str(folder)]
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, stdout=subprocess.DEVNULL)
        job_places.remember(made.identity, request.cluster, engine.caller.warn)
        return Submitted(made.job_id)


def located(cluster: Cluster, count: int) -> Cluster:
    """The cluster with its nodes."""
    hosts = [
        Host(n, f"local{n}", address="127.0.0.1", root_dir=root_dir(cluster, n), name=f"local{n}", here=True)
        for n in range(count)
    ]
    off = (*cluster.checks_off, "ping", "rsync")
    path = str(Path(sys.executable).parent)
    return replace(cluster, hosts=tuple(hosts), python=sys.executable, first_path=path, checks_off=off)


def root_dir(cluster: Cluster, node: int) -> str:
    return f"{cluster.settings['spool']}/root{'' if cluster.settings.get('shared') else node}"


def write_state(folder: Path, state: EngineState, reason: str) -> None:
    part = folder / f"state.{os.getpid()}"
    part.write_text(json.dumps({"state": state, "reason": reason, "since": time.time()}))
    part.replace(folder / "state")


def read_state(path: Path) -> Description:
    found: dict[str, Any] = json.loads(path.read_text())
    order = json.loads((path.parent / "order.json").read_text())
    state, since = EngineState(found["state"]), float(found["since"])
    expected = since + 3600 if state is EngineState.QUEUED else 0.0
    command = " ".join(order["processes"][0])
    return Description(state, found["reason"], since, expected, command=command, nodes=len(order["processes"]))


class _Quiet:
    """The caller of a process without a user."""

    def note(self, text: str) -> None:
        """Nothing reads it."""

    warn = starting = remark = note

    def check(self) -> None:
        """Nothing ends it."""

    def person(self) -> None:
        return None


def main(folder: Path) -> None:
    """Wait for the turn, start the job, and wait for its end."""
    with open(folder.parent / "turn", "a+") as turn:
        turn.seek(0)
        write_reason = turn.read()
        if write_reason and (folder / "bundle").exists():
            write_state(folder, EngineState.QUEUED, f"job {write_reason} has its turn")
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            os.rename(folder / "bundle", folder / "taken")
        except FileNotFoundError:
            return  # cancelled
        turn.truncate(0)
        turn.write(folder.name)
        turn.flush()
        steps, cluster = pickle.loads((folder / "taken").read_bytes())
        (folder / "taken").unlink()
        with LocalProcess(replace(cluster, engine="local-process"), _Quiet()) as engine:  # type: ignore[arg-type]
            fleet = engine.open()
            write_state(folder, EngineState.RUNNING, "")
            try:
                carry_out(steps, fleet, lambda phase, answers: None)
                while _lives(engine, folder.name):
                    time.sleep(0.3)
            finally:
                write_state(folder, EngineState.ENDED, "")
                turn.truncate(0)


def _lives(engine: LocalProcess, job: str) -> bool:
    known = engine.fleet.ask_all(LIST_JOBS({"job": job, "exact": True}))
    return SshEngine.describe(engine, known)[job].state is not EngineState.ENDED


if __name__ == "__main__":
    main(Path(sys.argv[1]))
