"""A request in a thread of the agent counts its work: the agent reports progress as long as the count grows."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

from clustertool.errors import DispatchError
from clustertool.model.wire.messages import Kind


class WorkCounter(threading.Thread):
    """A thread that handles one request, started at once. `number`: None if no answer is wanted. step() counts its steps."""

    def __init__(self, kind: Kind[Any, Any], number: Optional[int], handle: Callable[[], None]) -> None:
        super().__init__(target=handle, daemon=True)
        self.kind = kind
        self.number = number
        self.steps = self.reported = 0
        self.unwanted = False
        self.start()

    def moved(self) -> bool:
        """Check whether steps were done since this was asked last."""
        before, self.reported = self.reported, self.steps
        return self.steps != before

    def abandon(self) -> None:
        """End it at its next step, with a DispatchError."""
        self.unwanted = True


def step() -> None:
    """Count a step: a file, a folder or a part of a file is done.

    Raises DispatchError, once, where the result is not wanted any more.
    """
    work = threading.current_thread()
    if isinstance(work, WorkCounter):
        work.steps += 1
        if work.unwanted:
            work.unwanted = False  # what it has done is taken back, which takes steps too
            raise DispatchError("was ended before it was complete")
