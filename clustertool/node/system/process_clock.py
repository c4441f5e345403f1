"""The process clock stops while its process does not run.

A process that waits for another one must not count the time in which it did not run itself: what arrived meanwhile is not read
yet, and on a frozen machine the other process was frozen too.
"""

from __future__ import annotations

import time

NAP = 1.0  # seconds between two turns after which this process counts as blocked for the rest of them


def boottime() -> float:
    """Read CLOCK_BOOTTIME, in seconds, which also counts while the machine is suspended, or this process is stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ProcessClock:
    """A clock of the seconds in which this process ran. Call turn() each loop: a pause between turns counts as NAP at most."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds in which this process ran
        self.blocked = 0.0  # seconds in which it did not
        self.napped = False  # whether it was blocked before the last turn
        self._turned_at = time.monotonic()

    def turn(self) -> float:
        """Add the time since the last turn to `now`, at most NAP, and the rest to `blocked`; set `napped`, and return `now`."""
        at = time.monotonic()
        gap, self._turned_at = at - self._turned_at, at
        self.napped = gap > NAP
        self.now += min(gap, NAP)
        self.blocked += max(0.0, gap - NAP)
        return self.now
