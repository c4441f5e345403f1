"""Agents of an elastic launcher, one for each node, all on this machine; their ranks run programs/membership.py.

An agent is a process that starts one rank, and starts it again when nodes leave or join: torchrun, Paddle's launcher, or a
joining process of the tool.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cli import until

PROGRAM = Path(__file__).with_name("programs") / "membership.py"
LIMIT = 100.0  # seconds: both launchers wait for tens of seconds in places


class Start(NamedTuple):
    """A start of a rank. seconds: the time of the machine."""

    seconds: float
    pid: int
    node: str
    env: dict[str, str]

    @property
    def runs(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False


class Agents:
    """Agents with names of one letter. Each rank gets NODE, the name of its agent.

    world_name: the variable with the number of ranks, which is that of nodes. apart: seconds between the starts of two agents.
    """

    world_name = "WORLD_SIZE"
    apart = 0.0
    port = 0  # on which the first agent listens once it has started, 0 for none

    def listens(self) -> bool:
        with socket.socket() as sock:
            return not self.port or sock.connect_ex(("127.0.0.1", self.port)) == 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir(parents=True)

    # -- of each launcher

    def start(self, name: str) -> None:
        """Start an agent, or start it again."""
        raise NotImplementedError

    def kill(self, name: str) -> None:
        """Kill an agent; not its rank."""
        raise NotImplementedError

    def exit_code(self, name: str) -> int:
        """Wait for the end of an agent."""
        raise NotImplementedError

    def poll(self, name: str) -> int | None:
        """The exit code of an agent that has ended, else None."""
        raise NotImplementedError

    def text(self) -> str:
        """What the agents have printed."""
        raise NotImplementedError

    def end_agents(self) -> None:
        raise NotImplementedError

    # -- of their ranks

    def starts(self) -> list[Start]:
        """All starts of ranks, in order."""
        found = [json.loads(path.read_text()) for path in sorted(self.records.glob("start-*"))]
        return [Start(its["time"], its["pid"], its["env"]["NODE"], its["env"]) for its in found]

    def world(self, nodes: str, since: int = 0) -> list[Start]:
        """Wait until each of these nodes has a running rank in a world of this size, after the first `since` starts.

        Returns these starts by node.
        """
        found: dict[str, Start] = {}

        def complete() -> bool:
            found.clear()
            wanted = [one for one in self.starts()[since:] if one.env[self.world_name] == str(len(nodes))]
            found.update({one.node: one for one in wanted if one.runs})
            return set(nodes) <= set(found)

        until(complete, LIMIT, lambda: f"a world of {nodes}\n{self.starts()[-4:]}\n{self.text()}")
        return [found[node] for node in nodes]

    def order(self, text: str) -> None:
        """Give the ranks an order: `done`, `PID CODE` or `all CODE`."""
        part = self.records / "part-order"
        part.write_text(text)
        part.rename(self.records / "order")

    def close(self) -> None:
        """End all agents and ranks."""
        self.end_agents()
        for start in self.starts():
            environ = Path(f"/proc/{start.pid}/environ")
            with contextlib.suppress(OSError):
                if f"NODE={start.node}".encode() in environ.read_bytes().split(b"\0"):
                    os.kill(start.pid, signal.SIGKILL)


class LauncherAgents(Agents):
    """Of a launcher that is a command. argv: the command before the program."""

    def __init__(self, folder: Path, argv: Sequence[str], env: dict[str, str]) -> None:
        super().__init__(folder)
        self._argv, self._env = list(argv), env
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        env = {**self._env, "NODE": name, "TMPDIR": str(self.folder)}
        line = [*self._argv, str(PROGRAM), str(self.records)]
        place = self.folder / name
        place.mkdir(exist_ok=True)
        with (self.folder / f"agent-{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                line, env=env, cwd=place, stdout=log, stderr=log, text=True, start_new_session=True
            )

    def kill(self, name: str) -> None:
        self.running[name].kill()

    def exit_code(self, name: str) -> int:
        try:
            return self.running[name].wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} does not end\n{self.text()}") from None

    def poll(self, name: str) -> int | None:
        return self.running[name].poll()

    def text(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("agent-*.log")))

    def end_agents(self) -> None:
        for agent in self.running.values():
            agent.kill()
            agent.wait(LIMIT)
