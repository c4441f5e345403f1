"""This module counts signals: the first Ctrl+C stops with grace, the second at once, the third exits.

The handler only counts; waiting code calls check() regularly. It is installed by the first import of the verbs, so that a
Ctrl+C while the tool still loads ends it with 130 and without a traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from clustertool.errors import Interrupted, Terminated

_FIX = "inv stop ends what may still run on the nodes; inv jobs lists it"


class _Count:
    """How often each signal came since the program started, and what is being done about it."""

    def __init__(self) -> None:
        self.ints = 0
        self.terms = 0
        self.hups = 0
        self.working = False  # a verb is running and calls check()
        self.asking = False  # it waits for a password and cannot call check()
        self.job = ""  # the running job, for the last message
        self.note: Callable[[str], None] = lambda text: print(text, file=sys.stderr)  # a line for the user


count = _Count()


def install() -> None:
    """Take SIGINT, SIGTERM and SIGHUP, unless a host program has its own handlers."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_int)
    for number, handler in ((signal.SIGTERM, _on_term), (signal.SIGHUP, _on_hup)):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, handler)
    atexit.register(_deaf)


def _deaf() -> None:
    """Everything is printed. The interpreter removes handlers while it ends, and a late Ctrl+C would change the exit code."""
    for number, handler in ((signal.SIGINT, _on_int), (signal.SIGTERM, _on_term), (signal.SIGHUP, _on_hup)):
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise Interrupted or Terminated once a signal came."""
    if count.ints:
        raise Interrupted("Ctrl+C", _FIX if count.job else "")
    if count.terms:
        raise Terminated("SIGTERM", _FIX if count.job else "")
    if count.hups and not count.job:
        raise Terminated("the terminal was closed (SIGHUP)")


def _on_int(number: int, frame: FrameType | None) -> None:
    count.ints += 1
    if not count.working:
        _leave(130, "")
    if count.asking:
        raise Interrupted("Ctrl+C", _FIX if count.job else "")
    if count.ints >= 3:
        job = f" job {count.job} may still run: inv stop --job {count.job} ends it everywhere." if count.job else ""
        _leave(130, f"left at once.{job}")


def _on_term(number: int, frame: FrameType | None) -> None:
    count.terms += 1
    if not count.working:
        _leave(143, "")


def _on_hup(number: int, frame: FrameType | None) -> None:
    count.hups += 1
    if not count.working:
        _leave(129, "")


def _leave(code: int, text: str) -> None:
    if text:
        os.write(2, f"\nclustertool: {text}\nclustertool: exit {code} (tool): Ctrl+C\n".encode())
    os._exit(code)  # whatever the interpreter is in the middle of
