"""This module ends the processes of a job whose supervisor cannot: all that are recorded or marked, and their children."""

from __future__ import annotations

import os
import signal
import time
from typing import Dict, Iterable, List, Set

from clustertool.node.system import processes
from clustertool.node.system.processes import Process

_POLL = 0.01
_GRACE_POLL = 0.05


class Sweep:
    """`known`: processes of the job, alive or not; `mark`: its marker in their environment; `spare`: never touched."""

    def __init__(self, known: Iterable[Process], mark: str, spare: Iterable[int] = ()) -> None:
        self._known = set(known)
        self._mark = mark
        self._spare: Set[int] = {os.getpid(), *spare}

    def living(self) -> List[Process]:
        """A process that was found once stays known: its parent may be dead at the next search."""
        seeds = [process for process in {*self._known, *processes.marked(self._mark)} if processes.alive(process)]
        found: Dict[int, Process] = {process.pid: process for process in seeds}
        for process in seeds:
            found.update((child.pid, child) for child in processes.descendants(process.pid))
        living = [process for pid, process in found.items() if pid not in self._spare and processes.alive(process)]
        self._known.update(living)
        return living

    def end(self, grace: float, force_for: float = 5.0) -> List[str]:
        """TERM, `grace` seconds, then KILL until none lives or `force_for` seconds are over. Returns descriptions of
        the survivors."""
        if grace > 0:
            terminate(self.living())
            self._wait(grace)
        end = time.monotonic() + force_for
        left = self.living()
        while left and time.monotonic() < end:
            for process in left:
                processes.signal_one(process, signal.SIGKILL)
            time.sleep(_POLL)
            left = self.living()
        return [processes.describe(process) for process in left]

    def _wait(self, grace: float) -> None:
        end = time.monotonic() + grace
        while self.living() and time.monotonic() < end:
            time.sleep(_GRACE_POLL)


def terminate(found: Iterable[Process]) -> None:
    """TERM, and CONT after it: a stopped process handles TERM only when it continues."""
    for process in found:
        processes.signal_one(process, signal.SIGTERM)
        processes.signal_one(process, signal.SIGCONT)
