"""Show the progress of work: bars on a terminal, a plain line every two seconds otherwise, and one line at the end.

Reports of nodes only change numbers under a lock, so they may come thousands of times a second from any thread; what is
drawn is computed when it is drawn. Sizes are decimal, as networks and disks are sold.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clustertool.model.config.folded_names import fold
from clustertool.model.quantities import count, human_bytes, human_seconds
from clustertool.show.table import rich_console
from clustertool.show.terminal import Terminal

Clock = Callable[[], float]
_FEW = 8  # so many nodes get a bar each
_PERIOD = 2.0  # seconds between plain lines
_WINDOW = 5.0  # seconds over which the rate is taken
_STYLES = {"done": "green", "receiving": "", "waiting": "dim", "failed": "red"}  # of the states of a node
# What is drawn is removed at the end, and the Terminal writes lines above it.
_DRAWN: Any = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}


class _Picture:
    """A picture on a terminal, drawn again eight times a second from open() to close(). Without a terminal there is none."""

    def __init__(self, terminal: Terminal, draw: Callable[[], RenderableType]) -> None:
        self._terminal, self._draw = terminal, draw
        self._live: Live | None = None

    def open(self) -> None:
        """Start to draw on a terminal, where lines of the Terminal are printed above from now on."""
        if not self._terminal.is_terminal:
            return
        console = rich_console(self._terminal)
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=8, vertical_overflow="crop", **_DRAWN
        )
        self._terminal.divert(lambda text: console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True))
        self._live.start(refresh=True)

    def close(self) -> None:
        """Stop drawing, remove the picture, and let the Terminal write its lines by itself again."""
        if self._live is not None:
            try:
                self._live.stop()
            finally:
                self._terminal.divert(None)


@dataclass
class _Node:
    """How far one node is: `got` of `size` bytes; `why` it failed."""

    state: str = "waiting"
    got: int = 0
    size: int = 0
    why: str = ""


@final
class DispatchProgress:
    """A display of a dispatch, from the start to the end of its context:

    with DispatchProgress(terminal, names) as progress:
        progress.uplink(sent=4 << 20, planned=25 << 20)
        progress.node("node1", got=4 << 20, size=25 << 20)
        progress.done("node1")
        progress.failed("node2", "disk full")

    answers: its lines are the answer of the command, on stdout; else they are notes.
    """

    def __init__(
        self,
        terminal: Terminal,
        names: Sequence[str],
        clock: Clock = time.monotonic,
        since: float | None = None,
        answers: bool = True,
    ) -> None:
        self._terminal, self._clock = terminal, clock
        self._print = terminal.line if answers else terminal.note
        self._lock = threading.Lock()
        self._nodes = {name: _Node() for name in names}
        self._sent = self._planned = 0
        self._samples: deque[tuple[float, float]] = deque()
        self._printed_at = clock()
        self._start = self._printed_at if since is None else since
        self._picture = _Picture(terminal, self._draw)
        self.between = 0  # bytes from node to node, known at the end

    def __enter__(self) -> DispatchProgress:
        self._samples.append((self._start, 0.0))
        self._picture.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._picture.close()
        with self._lock:
            text = self._summary(self._clock() - self._start, kind is not None)
        self._print(f"dispatch: {text}")

    def uplink(self, sent: int, planned: int) -> None:
        """Store how many bytes have left this machine, and how many it will be.

        Without a terminal a line is printed, at most every two seconds.
        """
        with self._lock:
            self._sent, self._planned = sent, max(sent, planned)
        self._print_progress()

    def node(self, name: str, got: int, size: int) -> None:
        """Store that a node has `got` of `size` bytes."""
        self._set_node(name, _Node("receiving", got, size))

    def done(self, name: str) -> None:
        """Mark a node as done."""
        self._set_node(name, _Node("done"))

    def failed(self, name: str, why: str) -> None:
        """Mark a node as failed, with the reason."""
        self._set_node(name, replace(self._nodes[name], state="failed", why=why))

    def _set_node(self, name: str, node: _Node) -> None:
        """Replace the state of a node, and print a line of progress as _print_progress() does."""
        with self._lock:
            self._nodes[name] = node
        self._print_progress()

    def _nodes_in(self, state: str) -> list[str]:
        """List the names of nodes in a state."""
        return [name for name, node in self._nodes.items() if node.state == state]

    def _summary(self, seconds: float, broken: bool) -> str:
        """Format the last line of a dispatch: bytes, nodes that are ready, nodes that have failed.

        broken: it ended by an exception.
        """
        done, failed, took = self._nodes_in("done"), self._nodes_in("failed"), human_seconds(seconds)
        if broken:
            text = f"stopped after {took}, {len(done)} of {count(len(self._nodes), 'node')} done"
        elif not done:
            text = f"no node done after {took}"
        elif not self._sent and not self.between:
            text = f"nothing to send, {count(len(done), 'node')} ready in {took}"
        else:
            between = f", {human_bytes(self.between)} between nodes" if self.between else ""
            moved = f"{human_bytes(self._sent)} over the uplink{between}"
            text = f"{moved}, {count(len(done), 'node')} ready in {took}"
        return f"{text}, failed: {fold(failed)}" if failed else text

    def _print_progress(self) -> None:
        """Print a line with the progress if there is no terminal and the last line is two seconds old."""
        if self._terminal.is_terminal:
            return
        with self._lock:
            now = self._clock()
            if now - self._printed_at < _PERIOD:
                return
            self._printed_at = now
            nodes = f"{len(self._nodes_in('done'))} of {count(len(self._nodes), 'node')}"
            text = f"{_of(self._sent, self._planned)} over the uplink, {nodes} done, {self._pace(now)}"
        self._print(f"dispatch: {text}")

    def _pace(self, now: float) -> str:
        """Format the rate over the last five seconds, and the time that the rest takes at this rate. Adds a sample."""
        sent, total = self._sent, self._planned
        self._samples.append((now, sent))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOW:
            self._samples.popleft()
        then, before = self._samples[0]
        rate = max(0.0, sent - before) / (now - then) if now > then else 0.0
        left = f", {human_seconds((total - sent) / rate)} left" if rate and sent < total else ""
        return f"{human_bytes(rate)}/s{left}"

    def _draw(self) -> RenderableType:
        """Draw bars for the uplink and all nodes, and one for each of up to eight nodes, else their folded names by state."""
        printable, few = self._terminal.printable, len(self._nodes) <= _FEW
        grid, states = Table.grid(padding=(0, 2, 0, 0)), Text(no_wrap=True, overflow="crop")
        with self._lock:
            done, number, pace = len(self._nodes_in("done")), len(self._nodes), self._pace(self._clock())
            uplink = f"{_of(self._sent, self._planned)}, {pace}" if self._planned else ""
            grid.add_row(*_bar("uplink", self._sent, self._planned, uplink))
            grid.add_row(*_bar("nodes", done, number, f"{done} of {number}"))
            for name, node in self._nodes.items() if few else ():
                note = _of(node.got, node.size) if node.state == "receiving" else f"{node.state} {node.why}".rstrip()
                got, size = (1, 1) if node.state == "done" else (node.got, node.size)
                grid.add_row(*_bar(printable(name), got, size, printable(note)))
            folded = [(state, fold(self._nodes_in(state))) for state in _STYLES if self._nodes_in(state)]
        for state, names in () if few else folded:
            states.append(", " if states else "").append(printable(names)).append(f" {state}", _STYLES[state])
        return Group(grid, *([states] if states else []))


def _of(sent: float, total: float) -> str:
    """Format a number of bytes and their total: `4 MB of 25 MB`."""
    return f"{human_bytes(sent)} of {human_bytes(total)}"


def _bar(label: str, done: float, total: float, note: str) -> tuple[RenderableType, ...]:
    """Build the cells of a row: label, bar, note."""
    bar = ProgressBar(total=total or 1, completed=done, width=24, complete_style="cyan", finished_style="green")
    return Text(label), bar, Text(note, no_wrap=True, overflow="crop")


@final
class Bar:
    """A display of work in phases, each of so many bytes; the current one is drawn:

    with Bar(terminal, "split") as bar:
        bar.tell("writing", done=4 << 20, total=25 << 20)
    """

    def __init__(self, terminal: Terminal, label: str, clock: Clock = time.monotonic) -> None:
        self._terminal, self._label, self._clock = terminal, label, clock
        self._progress: Progress | None = None
        self._task: Any = None
        self._phase = ""
        self._begun = self._printed_at = 0.0

    def __enter__(self) -> Bar:
        self._printed_at = self._clock()
        if self._terminal.is_terminal:
            texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}")]
            console = rich_console(self._terminal)
            self._progress = Progress(texts[0], BarColumn(24), texts[1], console=console, **_DRAWN)
            self._task = self._progress.add_task(self._label, total=None, note="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def tell(self, phase: str, done: int, total: int) -> None:
        """Show how far a phase is, in bytes: in the bar, or without a terminal as a line every two seconds."""
        now = self._clock()
        if phase != self._phase:
            self._phase, self._begun = phase, now
        if self._progress is not None:
            note, text = f"{_of(done, total)}{self._time_left(now, done, total)}", f"{self._label}: {phase}"
            self._progress.update(self._task, description=text, completed=done, total=total, note=note)
        elif now - self._printed_at >= _PERIOD:
            self._printed_at = now
            self._terminal.line(f"{self._label}: {phase}, {_of(done, total)}{self._time_left(now, done, total)}")

    def _time_left(self, now: float, done: int, total: int) -> str:
        """Format the time that this phase still takes; "" in its first second, before its first byte, and at its end."""
        passed = now - self._begun
        return f", {human_seconds(passed * (total - done) / done)} left" if passed > 1 and 0 < done < total else ""


@final
class NodeProgress:
    """A display of work that each node does by itself, such as loading an image, from the start to the end of its context:

    with NodeProgress(terminal, "load", names) as progress: progress.done("node1"); done() may come from any thread.

    answers: its lines are the answer of the command, on stdout; else they are notes.
    """

    def __init__(self, terminal: Terminal, phase: str, names: Sequence[str], answers: bool = True) -> None:
        self._terminal, self._phase, self._names = terminal, phase, names
        self._print = terminal.line if answers else terminal.note
        self._lock = threading.Lock()
        self._done: list[str] = []
        self._failed: list[str] = []
        self._start = self._printed_at = time.monotonic()
        self._picture = _Picture(terminal, self._draw)

    def __enter__(self) -> NodeProgress:
        self._picture.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._picture.close()
        with self._lock:
            took = human_seconds(time.monotonic() - self._start)
            failed = f", failed: {fold(self._failed)}" if self._failed else ""
            how = "stopped after" if kind is not None else "done in"
            self._print(f"{self._phase}: {self._counted()} {how} {took}{failed}")

    def turn(self) -> None:
        """Print a line every two seconds if there is no terminal. Call it regularly."""
        with self._lock:
            now = time.monotonic()
            if self._terminal.is_terminal or now - self._printed_at < _PERIOD:
                return
            self._printed_at = now
            self._print(f"{self._phase}: {self._counted()} done, {human_seconds(now - self._start)}")

    def done(self, name: str) -> None:
        with self._lock:
            self._done.append(name)

    def failed(self, name: str) -> None:
        with self._lock:
            self._failed.append(name)

    def _counted(self) -> str:
        """Format how many nodes are done: `3 of 8 nodes`."""
        all_ = len(self._names)
        return count(all_, "node") if len(self._done) == all_ else f"{len(self._done)} of {count(all_, 'node')}"

    def _draw(self) -> RenderableType:
        """Draw one bar for all nodes, with the names of those that are not finished."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        with self._lock:
            all_, done = len(self._names), len(self._done)
            left = [name for name in self._names if name not in {*self._done, *self._failed}]
            note = f"{done} of {all_}, {human_seconds(time.monotonic() - self._start)}"
            waits = f"; waiting for {self._terminal.printable(fold(left))}" if left else ""
        grid.add_row(*_bar(self._phase, done, all_, note + waits))
        return grid
