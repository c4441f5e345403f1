"""This module finds the processes that take care of a node's part of a job in its own events: supervisor, guard and gauge."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

Event = Mapping[str, Any]
CARETAKERS = ("supervisor", "guard", "gauge")


class CaretakerRecord:
    """The processes that take care of a node's part of a job, and whether the job has ended there, from the node's events.

    This is apart from node_status.py, as a probe needs no more.
    """

    def __init__(self) -> None:
        self.caretakers: Dict[str, Tuple[int, int]] = {}  # kind -> (pid, start time) of the newest one
        self.boot = self.space = ""  # of the newest supervisor
        self.over = False  # an end is recorded, and no later start
        self.damaged = False  # an event is not valid

    def apply(self, event: Event) -> None:
        """Store the process of a caretaker's event, of a supervisor also its boot id and namespace.

        A job header resets `over`, `ended` sets it. Other events change nothing.
        """
        kind = event.get("type")
        if kind in CARETAKERS:
            self.caretakers[str(kind)] = int(event["pid"]), int(event.get("start", 0))
        if kind == "supervisor":
            self.boot, self.space = str(event.get("boot", "")), str(event.get("space", ""))
        elif kind == "job":  # a second one: the engine has started the job again
            self.over = False
        elif kind == "ended":
            self.over = True

    def take(self, event: Event) -> None:
        """Apply an event; if it is not valid, set `damaged`: a program of the job can damage its records."""
        try:
            self.apply(event)
        except (KeyError, TypeError, ValueError):
            self.damaged = True
