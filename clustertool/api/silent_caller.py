"""The API is a caller of actions that prints nothing, asks nothing, and takes no signal.

It reports the progress of run() and wait(): values for a program, and a bar in a notebook. IPython is used if the program runs
in its kernel; it is never imported here.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Protocol, cast

from clustertool.api.plain_text import plain
from clustertool.engines.base import Engine, engine_of
from clustertool.engines.caller import DispatchView, WorkView
from clustertool.fleet.agent_client import Sink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold
from clustertool.model.quantities import count, human_bytes
from clustertool.show.job_text import news_text
from clustertool.ssh.prompter import Person
from clustertool.watch.job_view import Item, LogLines, LogPiece
from clustertool.watch.news import PhaseNews

_BAR_PERIOD = 0.25  # seconds between two updates of a bar
LOG = logging.getLogger("clustertool")


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
        """Return a bar and the text as HTML, at the end only the text."""
        known = f' value="{self.done}" max="{self.total}"' if self.total else ""
        bar = "" if self.phase == "ended" else f'<progress{known} style="width: 20em"></progress> '
        return f"<div>{bar}{escape(self.text)}</div>"


Listener = Callable[[Progress], None]


class _Handle(Protocol):
    def update(self, value: object) -> None: ...


def listener(given: Listener | None) -> Listener | None:
    """Return the function that gets Progress values: `given`, else a bar if this is a notebook, else None."""
    display = None if given is not None else _display_function()
    return given if display is None else _Bar(display)


def _display_function() -> Callable[..., _Handle | None] | None:
    """Return IPython's function display() if the program runs in a kernel, such as a notebook's, else None."""
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
        """Show the progress, with at most one update in 0.25 s within a phase, except for the end of the phase."""
        with self._lock:
            now = time.monotonic()
            last = 0 < progress.total <= progress.done  # of its phase, nothing would replace what was shown before
            soon = progress.phase == self._shown.phase and now - self._at < _BAR_PERIOD
            if progress == self._shown or (soon and not last):
                return
            self._shown, self._at = progress, now
            if self._handle is None:
                self._handle = self._display(progress, display_id=True)
            else:
                self._handle.update(progress)


LOG.addHandler(logging.NullHandler())  # without a handler logging would print warnings on stderr


# -- the caller --------------------------------------------------------------------------------------------------------


class _Absent:
    """The Person of a program: no question can be put, and messages are logged."""

    present = False

    def ask(self, question: str, hidden: bool) -> str:
        """Return "": no question can be put."""
        return ""

    def tell(self, text: str) -> None:
        """Log a text as information."""
        LOG.info("%s", plain(text))

    def fold(self, names: Iterable[str]) -> str:
        return fold(names)


class SilentCaller:
    """One call of the API. `job`: the id of the job once processes of it may run."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self.job = ""

    @property
    def listens(self) -> bool:
        """Whether anything gets the progress."""
        return self._listener is not None

    def progress(self, phase: str, done: int = 0, total: int = 0, text: str = "") -> None:
        """Call the listener with a Progress, if there is one."""
        if self._listener is not None:
            self._listener(Progress(phase, done, total, text))

    def note(self, text: str) -> None:
        """Log a text as information."""
        LOG.info("%s", plain(text))

    remark = note

    def warn(self, text: str) -> None:
        """Log a text as a warning."""
        LOG.warning("%s", plain(text))

    def log(self, item: Item) -> None:
        """Log news of a job: the phase as information, other news as a warning. Log lines of ranks are left out."""
        if isinstance(item, PhaseNews):
            self.note(news_text(item))
        elif not isinstance(item, (LogLines, LogPiece)):
            self.warn(news_text(item))

    def check(self) -> None:
        """Do nothing: a call of the API ends from outside only by an exception in its thread, such as KeyboardInterrupt."""

    def person(self) -> Person | None:
        """Return a Person of whom nothing can be asked, and whose messages are logged."""
        return _Absent()

    def dispatching(self, names: Sequence[str], since: float | None) -> DispatchView:
        """Create the view that reports the progress of a dispatch."""
        return _DispatchProgress(self, len(names))

    def working(self, phase: str, names: Sequence[str]) -> WorkView:
        """Create the view that reports how many nodes are done with a phase."""
        return _WorkProgress(self, phase, len(names))

    def starting(self, job: str) -> None:
        """Store the id of the job whose processes may run from now on."""
        self.job = job

    def engine(self, config: Cluster, sink: Sink | None = None) -> Engine:
        """Create the engine of a cluster, without a connection. sink: gets the frames of the nodes."""
        return engine_of(config)(config, self, sink)

    @contextmanager
    def opened(self, config: Cluster, sink: Sink | None = None, lag: float | None = None) -> Iterator[Engine]:
        """Return a context manager that opens connections to the agents of a cluster, and closes them at its end.

        Its value is the engine. sink, lag: see engine(), Fleet.open().
        """
        with self.engine(config, sink) as engine:
            engine.open(lag)
            yield engine


class _DispatchProgress:
    """The view of a dispatch: it reports the bytes that left this machine, and the nodes that are done, to the listener."""

    def __init__(self, caller: SilentCaller, nodes: int) -> None:
        self._caller, self._nodes = caller, nodes
        self._sent = self._planned = 0
        self._done: set[str] = set()
        self.between = 0

    def __enter__(self) -> DispatchView:
        self._report()
        return self

    def __exit__(self, *_: object) -> None:
        self._report()

    def uplink(self, sent: int, planned: int) -> None:
        """Store how many bytes have left this machine, and how many it will be, and report the progress."""
        self._sent, self._planned = sent, max(sent, planned)
        self._report()

    def node(self, name: str, got: int, size: int) -> None:
        """Ignore the progress of a node: the bar counts what leaves this machine."""

    def done(self, name: str) -> None:
        self._done.add(name)
        self._report()

    def failed(self, name: str, why: str) -> None:
        """Log a warning with the reason."""
        self._caller.warn(f"{name}: {why}")

    def _report(self) -> None:
        """Report the bytes and nodes so far to the listener."""
        moved = f"{human_bytes(self._sent)} of {human_bytes(self._planned)}, " if self._planned else ""
        text = f"sending the workspace: {moved}{len(self._done)} of {count(self._nodes, 'node')} done"
        self._caller.progress("dispatch", self._sent, self._planned, text)


class _WorkProgress:
    """The view of a phase of the distribution of an image: it reports the nodes that are done as progress of the dispatch."""

    def __init__(self, caller: SilentCaller, phase: str, nodes: int) -> None:
        self._caller, self._phase, self._nodes = caller, phase, nodes
        self._done: set[str] = set()

    def __enter__(self) -> WorkView:
        self.turn()
        return self

    def __exit__(self, *_: object) -> None:
        self.turn()

    def turn(self) -> None:
        """Report how many nodes are done."""
        text = f"{self._phase}: {len(self._done)} of {count(self._nodes, 'node')} done"
        self._caller.progress("dispatch", len(self._done), self._nodes, text)

    def done(self, name: str) -> None:
        """Count a node as done. The next turn() reports it."""
        self._done.add(name)

    def failed(self, name: str) -> None:
        """Ignore the failure of a node: its error is raised."""
