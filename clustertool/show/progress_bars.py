"""Show the progress of work: bars on a terminal, a plain line every two seconds otherwise, and one line at the end.

Reports of nodes only change numbers under a lock, so they may come thousands of times a second from any thread; what is
drawn is computed when it is drawn. Sizes are decimal, as networks and disks are sold.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clustertool.model.quantities import human_bytes, human_seconds
from clustertool.show.table import fold
from clustertool.show.terminal import Terminal

_FEW = 8  # so many nodes get a bar each
_PERIOD = 2.0  # seconds between plain lines
_WINDOW = 5.0  # seconds over which the rate is taken
_STATES = ("done", "receiving", "waiting", "failed")
_STYLES = {"done": "green", "failed": "red", "waiting": "dim"}


class Sending:
    """How far the uplink and each node are. Not thread-safe and without a clock: DispatchProgress brings both."""

    def __init__(self, names: Iterable[str]) -> None:
        self.state = dict.fromkeys(names, "waiting")
        self.got = dict.fromkeys(self.state, 0)
        self.size = dict.fromkeys(self.state, 0)
        self.why: dict[str, str] = {}
        self.sent = self.planned = 0

    def uplink(self, sent: int, planned: int) -> None:
        self.sent, self.planned = sent, max(sent, planned)

    def node(self, name: str, got: int, size: int) -> None:
        self.state[name] = "receiving"
        self.got[name], self.size[name] = got, size

    def done(self, name: str) -> None:
        self.state[name] = "done"

    def failed(self, name: str, why: str) -> None:
        self.state[name] = "failed"
        self.why[name] = why

    def named(self, state: str) -> list[str]:
        return [name for name, its in self.state.items() if its == state]

    def folded(self) -> list[tuple[str, str]]:
        """(state, folded names) of the states that some node is in."""
        found = ((state, self.named(state)) for state in _STATES)
        return [(state, fold(names)) for state, names in found if names]

    def summary(self, seconds: float, broken: bool, between: int = 0) -> str:
        """The last line."""
        done, failed, took = self.named("done"), self.named("failed"), human_seconds(seconds)
        if broken:
            text = f"stopped after {took}, {len(done)} of {_nodes(len(self.state))} done"
        elif not done:
            text = f"no node done after {took}"
        elif not self.sent:
            text = f"nothing to send, {_nodes(len(done))} ready in {took}"
        else:
            moved = f"{human_bytes(self.sent)} over the uplink"
            moved += f", {human_bytes(between)} between nodes" if between else ""
            text = f"{moved}, {_nodes(len(done))} ready in {took}"
        return f"{text}, failed: {fold(failed)}" if failed else text


@final
class DispatchProgress:
    """Shows a dispatch while it lasts:

    with DispatchProgress(terminal, names) as progress:
        progress.uplink(sent=4 << 20, planned=25 << 20)
        progress.node("node1", got=4 << 20, size=25 << 20)
        progress.done("node1")
        progress.failed("node2", "disk full")
    """

    def __init__(
        self,
        terminal: Terminal,
        names: Sequence[str],
        *,
        label: str = "dispatch",
        clock: Callable[[], float] = time.monotonic,
        since: float | None = None,
    ) -> None:
        self._terminal = terminal
        self._label = label
        self._clock = clock
        self._lock = threading.Lock()
        self._sending = Sending(names)
        self._samples: deque[tuple[float, float]] = deque()
        self._since = since
        self._start = self._printed_at = 0.0
        self._live: Live | None = None
        self.between = 0  # bytes from node to node, known at the end

    def __enter__(self) -> DispatchProgress:
        self._printed_at = self._clock()
        self._start = self._printed_at if self._since is None else self._since
        self._samples.append((self._start, 0.0))
        if self._terminal.is_terminal:
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            try:
                self._live.stop()
            finally:
                self._terminal.divert(None)
        with self._lock:
            text = self._sending.summary(self._clock() - self._start, error is not None, self.between)
        self._terminal.line(f"{self._label}: {text}")

    def uplink(self, sent: int, planned: int) -> None:
        """Bytes that left this machine, and how many it will be."""
        with self._lock:
            self._sending.uplink(sent, planned)
        self._tell()

    def node(self, name: str, got: int, size: int) -> None:
        """`name` has `got` of `size` bytes now."""
        with self._lock:
            self._sending.node(name, got, size)
        self._tell()

    def done(self, name: str) -> None:
        with self._lock:
            self._sending.done(name)
        self._tell()

    def failed(self, name: str, why: str) -> None:
        with self._lock:
            self._sending.failed(name, why)
        self._tell()

    def _tell(self) -> None:
        """Without a terminal: at most a line every two seconds."""
        if self._live is not None or self._terminal.is_terminal:
            return
        with self._lock:
            now = self._clock()
            if now - self._printed_at < _PERIOD:
                return
            self._printed_at = now
            sent, total = self._sending.sent, self._sending.planned
            pace = self._pace(now, sent, total)
            nodes = f"{len(self._sending.named('done'))} of {_nodes(len(self._sending.state))}"
        text = f"{_of(sent, total)} over the uplink, {nodes} done, {pace}"
        self._terminal.line(f"{self._label}: {text}")

    def _pace(self, now: float, sent: float, total: float) -> str:
        """Bytes a second over the last seconds, and how long the rest takes."""
        self._samples.append((now, sent))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOW:
            self._samples.popleft()
        then, before = self._samples[0]
        rate = max(0.0, sent - before) / (now - then) if now > then else 0.0
        left = f", {human_seconds((total - sent) / rate)} left" if rate and sent < total else ""
        return f"{human_bytes(rate)}/s{left}"

    def _open(self) -> None:
        console = self._terminal.console()
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._terminal.divert(lambda text: console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True))
        self._live.start(refresh=True)

    def _picture(self) -> RenderableType:
        grid, printable = Table.grid(padding=(0, 2, 0, 0)), self._terminal.printable
        with self._lock:
            for label, done, total, note in self._bars():
                grid.add_row(*_bar(printable(label), done, total, printable(note)))
            states = self._sending.folded() if len(self._sending.state) > _FEW else []
        below = [_states([(state, printable(names)) for state, names in states])] if states else []
        return Group(grid, *below)

    def _bars(self) -> list[tuple[str, float, float, str]]:
        """(label, done, total, note) of every bar to draw."""
        sending, now = self._sending, self._clock()
        sent, total = float(sending.sent), float(sending.planned)
        pace = self._pace(now, sent, total)
        bars = [("uplink", sent, total, f"{_of(sent, total)}, {pace}" if total else "")]
        done, count = len(sending.named("done")), len(sending.state)
        bars.append(("nodes", done, count, f"{done} of {count}"))
        if count <= _FEW:
            for name, state in sending.state.items():
                got, size = float(sending.got[name]), float(sending.size[name])
                note = _of(got, size) if state == "receiving" else f"{state} {sending.why.get(name, '')}".rstrip()
                bars.append((name, 1.0 if state == "done" else got, 1.0 if state == "done" else size, note))
        return bars


def _of(sent: float, total: float) -> str:
    return f"{human_bytes(sent)} of {human_bytes(total)}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _bar(label: str, done: float, total: float, note: str) -> tuple[RenderableType, ...]:
    bar = ProgressBar(total=total or 1, completed=done, width=24, complete_style="cyan", finished_style="green")
    return Text(label), bar, Text(note, no_wrap=True, overflow="crop")


def _states(states: Sequence[tuple[str, str]]) -> RenderableType:
    text = Text(no_wrap=True, overflow="crop")
    for index, (state, names) in enumerate(states):
        text.append(", " if index else "").append(names).append(f" {state}", _STYLES.get(state, ""))
    return text


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
        self._begun = self._printed_at = 0.0

    def __enter__(self) -> Bar:
        self._printed_at = self._clock()
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
        elif now - self._printed_at >= _PERIOD:
            self._printed_at = now
            self._terminal.line(f"{self._label}: {phase}, {_of(done, total)}{self._left(now, done, total)}")

    def _left(self, now: float, done: int, total: int) -> str:
        """The time that this phase still takes, once it can be known."""
        passed = now - self._begun
        return f", {human_seconds(passed * (total - done) / done)} left" if passed > 1 and 0 < done < total else ""


def _progress(terminal: Terminal) -> Progress:
    texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}")]
    columns = (texts[0], BarColumn(24), texts[1])
    return Progress(*columns, console=terminal.console(), transient=True, redirect_stdout=False, redirect_stderr=False)
