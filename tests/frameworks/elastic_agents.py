"""Agents of an elastic launcher, one for each node, all on this machine; their ranks run programs/membership.py.

An agent is a process that starts one rank, and starts it again when nodes leave or join: torchrun, or Paddle's launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.cli import until

PROGRAM = Path(__file__).with_name("programs") / "membership.py"
LIMIT = 180.0  # seconds: both launchers wait for tens of seconds in places


class Start(NamedTuple):
    """A start of a rank. seconds: the time of the machine."""

    seconds: float
    pid: int
    node: str
    env: dict[str, str]

    @property
    def runs(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").exists()


class Agents:
    """Agents with names of one letter. Each rank gets NODE, the name of its agent."""

    def __init__(self, folder: Path, argv: list[str], env: dict[str, str]) -> None:
        self.folder, self._argv, self._env = folder, argv, env
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.records = folder / "records"
        self.records.mkdir()

    def start(self, name: str, *options: object) -> None:
        """Start an agent, or start it again."""
        env = {**self._env, "NODE": name, "TMPDIR": str(self.folder)}
        line = [*self._argv, *map(str, options), str(PROGRAM), str(self.records)]
        with self.log(name).open("a") as log:
            self.running[name] = subprocess.Popen(
                line, env=env, cwd=self.folder, stdout=log, stderr=log, text=True, start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.folder / f"agent-{name}.log"

    def text(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("agent-*.log")))

    def starts(self) -> list[Start]:
        """All starts of ranks, in order."""
        found = [json.loads(path.read_text()) for path in sorted(self.records.glob("start-*"))]
        return [Start(its["time"], its["pid"], its["env"]["NODE"], its["env"]) for its in found]

    def world(self, nodes: str, variable: str = "WORLD_SIZE", since: int = 0) -> list[Start]:
        """Wait until each of these nodes has started a rank in a world of this size, after the first `since` starts.

        Returns these starts by node.
        """
        found: dict[str, Start] = {}

        def complete() -> bool:
            found.update({s.node: s for s in self.starts()[since:] if s.env[variable] == str(len(nodes))})
            return set(nodes) <= set(found)

        until(complete, LIMIT, lambda: f"a world of {nodes}\n{self.text()}")
        return [found[node] for node in nodes]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an agent; not to its rank."""
        self.running[name].send_signal(number)

    def exit_code(self, name: str) -> int:
        try:
            return self.running[name].wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} does not end\n{self.text()}") from None

    def order(self, text: str) -> None:
        """Give the ranks an order: `done`, or `PID CODE`."""
        part = self.records / "part-order"
        part.write_text(text)
        part.rename(self.records / "order")

    def close(self) -> None:
        """End all agents and ranks."""
        for agent in self.running.values():
            agent.kill()
            agent.wait(LIMIT)
        for start in self.starts():
            environ = Path(f"/proc/{start.pid}/environ")
            if environ.exists() and f"NODE={start.node}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(start.pid, signal.SIGKILL)
