"""Machines that join, as nodes of a lab: each has a network, processes and a /tmp of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool.model.joining.join_file import MeetingPoint, OwnSettings
from tests import forked, proc_files
from tests.lab.lab import HOME, Lab
from tests.node.joining import JoinBench, Machine

PORT = 7170
ROOT = HOME / "clustertool"


class LabMachine(Machine):
    """A node of a lab and its joining process."""

    def __init__(self, lab: Lab, node: int, like: Machine) -> None:
        point = MeetingPoint(lab.name(0), PORT)
        join = replace(like.join, coordinator=point, own=OwnSettings(root_dir=str(ROOT)))
        super().__init__(join, {}, like.python, like.folder)
        self.lab, self.node = lab, node
        self.pid = 0  # of the joining process, as this machine sees it

    def _popen(self, argv: Sequence[str]) -> subprocess.Popen[bytes] | forked.Forked:
        if argv[0] == sys.executable and not self.argv and forked.can_join():
            env = self.lab.node_environ(self.env)
            return forked.start_joining(argv, env, HOME, inside=self.lab.boots[self.node].init)
        pipe = subprocess.PIPE
        return self.lab.start_on(self.node, argv, HOME, self.env, stdin=pipe, stdout=pipe, stderr=pipe)

    @property
    def root(self) -> Path:
        return self.lab.home(self.node) / ROOT.relative_to(HOME)

    def find(self) -> int:
        """The joining process, which becomes the supervisor; its name is set, so it has begun."""
        if not self.pid:
            self.pid = next((p for p in self.living() if proc_files.comm(p) in ("ct-join", "ct-supervisor")), 0)
        return self.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGCONT and self.popen is not None:
            os.kill(self.popen.pid, number)  # nsenter, if there is one, stops when its child is stopped

    def living(self) -> list[int]:
        """Processes of the node, but for its sshd, as this machine sees them."""
        return [
            one.pid for one in self.lab.processes(self.node) if not one.argv[0].startswith(("sshd", "/usr/sbin/sshd"))
        ]


def machines(lab: Lab, tmp: Path, command: str, **fields: Any) -> list[LabMachine]:
    """All nodes of the lab as the machines of one job. `fields`: of JoinBench.job."""
    made = JoinBench(tmp, tmp).job(lab.n, command, port=PORT, **fields)
    return [LabMachine(lab, node, machine) for node, machine in enumerate(made)]
