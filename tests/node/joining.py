"""Machines that join, as real processes on loopback: each has an address, a ROOT_DIR and a join file of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool import __version__
from clustertool.fleet import identity
from clustertool.fleet.joining import join_process
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings, to_json
from clustertool.model.wire import record_lines
from tests import forked
from tests.free_ports import free_port
from tests.node.harness import PATIENCE, Process, alive, marked, read, sample, until

Line = dict[str, Any]
_LANG = "C.UTF-8"


class Machine:
    """One machine's join file, and the process that was started with it."""

    def __init__(self, join: JoinFile, env: Mapping[str, str], python: str, folder: Path) -> None:
        self.join, self.env, self.python, self.folder = join, env, python, folder
        self.argv: list[str] = []  # of a bundle, which has its join file in it
        self.popen: subprocess.Popen[bytes] | forked.Forked | None = None
        self.lines: list[Line] = []
        self.errors = b""
        self._readers: list[threading.Thread] = []

    def start(self, *options: str) -> Machine:
        argv = self.argv or [self.python, *join_process.command("--report", *options)[1:]]
        self.popen = self._popen(argv)
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # with --file it may have ended
            if not self.argv:
                self.popen.stdin.write(to_json(self.join).encode())
            self.popen.stdin.close()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_lines, self._read_errors)]
        for reader in self._readers:
            reader.start()
        return self

    def _popen(self, argv: Sequence[str]) -> subprocess.Popen[bytes] | forked.Forked:
        """The process, with pipes as its standard streams: a fork of one that has imported the package, where it can be."""
        as_server = self.env.get("LANG") == _LANG and not any(name.startswith(("LD_", "LC_")) for name in self.env)
        if argv[0] == sys.executable and not self.argv and as_server and forked.can_join():
            return forked.start_joining(argv, self.env)
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(self.env), start_new_session=True)

    def _read_lines(self) -> None:
        assert self.popen is not None and self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.popen is not None and self.popen.stderr is not None
        self.errors = self.popen.stderr.read()

    @property
    def process(self) -> Process:
        assert self.popen is not None
        found = sample(self.popen.pid)
        assert found is not None, "it has ended"
        return found[0]

    def reports(self, kind: str) -> list[Line]:
        return [line for line in list(self.lines) if line["type"] == kind]

    def until(self, kind: str, **fields: object) -> Line:
        """Wait for a report with these fields."""

        def found() -> Line | None:
            alike = [line for line in self.reports(kind) if fields.items() <= line.items()]
            return alike[0] if alike else None

        line: Line = until(found, f"{kind} {fields}: {self.lines} {self.errors!r}")
        return line

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        assert self.popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.popen.pid, number)

    def wait(self, patience: float = PATIENCE) -> int:
        assert self.popen is not None
        try:
            code = self.popen.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on: {self.lines}") from None
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    @property
    def ended(self) -> bool:
        return self.popen is not None and self.popen.poll() is not None

    @property
    def error(self) -> str:
        return " | ".join(line["what"] for line in self.reports("error"))

    # -- what it left on its disk --

    @property
    def root(self) -> Path:
        return Path(self.join.own.root_dir)

    @property
    def job_dir(self) -> Path:
        return self.root / f"JOB{self.join.identity.job_id}"

    def events(self, kind: str) -> list[Line]:
        rows = read(str(self.job_dir / ".clustertool/events.jsonl")).split(b"\n")[:-1]
        found = [dict(event) for event in map(record_lines.read_event, rows) if event is not None]
        return [event for event in found if event["type"] == kind]

    def log(self, rank: int) -> str:
        return read(str(self.job_dir / f"log/workerlog.{rank}")).decode()

    def says(self, text: str, rank: int) -> None:
        until(lambda: text in self.log(rank), f"rank {rank} says {text}: {self.log(rank)!r} {self.lines}")

    def left(self) -> list[str]:
        """Jobs in its ROOT_DIR."""
        return sorted(path.name for path in self.root.glob("JOB*"))


