"""This module reports the progress of run() and wait(): values for a program, and a bar in a notebook.

IPython is used if the program runs in its kernel; it is never imported here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Protocol, cast

_PERIOD = 0.25  # seconds between two updates of a bar


@dataclass(frozen=True)
class Progress:
    """How far run() or wait() is. phase: check, dispatch, start, queued, running, or ended. text: a description of that moment.

    done, total: bytes in the phase dispatch, else processes. total is 0 where it is not known.
    """

    phase: str
    done: int = 0
    total: int = 0
    text: str = ""

    def _repr_html_(self) -> str:
        known = f' value="{self.done}" max="{self.total}"' if self.total else ""
        bar = "" if self.phase == "ended" else f'<progress{known} style="width: 20em"></progress> '
        return f"<div>{bar}{escape(self.text)}</div>"


Listener = Callable[[Progress], None]


class _Handle(Protocol):
    def update(self, value: object) -> None: ...


def listener(given: Listener | None) -> Listener | None:
    """Choose what gets the progress: the program's own function, else a bar in a notebook, else nothing."""
    display = None if given is not None else _display_function()
    return given if display is None else _Bar(display)


def _display_function() -> Callable[..., _Handle | None] | None:
    """Find IPython's function display(); None where no notebook or other front end of a kernel shows what it gets."""
    ipython, shown = sys.modules.get("IPython"), sys.modules.get("IPython.display")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or shown is None or not hasattr(shell, "kernel"):  # a terminal's IPython would print
        return None
    return cast("Callable[..., _Handle | None]", shown.display)


class _Bar:
    """A display of a notebook that is replaced by each update. It is made with the first one."""

    def __init__(self, display: Callable[..., _Handle | None]) -> None:
        self._display = display
        self._handle: _Handle | None = None
        self._lock = threading.Lock()
        self._shown = Progress("")
        self._at = 0.0

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            now = time.monotonic()
            last = 0 < progress.total <= progress.done  # of its phase, nothing would replace what was shown before
            soon = progress.phase == self._shown.phase and now - self._at < _PERIOD
            if progress == self._shown or (soon and not last):
                return
            self._shown, self._at = progress, now
            if self._handle is None:
                self._handle = self._display(progress, display_id=True)
            else:
                self._handle.update(progress)
