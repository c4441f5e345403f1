"""A helper is a child of the supervisor that does what may block or crash: it samples cards, or the stacks of ranks."""

from __future__ import annotations

import os
import signal
from typing import Callable

from clustertool.node.jobs.descendants import Descendants
from clustertool.node.system import prctl, processes

_REAP_TIME = 1.0  # seconds for a killed process to end; one that is blocked in a driver ends when the driver returns


class HelperProcess:
    """A process that runs a function, and is no member of the job. pid: 0 while it does not run.

    Call changed() on its SIGCHLD, and end() once.
    """

    def __init__(self, family: Descendants, mark: str) -> None:
        self.pid = 0
        self._family, self._mark = family, mark

    def fork(self, kept: int, body: Callable[[], None]) -> None:
        """Fork the process, which calls `body` and ends; add it to the supervisor's spared children. Raises OSError.

        The kernel kills it when its parent ends. It closes the supervisor's descriptors, which keep locks and ports, but not
        `kept`.
        """
        parent = os.getpid()

        def run() -> None:
            prctl.end_with_parent(signal.SIGKILL)
            os.environ["CLUSTERTOOL_MARK"] = self._mark  # for the tools that it runs: a search by mark finds them
            if os.getppid() == parent:
                body()

        self.pid = processes.fork(run, kept)
        process = processes.identify(self.pid)
        if process:
            self._family.add(process)

    def changed(self, status: int) -> None:
        """Handle the wait status of the process: forget it if it has ended."""
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            self._family.spare.discard(self.pid)
            self.pid = 0

    def end(self) -> None:
        """Kill the process and the tools that it runs, if it runs, and wait up to 1 s for its end."""
        if self.pid:
            processes.kill_tree(self.pid)
            processes.reap(self.pid, 0.0, _REAP_TIME)
            self.pid = 0
