"""What runs beside a loop is a thread of `_thread`: the module threading takes longer to import than most requests run."""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from collections import deque
from typing import Any, Callable, Deque, Iterator


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


class Words:
    """A queue from one thread to one other, which iterates over it and waits for more. None ends the iteration.

    The module queue takes half a millisecond to import.
    """

    def __init__(self) -> None:
        self._waiting: Deque[Any] = deque()
        self._empty = allocate_lock()  # held as long as the reader has to wait
        self._empty.acquire()

    def put(self, word: Any) -> None:
        self._waiting.append(word)
        if self._empty.locked():
            self._empty.release()

    def __iter__(self) -> Iterator[Any]:
        while True:
            while not self._waiting:
                self._empty.acquire()
            word = self._waiting.popleft()
            if word is None:
                return
            yield word

    def __len__(self) -> int:
        return len(self._waiting)
