"""Search for the processes of a job on a node: those that are known or have its marker, and their children."""

from __future__ import annotations

import os
from typing import Dict, Iterable, List

from clustertool.node.system import processes
from clustertool.node.system.processes import Process


class JobSearch:
    """`known`: processes of the job, alive or not; `mark`: its marker in their environment."""

    def __init__(self, known: Iterable[Process], mark: str) -> None:
        self.known = set(known)
        self.mark = mark

    def living(self) -> List[Process]:
        """Find the processes that live. One that has ended since may have started others: search again.

        A process that was found once stays known: its parent may be dead at the next search.
        """
        seeds = {*filter(processes.alive, self.known), *processes.marked(self.mark)}
        found: Dict[int, Process] = {process.pid: process for process in seeds}
        for process in seeds:
            found.update((child.pid, child) for child in filter(processes.alive, processes.descendants(process.pid)))
        found.pop(os.getpid(), None)
        self.known.update(found.values())
        return list(found.values())
