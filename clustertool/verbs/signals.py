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
import time
from collections.abc import Callable
from types import FrameType

from clustertool.errors import Interrupted, Terminated
from clustertool.model.hints import PROGRAM, fill_program
from clustertool.model.rank_signals import FOR_RANKS, in_step
from clustertool.show.program_name import commanded

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
STOPS = (Interrupted, Terminated)  # what check() raises
_FIX = f"{PROGRAM} stop ends what may still run on the nodes; {PROGRAM} jobs lists it"


class _Count:
    """The signals since the program started, counted by kind, and what the program does now: a verb, a question, a job."""

    def __init__(self) -> None:
        self.ints = 0
        self.terms = 0
        self.hups = 0
        self.for_ranks: list[int] = []  # signals to pass on to the ranks on this machine
        self.working = False  # a verb is running and calls check()
        self.asking = False  # it waits for a password and cannot call check()
        self.job = ""  # the running job, for the last message
        # Prints a line for the user.
        self.note: Callable[[str], None] = lambda text: print(_with_program_name(text), file=sys.stderr)

    @property
    def total(self) -> int:
        return self.ints + self.terms + self.hups


count = _Count()


def install() -> None:
    """Install the handlers of SIGINT, SIGTERM, SIGHUP and the signals for ranks, except where a host program has its own.

    At the exit of the program they are ignored: see _ignore_signals(). Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) == default:
            signal.signal(number, _on_signal)
    for for_ranks in FOR_RANKS:
        if signal.getsignal(for_ranks) == signal.SIG_DFL:
            signal.signal(for_ranks, _on_signal_for_ranks)
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP, at the exit of the program, when everything is printed.

    The interpreter removes handlers while it ends, and a late Ctrl+C would change the exit code.
    """
    for number in _DEFAULTS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise Interrupted if a SIGINT has come, Terminated for a SIGTERM, or for a SIGHUP while no job runs."""
    if count.ints:
        raise Interrupted("Ctrl+C", _FIX if count.job else "")
    if count.terms:
        raise Terminated("SIGTERM", _FIX if count.job else "")
    if count.hups and not count.job:
        raise Terminated("the terminal was closed (SIGHUP)")


def pause(seconds: float) -> None:
    """Wait for some seconds; raise what check() raises if a signal comes before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(0.02)


def _with_program_name(text: str) -> str:
    """Replace the placeholder of the program in a text by the name that the user has typed."""
    return fill_program(text, commanded())


def _on_signal_for_ranks(number: int, frame: FrameType | None) -> None:
    """Store the number of a signal for the ranks, except in a step of a scheduler, which signals the ranks itself."""
    if not in_step(os.environ):
        count.for_ranks.append(number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Count a signal; exit at once if no verb runs, or at the third Ctrl+C; raise Interrupted for Ctrl+C at a password."""
    count.ints += number == signal.SIGINT
    count.terms += number == signal.SIGTERM
    count.hups += number == signal.SIGHUP
    if not count.working:
        os._exit(128 + number)  # whatever the interpreter is in the middle of
    if number != signal.SIGINT:
        return
    if count.asking:
        raise Interrupted("Ctrl+C", _FIX if count.job else "")
    if count.ints >= 3:
        job = f" job {count.job} may still run: {PROGRAM} stop --job {count.job} ends it everywhere." * bool(count.job)
        text = f"\nclustertool: left at once.{job}\nclustertool: exit 130 (tool): Ctrl+C\n"
        os.write(2, _with_program_name(text).encode())
        os._exit(130)
