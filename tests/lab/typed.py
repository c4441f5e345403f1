"""A folder of a user on one node of a lab, where clusterrun is typed: no laptop, no ssh.

folders = [TypedSite(lab, node, "secret of these machines") for node in (0, 1)]
together(folders, "--master", "10.77.0.1:8090", "--nnodes", 2, "train.py")
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import forked
from tests.cli import CLUSTERRUN, REPO, Done, LabSite, Process, Running, Site, until
from tests.lab.lab import HOME, Lab

SECRET = "typed5on5every5machine5of5the5lab"


class TypedSite(Site):
    """Commands run inside node `node`, in the folder ~/`name`. env: of the user's shell there."""

    def __init__(self, lab: Lab, node: int, name: str = "work", **env: str) -> None:
        self.lab, self.node = lab, node
        self.inside = HOME / name
        self.env = {"CLUSTERTOOL_SECRET": SECRET, **env}
        super().__init__(lab.home(node) / name, 1)

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in {"PYTHONPATH": str(REPO), **self.env, **env}.items() if value}

    def popen(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        options.pop("cwd")
        return self.lab.start_on(self.node, argv, self.inside, self.environ(env), **options)

    def fork(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> forked.Forked:
        process = self.lab.boots[self.node].init
        given = self.lab.node_environ(self.environ(env))
        return forked.start(argv, env=given, inside=process, **{**options, "cwd": self.inside})

    def home(self, node: int) -> Path:
        return self.lab.home(self.node)

    def root(self, node: int) -> Path:
        return self.folder / ".clustertool"

    def name(self, node: int) -> str:
        return self.lab.name(self.node)

    def processes(self, node: int) -> list[Process]:
        return LabSite.processes(self, self.node)  # type: ignore[arg-type]

    def types(self, *args: object, **options: Any) -> Running:
        return self.start(*args, program=CLUSTERRUN, **options)


def interrupt(running: Running, number: signal.Signals = signal.SIGINT) -> float:
    """As the terminal of a node sends it to the command, which is a child of the process that has entered the node."""
    found: list[str] = []

    def child() -> list[str]:
        found[:] = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        return found

    until(child)
    os.kill(int(found[0]), number)
    return time.monotonic()


def together(sites: Sequence[TypedSite], *args: object, codes: Sequence[int] = (), **options: Any) -> list[Done]:
    """The same command on all of them at once, to its end."""
    running = [site.types(*args, **options) for site in sites]
    done = [one.wait() for one in running]
    wanted = codes or [0] * len(done)
    assert [one.code for one in done] == list(wanted), "\n".join(f"--- {one.out}\n{one.err}" for one in done)
    return done
