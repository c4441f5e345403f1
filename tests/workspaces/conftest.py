"""A job by hand: the example programs as real processes on loopback, with the environment clustertool gives.

A test gets the fixture `job_of`, starts pservers and trainers in any number, and waits for what it expects
with a deadline. Whatever a test does, its processes are gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator

import pytest

from tests.free_ports import free_ports

WORKSPACES = Path(__file__).resolve().parents[2] / "workspaces"
DEADLINE = 240.0


class Program:
    """One process of a job and its log."""

    def __init__(self, argv: list[str], cwd: Path, env: dict[str, str], log: Path) -> None:
        self.log, self.endpoint = log, ""  # an endpoint: pservers only
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait(self, seconds: float = DEADLINE) -> int:
        """The exit code; not to end in time is a failure of the test."""
        return self.popen.wait(seconds)

    def says(self, text: str, times: int = 1) -> None:
        """Wait until the log holds `text` that often."""
        self._until(lambda: self.text.count(text) >= times, text)

    def listens(self) -> None:
        """Wait until its port can be connected to."""
        self._until(self._reachable, self.endpoint)

    def _reachable(self) -> bool:
        host, port = self.endpoint.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError:
            return False
        return True

    def _until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not true():
            assert self.popen.poll() is None, f"ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"waited {DEADLINE} s for {what}:\n{self.text}"
            time.sleep(0.02)


class Job:
    """A copy of one example workspace, and the processes started in it."""

    def __init__(self, example: str, tmp: Path) -> None:
        self.tmp, self.workspace, self.output = tmp, tmp / "workspace", tmp / "output"
        kept = shutil.ignore_patterns("train_data_dir", "output", "__pycache__")
        shutil.copytree(WORKSPACES / example, self.workspace, ignore=kept)
        self.endpoints: list[str] = []
        self.programs: list[Program] = []

    def start(self, name: str, *args: str, env: dict[str, str]) -> Program:
        """One of the workspace's programs in a scrubbed environment."""
        base = {
            "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CLUSTERTOOL_OUTPUT": str(self.output),
        }
        log = self.tmp / f"log.{len(self.programs)}"
        program = Program([sys.executable, "-u", name, *args], self.workspace, {**base, **env}, log)
        self.programs.append(program)
        return program

    def start_pservers(
        self, count: int, trainers: int, script: str = "pserver.py", ip: str = "127.0.0.1"
    ) -> list[Program]:
        self.endpoints = [f"{ip}:{port}" for port in free_ports(count)]
        started = []
        for index, endpoint in enumerate(self.endpoints):
            env = {
                **self._ps_environment("PSERVER", index, count, trainers),
                "POD_IP": ip,
                "PADDLE_PORT": endpoint.rsplit(":", 1)[1],
            }
            program = self.start(script, env=env)
            program.endpoint = endpoint
            started.append(program)
        for program in started:
            program.listens()
        return started

    def start_trainers(self, count: int, *args: str) -> list[Program]:
        shards = sorted((self.workspace / "train_data_dir").glob("*-[0-9]*"))
        started = []
        for rank in range(count):
            listing = self.tmp / f"shards.{rank}"
            listing.write_text("".join(f"{path}\n" for path in shards[rank::count]))
            env = {
                **self._ps_environment("TRAINER", rank, count, count),
                "PADDLE_TRAINER_ID": str(rank),
                "POD_IP": "127.0.0.1",
                "CLUSTERTOOL_SHARDS": str(listing),
            }
            started.append(self.start("train.py", *args, env=env))
        return started

    def _ps_environment(self, role: str, index: int, world: int, trainers: int) -> dict[str, str]:
        return {
            "TRAINING_ROLE": role,
            "PADDLE_ROLE": role,
            "CLUSTERTOOL_ROLE": role.lower(),
            "CLUSTERTOOL_RANK": str(index),
            "CLUSTERTOOL_WORLD_SIZE": str(world),
            "PADDLE_TRAINERS_NUM": str(trainers),
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
        }

    def end(self) -> None:
        for program in self.programs:
            if program.popen.poll() is None:
                program.popen.kill()
            program.popen.wait(DEADLINE)


@pytest.fixture
def job_of(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    jobs: list[Job] = []

    def make(example: str) -> Job:
        jobs.append(Job(example, tmp_path))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()
