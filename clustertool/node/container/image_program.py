"""Run programs that take minutes on an image: they end when their result is not wanted any more, and no process stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from typing import BinaryIO, Callable, Optional, Sequence, Tuple

from clustertool.errors import DispatchError
from clustertool.node.system import processes, programs
from clustertool.node.system.node_context import step

_SLICE = 0.1  # seconds between two calls of `check`
_BEAT = 1.0  # seconds between two reports of progress
_GRACE = 10.0  # seconds for a runtime to remove what is not complete, before it is killed
_USER_OF_URL = re.compile(r"://[^/\s@]*@")

Stream = Callable[[BinaryIO], None]


def require_wanted() -> None:
    """Raise DispatchError if this thread's result is not wanted any more, as after the end of the laptop's connection."""
    if getattr(threading.current_thread(), "unwanted", False):
        step()


def run(
    argv: Sequence[str],
    check: Callable[[], None] = require_wanted,
    feed: Optional[Stream] = None,
    drain: Optional[Stream] = None,
) -> str:
    """Run a program, and return its stdout.

    Raises what `check` raises, and DispatchError if it cannot start, or fails: with the last line of its stderr. The program
    has ended by then. check: called ten times a second. feed writes its stdin, or drain reads its stdout, in a thread. In a
    thread of the agent there is progress as long as the program reads, writes or computes.
    """
    inner = outer = -1  # of the stream: the program's end, and ours
    if feed:
        inner, outer = os.pipe()
    elif drain:
        outer, inner = os.pipe()
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    stdin, stdout = inner if feed else null, inner if drain else pipe
    try:
        child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=pipe, cwd="/", start_new_session=True)
    except OSError as error:
        for fd in (inner, outer) if outer >= 0 else ():
            os.close(fd)
        raise DispatchError(f"{argv[0]} cannot start: {error.strerror}", "") from None
    stream = None
    if outer >= 0:
        os.close(inner)
        stream = _StreamThread(feed or drain, os.fdopen(outer, "wb" if feed else "rb"))
    try:
        out, err = _communicate(child, check)
    finally:
        _end(child)
        if stream is not None:
            stream.join()
    if feed and stream is not None:
        stream.require()
    if child.returncode:
        name = " ".join([os.path.basename(argv[0]), *argv[1:2]])
        raise DispatchError(f"{name}: {_last_line(err) or f'exit code {child.returncode}'}", "")
    if stream is not None:
        stream.require()
    return (out or b"").decode(errors="replace")


class _StreamThread(threading.Thread):
    """A thread that reads or writes a stream of a program. require() raises its error, except for a closed stream."""

    def __init__(self, work: Optional[Stream], file: BinaryIO) -> None:
        super().__init__(daemon=True)
        self._error: Optional[Exception] = None
        self._work, self._file = work, file
        self.start()

    def run(self) -> None:
        """Call the work with the stream, keep its error, and close the stream."""
        try:
            if self._work is not None:
                self._work(self._file)
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    def require(self) -> None:
        """Raise the error of the stream, unless the program has closed it."""
        if self._error is not None and not isinstance(self._error, BrokenPipeError):
            raise self._error


def _communicate(child: subprocess.Popen[bytes], check: Callable[[], None]) -> Tuple[Optional[bytes], bytes]:
    """Wait for the program, and return its stdout (None if it is drained) and stderr.

    Calls check() and reports progress meanwhile.
    """
    before, beat = "", 0.0
    while True:
        try:
            return child.communicate(timeout=_SLICE)
        except subprocess.TimeoutExpired:
            check()
            if time.monotonic() - beat > _BEAT:
                beat, now = time.monotonic(), _activity(child.pid)
                if now != before:
                    step()
                before = now


def _activity(pid: int) -> str:
    """Return a text that changes when the program or one of its children has read or written, or when it cannot be known."""
    pids = (pid, *(process.pid for process in processes.descendants(pid)))
    found = b"".join(processes.try_read(f"/proc/{each}/io") for each in pids)
    return found.decode() or str(time.monotonic())  # those of a helper with the rights of root cannot be read


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a program that still runs by TERM, after 10 s by KILL; then KILL what is left of its session, and close its pipes.

    A runtime that gets TERM removes what it has not completed.
    """
    if child.poll() is None:
        programs.signal_session(child, signal.SIGTERM, _GRACE)
    programs.signal_session(child, signal.SIGKILL, 1.0)
    for file in (child.stdout, child.stderr):
        if file:
            file.close()


def _last_line(text: bytes) -> str:
    """Return the last line of an error, without the user and password of a URL."""
    lines = text.decode(errors="backslashreplace").strip().splitlines()
    return _USER_OF_URL.sub("://", lines[-1])[:2000] if lines else ""
