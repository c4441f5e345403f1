"""What runs beside a loop is a thread of `_thread`: the module threading takes longer to import than most requests run."""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from typing import Any, Callable


class Beside:
    """function(*arguments), started at once; the process's end is its own. Raises RuntimeError where no thread can start."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._busy = allocate_lock()
        self._busy.acquire()
        start_new_thread(self._run, (function, arguments))

    def _run(self, function: Callable[..., Any], arguments: Any) -> None:
        try:
            function(*arguments)
        finally:
            self._busy.release()

    def over(self) -> bool:
        return not self._busy.locked()

    def wait(self, seconds: float = -1.0) -> None:
        """For its end, or for so many seconds."""
        if self._busy.acquire(timeout=seconds):
            self._busy.release()
