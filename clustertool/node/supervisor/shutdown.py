"""A shutdown sends TERM now and KILL after the grace until no process lives. It names what cannot be killed."""

from __future__ import annotations

import signal
import time
from typing import Collection, List, Optional

from clustertool.node.jobs.descendants import Descendants
from clustertool.node.jobs.termination import terminate
from clustertool.node.system import processes
from clustertool.node.system.processes import Process

_HOPELESS = 8.0  # seconds of KILL after which a survivor is reported
_ROUNDS = 20  # of KILL in one turn, against a program that forks as fast as it is killed
_OF_SIGNALS = (128 + signal.SIGTERM, 128 + signal.SIGKILL)  # exit codes of a shell whose program got a signal


class Shutdown:
    """Call turn() each loop until it returns the survivors; `over` is true from then on. `ranks`: the pids of running ranks."""

    def __init__(self, family: Descendants, mark: str, grace: float, ranks: Collection[int] = ()) -> None:
        self.over_at = 0.0
        # Ranks that end by SIGTERM itself, and not with an exit code.
        self._end_by_signal = {pid for pid in ranks if processes.dies_of(pid, signal.SIGTERM)}
        self._family = family
        self._mark = mark
        self._kill_at = time.monotonic() + grace
        self._give_up_at = 0.0
        living = family.living()
        self.signalled = {process.pid for process in living}
        terminate(living)
        self._ended_before = set(ranks) - self.signalled

    @property
    def over(self) -> bool:
        return self.over_at > 0

    def stopped(self, pid: int, code: int, killed: int) -> bool:
        """Whether a rank that has exited now was stopped, and did not end by itself. `killed`: its signal, or 0."""
        if pid in self._ended_before:
            return False
        return killed > 0 or pid not in self._end_by_signal or code in _OF_SIGNALS

    def hurry(self, grace: float) -> None:
        """A second stop can only be faster than the first."""
        self._kill_at = min(self._kill_at, time.monotonic() + grace)

    def turn(self, unreaped: bool) -> Optional[List[str]]:
        """`unreaped`: dead ranks whose exit codes come with the next turn; the last event waits for them."""
        now = time.monotonic()
        left = self._family.living()
        if left and now < self._kill_at:
            return None
        left = self._kill(left)
        if not left and unreaped:
            return None
        left += self._strays(left)
        if left:
            self._give_up_at = self._give_up_at or now + _HOPELESS
            if now < self._give_up_at:
                return None
        self.over_at = now
        return [processes.describe(process) for process in left]

    def _kill(self, left: List[Process]) -> List[Process]:
        """All that live, and at once those that were born meanwhile."""
        killed: List[Process] = []
        for _ in range(_ROUNDS):
            fresh = [process for process in left if process not in killed]
            if not fresh:
                break
            for process in fresh:
                processes.signal_one(process, signal.SIGKILL)
            killed += fresh
            left = self._family.living()
        return left

    def _strays(self, left: List[Process]) -> List[Process]:
        """Marked processes that are not descendants: searched when no descendant lives."""
        if left:
            return []
        strays = processes.marked(self._mark)
        for process in strays:
            processes.signal_one(process, signal.SIGKILL)
        return strays
