"""The saver writes the pieces of a dispatch to the disk in a thread: each one as it arrives, then the manifest.

So little is left to write after the last piece, and a slow disk does not delay what the relay sends to others.
"""

from __future__ import annotations

import functools
from queue import SimpleQueue
from threading import Thread
from typing import Callable, Iterable, Optional

from clustertool.node.storage.release_store import Store


class PieceSaver:
    """add() names of pieces in the store, then finish() once. `over`: all is on the disk, or `error` is the reason why not.

    After an error nothing more is written: a release is named only if each of its pieces is on the disk.
    """

    def __init__(self, store: Store) -> None:
        self.error: Optional[OSError] = None
        self.begun = self.over = False  # begun: finish() was called
        self._store = store
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Optional[Thread] = None

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self._put(functools.partial(self._store.sync, name))

    def finish(self, release: str, manifest: bytes) -> None:
        """All pieces of the release are there: name it."""
        self.begun = True
        self._put(functools.partial(self._store.complete, release, manifest))
        self._put(self._end)

    def _put(self, work: Callable[[], None]) -> None:
        """For the thread; done at once where no thread can start (the user may have no process to spare)."""
        try:
            if self._thread is None:
                thread = Thread(target=self._work, daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:
            self._do(work)
        else:
            self._queue.put(work)

    def _work(self) -> None:
        while not self.over:
            self._do(self._queue.get())

    def _do(self, work: Callable[[], None]) -> None:
        try:
            if self.error is None or work == self._end:
                work()
        except OSError as error:
            self.error = error

    def _end(self) -> None:
        self.over = True
