"""A request that runs beside the agent's loop counts what it does: the agent reports progress as long as the count grows."""

from __future__ import annotations

from _thread import get_ident
from typing import Any, Callable, Dict

from clustertool.errors import DispatchError
from clustertool.node.system.threads import Beside

_working: Dict[int, Work] = {}  # by thread


class Work(Beside):
    """function(*arguments), started at once. `header` is its request; its steps are counted by step()."""

    def __init__(self, header: Dict[str, Any], function: Callable[..., Any], *arguments: Any) -> None:
        self.header = header
        self.steps = self.reported = 0
        self.unwanted = False
        super().__init__(self._work, function, arguments)

    def _work(self, function: Callable[..., Any], arguments: Any) -> None:
        _working[get_ident()] = self
        try:
            function(*arguments)
        finally:
            del _working[get_ident()]

    def moved(self) -> bool:
        """Whether steps were done since this was asked last."""
        before, self.reported = self.reported, self.steps
        return self.steps != before

    def abandon(self) -> None:
        """End it at its next step, with a DispatchError."""
        self.unwanted = True


def step() -> None:
    """A file, a folder or a part of a file is done. Raises DispatchError, once, where the result is not wanted any more."""
    work = _working.get(get_ident())
    if work is not None:
        work.steps += 1
        if work.unwanted:
            work.unwanted = False  # what it has done is taken back, which takes steps too
            raise DispatchError("was ended before it was complete")
