"""A disk worker is a thread that does one thing after another that may wait for a slow disk."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import Any, Callable, Optional, Tuple


class DiskWorker:
    """put() for each call, end() once. The thread starts with the first call."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Optional[Tuple[Callable[..., None], Any]]] = SimpleQueue()
        self._thread: Optional[Thread] = None

    @property
    def waiting(self) -> int:
        return self._calls.qsize()

    def put(self, work: Callable[..., None], *arguments: object) -> bool:
        """Queue a call.

        False where no thread can start: the user may have no process to spare, and a later call tries again.
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
        """End the thread after the calls that it has, and the `last` ones. Waits for that, `patience` seconds at most.

        Without a thread there was no call, and nothing that the last ones could end.
        """
        if self._thread is not None:
            for work in last:
                self._calls.put((work, ()))
            self._calls.put(None)
            self._thread.join(patience)

    def _run(self) -> None:
        for work, arguments in iter(self._calls.get, None):
            work(*arguments)
