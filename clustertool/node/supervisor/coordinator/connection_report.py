"""The connection report records that a node cannot reach the lead for a while, each new cause, and that it can again."""

from __future__ import annotations

import time
from typing import Callable, Optional, Tuple

Cause = Tuple[str, str]  # the name of an errno, or "", and text
_REPORT_AFTER = 3.0  # seconds without a connection


class ConnectionReport:
    """Call established(), failed() and broken() when that happens, and turn() each loop.

    `record` writes an event; without it nothing is recorded. All times are of the caller's own clock.
    """

    def __init__(self, endpoint: str, record: Optional[Callable[..., None]]) -> None:
        self.endpoint = endpoint
        self.up = False  # the lead answers on the present connection
        self.joined = False  # it has answered once
        self.cause: Optional[Cause] = None  # why the last connection failed
        self._record = record
        self._down = (0.0, time.time())  # since when it does not answer, by the own clock and by that of the machine
        self._recorded: Optional[Cause] = None

    def established(self) -> None:
        self.joined = self.up = True

    def failed(self, why: Cause) -> None:
        """There was no connection, and there is none."""
        self.cause = why

    def broken(self, now: float, why: Cause) -> None:
        if self.up:
            self._down = (now, time.time())
        self.up, self.cause = False, why

    def turn(self, now: float, why: Cause) -> None:
        """`why` there is no connection, if there is none."""
        if self._record is None:
            return
        if self.up:
            if self._recorded:
                self._record("connected")
            self._recorded = None
        elif now - self._down[0] >= _REPORT_AFTER and why != self._recorded:
            name, text = self._recorded = why
            since = round(self._down[1], 3)
            self._record("unconnected", endpoint=self.endpoint, errno=name, why=text, since=since, again=self.joined)
