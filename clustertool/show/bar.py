"""One piece of work of known size is a bar on a terminal, a line now and then elsewhere; who did it says the last word."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

from rich.progress import BarColumn, Progress, TextColumn

from clustertool.show.progress_bars import human_bytes, human_seconds
from clustertool.show.terminal import Terminal

_PERIOD = 2.0  # seconds between plain lines


@final
class Bar:
    """Shows work in phases, each of so many bytes; the current one is drawn:

    with Bar(terminal, "split") as bar:
        bar.tell("writing", done=4 << 20, total=25 << 20)
    """

    def __init__(self, terminal: Terminal, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._label = label
        self._clock = clock
        self._progress: Progress | None = None
        self._task: Any = None
        self._phase = ""
        self._begun = self._told = 0.0

    def __enter__(self) -> Bar:
        self._told = self._clock()
        if self._terminal.is_terminal:
            self._progress = _progress(self._terminal)
            self._task = self._progress.add_task(self._label, total=None, note="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def tell(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        if phase != self._phase:
            self._phase, self._begun = phase, now
        if self._progress is not None:
            note = f"{_of(done, total)}{self._left(now, done, total)}"
            self._progress.update(
                self._task, description=f"{self._label}: {phase}", completed=done, total=total, note=note
            )
        elif now - self._told >= _PERIOD:
            self._told = now
            self._terminal.line(f"{self._label}: {phase}, {_of(done, total)}{self._left(now, done, total)}")

    def _left(self, now: float, done: int, total: int) -> str:
        """The time that this phase still takes, once it can be known."""
        passed = now - self._begun
        return f", {human_seconds(passed * (total - done) / done)} left" if passed > 1 and 0 < done < total else ""


def _progress(terminal: Terminal) -> Progress:
    texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}")]
    columns = (texts[0], BarColumn(24), texts[1])
    return Progress(*columns, console=terminal.console(), transient=True, redirect_stdout=False, redirect_stderr=False)


def _of(done: int, total: int) -> str:
    return f"{human_bytes(done)} of {human_bytes(total)}"
