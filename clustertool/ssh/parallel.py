"""This module runs one call per item in parallel. Every item ends in `ok` or in `failed`, and the caller can be interrupted.

The work runs in daemon threads: a thread that blocks (a frozen name server, a dead disk) is abandoned and never keeps
the interpreter alive. A ClustertoolError belongs to its item; any other exception is a bug and is raised in the caller.
"""

from __future__ import annotations

import functools
import queue
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from clustertool.errors import ClustertoolError, Unreachable, raise_all

T = TypeVar("T")
R = TypeVar("R")

WIDTH = 128
SLICE = 0.05  # seconds between two calls of `check`
_FILES_PER_ITEM = 4  # a connection, its lookups, a pipe to a child
_FILES_OURS = 64
_ENOUGH_FILES = 16384


@dataclass
class Gathered(Generic[R]):
    """What came back: results and failures by the items' keys (index or mapping key), in the items' order."""

    ok: dict[int, R] = field(default_factory=dict)
    failed: dict[int, ClustertoolError] = field(default_factory=dict)

    def all(self) -> dict[int, R]:
        """Return the results if nothing failed; else raise the one failure, or all of them as Several."""
        raise_all(list(self.failed.values()))
        return self.ok


def each(
    items: Mapping[int, T] | Sequence[T],
    do: Callable[[T], R],
    *,
    width: int | None = None,
    timeout: float | None = None,
    check: Callable[[], None] | None = None,
) -> Gathered[R]:
    """Run `do` for every item in threads, at most `width` at a time, and gather results and failures.

    Items that have not ended after `timeout` seconds have failed as Unreachable. `check` is called about every 50 ms; what it
    raises ends the wait, as does an exception that is no ClustertoolError.
    """
    work = ParallelWork(items, do, width)
    try:
        work.wait(timeout, check)
    finally:
        work.abandon()
    return work.gathered(timeout)


_idle: deque[queue.SimpleQueue[Callable[[], None]]] = deque()  # the inboxes of threads that wait for more


def in_background(job: Callable[[], None]) -> None:
    """Start the job in an idle thread, else in a new one, and return at once.

    A new thread takes 0.3 ms, and a command asks 64 nodes five times.
    """
    try:
        _idle.pop().put(job)
    except IndexError:
        threading.Thread(target=_worker, args=(job,), name="fanout", daemon=True).start()


def _worker(job: Callable[[], None]) -> None:
    """Run a job, then those that in_background() hands to this thread, without an end."""
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    while True:
        job()
        _idle.append(inbox)
        job = inbox.get()


@functools.lru_cache(maxsize=1)
def raise_file_limit() -> None:
    """Raise this process's limit of open files, to 16384 at most: every node keeps one, and 1024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _width(wanted: int | None) -> int:
    """Return the number of threads: `wanted`, else 128, but no more than the limit of open files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(1, min(wanted or WIDTH, (files - _FILES_OURS) // _FILES_PER_ITEM))


class ParallelWork(Generic[T, R]):
    """Calls that run in threads, from now on: their queue, their results and the one condition that all threads share."""

    def __init__(self, items: Mapping[int, T] | Sequence[T], do: Callable[[T], R], width: int | None = None) -> None:
        pairs: list[tuple[int, T]] = list(items.items()) if isinstance(items, Mapping) else list(enumerate(items))
        self._do = do
        self._keys = [key for key, _ in pairs]
        self._last_at = 0.0  # when an item ended last
        self._queue = deque(pairs)
        self._left = len(pairs)
        self._ok: dict[int, R] = {}
        self._failed: dict[int, ClustertoolError] = {}
        self._bug: BaseException | None = None
        self._changed = threading.Condition()
        for _ in range(min(len(pairs), _width(width))):
            in_background(self._loop)

    def _loop(self) -> None:
        """Take items and store their results or errors, until the queue is empty: a worker's thread."""
        while True:
            try:
                key, item = self._queue.popleft()
            except IndexError:
                return
            result: R | None = None
            failure: BaseException | None = None
            try:
                result = self._do(item)
            except BaseException as error:  # noqa: BLE001 - a bug belongs to the caller, with its traceback
                failure = error
            with self._changed:
                if failure is None:
                    self._ok[key] = cast(R, result)
                elif isinstance(failure, ClustertoolError):
                    self._failed[key] = failure
                else:
                    self._bug = self._bug or failure
                self._left -= 1
                self._last_at = time.monotonic()
                if not self._left or self._bug:
                    self._changed.notify_all()

    def wait(self, timeout: float | None, check: Callable[[], None] | None, lag: float | None = None) -> None:
        """Wait until all items have ended, or for `timeout` seconds; call `check` meanwhile.

        Raises what `check` raises, and an exception of an item that is no ClustertoolError.

        lag: if an item is ok, return when none has ended for so many seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if check:
                check()
            with self._changed:
                if self._bug:
                    raise self._bug
                left = SLICE if end is None else min(SLICE, end - time.monotonic())
                if not self._left or left <= 0:
                    return
                if lag is not None and self._ok and time.monotonic() - self._last_at > lag:
                    return
                self._changed.wait(left)

    def abandon(self) -> None:
        """Start no more items. Those that run may end or not; no thread waits for them."""
        self._queue.clear()

    def pending(self) -> list[int]:
        """List the keys of the items that have not ended."""
        with self._changed:
            return [key for key in self._keys if key not in self._ok and key not in self._failed]

    def gathered(self, timeout: float | None = None) -> Gathered[R]:
        """Return the results and failures so far. Items that have not ended have failed as Unreachable."""
        late = Unreachable(f"no answer within {timeout:g} s" if timeout is not None else "no answer")
        with self._changed:  # a thread that was given up may still answer: that changes nothing any more
            ok = {key: self._ok[key] for key in self._keys if key in self._ok}
            failed = {key: self._failed.get(key, late) for key in self._keys if key not in ok}
        return Gathered(ok, failed)
