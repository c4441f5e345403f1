"""Members of an elastic job as processes: each one is the supervisor of its node in one epoch after another.

The real supervisors run here without the joining of the next epoch: the test gives each epoch's nodes and number itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tests import forked, forked_agents
from tests.node.harness import PATIENCE, Channel, Job, Process, alive, kill, sample, until

_PROGRAM = """
import json, os, sys
sys.path.append(sys.argv[1])
from clustertool.node.storage import files
from clustertool.node.supervisor.supervisor import Supervisor
given = json.loads(sys.stdin.readline())
for line in iter(sys.stdin.readline, ""):
    job = files.open_job_dir(given["job_dir"])
    spec = {**json.loads(files.read(job, ".clustertool/spec.json")), **given["launch"]}
    epoch = json.loads(line)
    if "shape" in spec:
        place = [one for one in spec["shape"]["place"] if one[2] in epoch["nodes"]]
        spec["shape"] = {**spec["shape"], "nodes": epoch["nodes"], "place": place}
    spec["elastic"], spec["attempt"] = epoch["elastic"], epoch["elastic"]["epoch"]
    supervisor = Supervisor(spec, job, 0o022)
    supervisor.prepare()
    supervisor.run()
    outcome, end = supervisor.outcome, supervisor.epoch_end
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    print(json.dumps({**outcome.as_record(), "end": end and end._asdict(), "files": opened}), flush=True)
"""


class Member:
    """The process of one node, a fork as agents are where it can be.

    results: of its epochs: the outcome, the `end` of the epoch, and the files that stay open.
    """

    def __init__(self, job: Job, node: int) -> None:
        fields = job.start_requests[node].fields
        launch = {name: fields[name] for name in ("secrets", "certificate", "key")}
        self.job, self.node = job, node
        self.results: list[dict[str, Any]] = []
        place, env = job.nodes[node].place, job.nodes[node].env
        as_agents = forked_agents.can_fork(env) and forked.can_join()
        argv = [sys.executable, "-ESs", "-c", _PROGRAM, str(place)]
        self._channel = Channel(argv, env, place if as_agents else None)
        self.popen = self._channel.popen
        self._send({"job_dir": str(job.dir(node)), "launch": launch})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _send(self, message: object) -> None:
        self._channel.sendall(f"{json.dumps(message)}\n".encode())

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.results.append(json.loads(line))

    def begin(self, nodes: Sequence[int], elastic: dict[str, Any]) -> None:
        self._send({"nodes": list(nodes), "elastic": elastic})

    @property
    def process(self) -> Process:
        found = sample(self.popen.pid)
        assert found is not None, f"member {self.node} has ended"
        return found[0]

    def result(self, number: int) -> dict[str, Any]:
        """Of the epoch that began as number `number` of this member, from 0."""
        what = f"the end of epoch {number} of member {self.node}"
        until(lambda: len(self.results) > number or self.popen.poll() is not None, what)
        until(lambda: len(self.results) > number, f"{what}: {self.results} {self._channel.recv_stderr(1 << 16)!r}", 5.0)
        return self.results[number]

    def end(self) -> None:
        self._channel.close()
        if self.popen.poll() is None and alive(self.process):
            os.kill(self.popen.pid, signal.SIGCONT)
        try:
            self.popen.wait(5.0)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._reader.join(PATIENCE)


class Members:
    """All members of a job that is placed. lease: seconds."""

    def __init__(self, job: Job, lease: float) -> None:
        self.job, self.lease = job, lease
        self.all = [Member(job, node) for node in range(len(job.nodes))]

    def begin(self, epoch: int, nodes: Sequence[int] | None = None, **elastic: object) -> None:
        """Begin an epoch with these nodes, or all."""
        nodes = range(len(self.all)) if nodes is None else nodes
        given = {
            "epoch": epoch,
            "lease": self.lease,
            "grow": "next",
            "minimum": 1,
            "maximum": len(self.all),
            "members": len(nodes),
        }
        rest = {"waiting": [], "absent": 0, "restarts": 0, "blamed": [], "steps": None, "store": False}
        rest.update(elastic)
        for node in nodes:
            self.all[node].begin(nodes, {**given, **rest})

    def results(self, number: int, nodes: Sequence[int]) -> list[dict[str, Any]]:
        return [self.all[node].result(number) for node in nodes]

    def kill(self, node: int) -> None:
        kill(self.all[node].process)

    def end(self) -> None:
        for member in self.all:
            member.end()
