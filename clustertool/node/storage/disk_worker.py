"""A disk worker is a thread that does one thing after another that may wait for a slow disk."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import Any, Callable, Optional, Tuple


class DiskWorker:
    """A thread that carries out calls in their order. Call put() for each, and end() once. It starts with the first call."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Optional[Tuple[Callable[..., None], Any]]] = SimpleQueue()
        self._thread: Optional[Thread] = None

    @property
    def waiting(self) -> int:
        """The number of queued calls."""
        return self._calls.qsize()

    def put(self, work: Callable[..., None], *arguments: object) -> bool:
        """Queue work(*arguments) for the thread, which is started if there is none. Return False if the thread cannot start.

        The call is then not queued. The user may have no process to spare, and a later call tries again.
        """
        if self._thread is None:
            thread = Thread(target=self._run, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        self._calls.put((work, arguments))
        return True

    def end(self, patience: float = 0.0, *last: Callable[[], None]) -> None:
        """Queue the `last` calls and the end of the thread, and wait up to `patience` seconds for it.

        Without a thread nothing is called: no call was queued, so the last ones have nothing to end.
        """
        if self._thread is not None:
            for work in last:
                self._calls.put((work, ()))
            self._calls.put(None)
            self._thread.join(patience)

    def _run(self) -> None:
        """Carry out the queued calls in their order, until the end."""
        for work, arguments in iter(self._calls.get, None):
            work(*arguments)
