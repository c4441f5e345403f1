"""The pace of a dispatch: how long pieces take until their nodes tell that they are there, and so what is late."""

from __future__ import annotations

from collections import deque

from clustertool.plan.manifest import PACK

_LAST = 15  # pieces that count
_FEW = 3  # with fewer nothing is late
_TIMES = 2.0  # the usual time
_MORE = 0.5  # seconds


class Pace:
    """`report`: seconds between two words of a node, which is how late its word may be anyway."""

    def __init__(self, report: float) -> None:
        self._more = report + _MORE
        self._last: deque[float] = deque(maxlen=_LAST)  # seconds a byte

    def took(self, seconds: float, size: int) -> None:
        self._last.append(seconds / max(size, PACK))  # below that it is not the bytes that take the time

    def late(self, seconds: float, size: int) -> bool:
        """Whether a piece that was begun so long ago should be there: half of the others were in half of the time."""
        if len(self._last) < _FEW:
            return False
        usual = sorted(self._last)[len(self._last) // 2]
        return seconds > _TIMES * usual * max(size, PACK) + self._more
