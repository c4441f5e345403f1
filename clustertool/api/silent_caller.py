"""The API is a caller of actions that prints nothing, asks nothing, and takes no signal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from clustertool.api.plain_text import plain
from clustertool.api.progress_display import Listener, Progress
from clustertool.engines import registry
from clustertool.engines.base import Engine
from clustertool.engines.caller import DispatchView, WorkView
from clustertool.fleet.agent_client import Sink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold
from clustertool.model.quantities import count, human_bytes
from clustertool.show.job_text import news_text
from clustertool.ssh.prompter import Person
from clustertool.watch.job_view import Item, LogLines, LogPiece
from clustertool.watch.news import PhaseNews

LOG = logging.getLogger("clustertool")
LOG.addHandler(logging.NullHandler())  # without a handler logging would print warnings on stderr


class _Absent:
    """The Person of a program: no question can be put, and messages are logged."""

    present = False

    def ask(self, question: str, hidden: bool) -> str:
        return ""

    def tell(self, text: str) -> None:
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
        if self._listener is not None:
            self._listener(Progress(phase, done, total, text))

    def note(self, text: str) -> None:
        LOG.info("%s", plain(text))

    remark = note

    def warn(self, text: str) -> None:
        LOG.warning("%s", plain(text))

    def log(self, item: Item) -> None:
        """Log the news of a job, but not the lines of its ranks."""
        if isinstance(item, PhaseNews):
            self.note(news_text(item))
        elif not isinstance(item, (LogLines, LogPiece)):
            self.warn(news_text(item))

    def check(self) -> None:
        """Do nothing: a call of the API ends from outside only by an exception in its thread, such as KeyboardInterrupt."""

    def person(self) -> Person | None:
        return _Absent()

    def dispatching(self, names: Sequence[str], since: float | None) -> DispatchView:
        return _DispatchProgress(self, len(names))

    def working(self, phase: str, names: Sequence[str]) -> WorkView:
        return _WorkProgress(self, phase, len(names))

    def starting(self, job: str) -> None:
        self.job = job

    def engine(self, config: Cluster, sink: Sink | None = None) -> Engine:
        """Create the engine of a cluster, without a connection. sink: gets the frames of the nodes."""
        return registry.engine_of(config)(config, self, sink)

    @contextmanager
    def opened(self, config: Cluster, sink: Sink | None = None, lag: float | None = None) -> Iterator[Engine]:
        """Open the engine with its agents, for jobs that exist. lag: see Fleet.open."""
        with self.engine(config, sink) as engine:
            engine.open(lag)
            yield engine


class _DispatchProgress:
    """Bytes that left this machine, and nodes that are done."""

    def __init__(self, caller: SilentCaller, nodes: int) -> None:
        self._caller, self._nodes = caller, nodes
        self._sent = self._planned = 0
        self._done: set[str] = set()
        self.between = 0

    def __enter__(self) -> DispatchView:
        self._report()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._report()

    def uplink(self, sent: int, planned: int) -> None:
        self._sent, self._planned = sent, max(sent, planned)
        self._report()

    def node(self, name: str, got: int, size: int) -> None:
        """Ignore the progress of a node: the bar counts what leaves this machine."""

    def done(self, name: str) -> None:
        self._done.add(name)
        self._report()

    def failed(self, name: str, why: str) -> None:
        self._caller.warn(f"{name}: {why}")

    def _report(self) -> None:
        moved = f"{human_bytes(self._sent)} of {human_bytes(self._planned)}, " if self._planned else ""
        text = f"sending the workspace: {moved}{len(self._done)} of {count(self._nodes, 'node')} done"
        self._caller.progress("dispatch", self._sent, self._planned, text)


class _WorkProgress:
    """Nodes that are done with a phase of the distribution of an image. It counts as a part of the dispatch."""

    def __init__(self, caller: SilentCaller, phase: str, nodes: int) -> None:
        self._caller, self._phase, self._nodes = caller, phase, nodes
        self._done: set[str] = set()

    def __enter__(self) -> WorkView:
        self.turn()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.turn()

    def turn(self) -> None:
        text = f"{self._phase}: {len(self._done)} of {count(self._nodes, 'node')} done"
        self._caller.progress("dispatch", len(self._done), self._nodes, text)

    def done(self, name: str) -> None:
        self._done.add(name)

    def failed(self, name: str) -> None:
        """Ignore the failure of a node: its error is raised."""