class JoinBench:
    """Makes the machines of jobs; ends what a failed test has left, and proves that nothing of a job lives."""

    def __init__(self, tmp: Path, home: Path) -> None:
        self.tmp = tmp
        self.env = {"HOME": str(home), "PATH": os.environ["PATH"], "USER": "tester", "LANG": _LANG}
        self.machines: list[Machine] = []
        self.tokens: list[str] = []

    def job(
        self,
        count: int,
        command: Sequence[str] | str = "true",
        *,
        indices: Sequence[int | None] | None = None,
        python: str = sys.executable,
        port: int | None = None,
        cluster: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        toml: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[Machine]:
        """Machines 127.0.0.<21+n>, machine 0 is the coordinator. `fields`: of the join file."""
        given = {"python": python, "device_kind": "cpu", "loss_timeout": 5.0, "grace": 3.0, "where": "this test"}
        known = Cluster((), **{**given, **(cluster or {})})
        argv = ("sh", "-c", command) if isinstance(command, str) else tuple(command)
        folder = fields.pop("folder", None)
        job = read_job(known, toml or {}, Options(command=argv, job_workspace=str(folder or ""), **(options or {})))
        certificate, key = identity.certificate()
        number = fields.pop("id", f"{self.tmp.name[:30]}-{len(self.tokens)}")
        owner = Identity(number, time.time(), "tester", identity.token(), certificate, key)
        self.tokens.append(owner.token)
        first = JoinFile(
            version=__version__,
            code=join_process.digest(),
            identity=owner,
            cluster=known,
            job=job,
            nnodes=count,
            coordinator=MeetingPoint("127.0.0.21", free_port() if port is None else port),
            join_timeout=fields.pop("join_timeout", 60.0),
            **fields,
        )
        made = []
        for number in range(count):
            index = number if indices is None else indices[number]
            own = OwnSettings(root_dir=str(self.tmp / f"root{number}"), folder=str(folder or ""), log_dir=job.log_dir)
            made.append(Machine(replace(first, index=index, own=own), self.env, python, self.tmp))
        self.machines += made
        return made

    def another(self, like: Machine, **fields: Any) -> Machine:
        """One more machine with a similar join file."""
        own = replace(like.join.own, root_dir=str(self.tmp / f"more{len(self.machines)}"))
        machine = Machine(replace(like.join, own=own, **fields), like.env, like.python, self.tmp)
        self.machines.append(machine)
        return machine

    def living(self) -> list[Process]:
        found = [process for token in self.tokens for process in marked(token)]
        for machine in self.machines:
            for kind in ("supervisor", "guard"):
                known = [Process(event["pid"], event["start"]) for event in machine.events(kind)]
                found += [process for process in known if alive(process)]
        return found

    def end(self) -> None:
        running = [one for one in self.machines if one.popen is not None and one.popen.poll() is None]
        for machine in running:
            machine.signal(signal.SIGKILL)
            machine.wait()
        left: list[Process] = []
        try:
            until(lambda: not self.living(), "nothing lives", 45.0)
        except AssertionError:
            left = self.living()
            for process in left:
                os.kill(process.pid, signal.SIGKILL)
        assert not left, f"still alive: {left}"
        assert not running, f"joining processes that had not ended: {[one.lines for one in running]}"


def start(machines: Sequence[Machine]) -> list[Machine]:
    return [machine.start() for machine in machines]


def tasks(machines: Sequence[Machine], **more: str) -> None:
    """Set the variables that srun sets for one task on each machine, and these."""
    number = str(len(machines))
    hosts = f"127.0.0.[21-{20 + len(machines)}]"
    for node, machine in enumerate(machines):
        own = {"SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": hosts, "SLURM_STEP_NUM_TASKS": number}
        machine.env = {**machine.env, **own, **more}


def codes(machines: Sequence[Machine]) -> list[int]:
    return [machine.wait() for machine in machines]
