"""A job view turns the frames of all nodes into a status, whole log lines and news, and knows when the job is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clustertool.model.job.outcome import Key, Outcome
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import JobPaths
from clustertool.model.roles import ROLES, role_name
from clustertool.model.wire.event_types import Event
from clustertool.model.wire.stream_messages import LogFrame, StreamFrame
from clustertool.watch.lines import Lines
from clustertool.watch.news import EventNews, Failures, News, PhaseNews, RefusedNews
from clustertool.watch.waits import Wait, count_due_reports, find_waits

_LONGEST = 16 << 20  # bytes of one line
_OPEN = 64 << 20  # and of all lines together that have no end yet
_LEAST = 1 << 10  # and of one line in any case
_ATTEMPTS = 2
_PHASES = ("pserver", "trainer", "ending")  # that are reported
# Types of events that are reported whatever else they have
_REPORTED = """disk restart frozen elsewhere supervisor-lost memory-in-use hang left-out standby below-minimum
    lease-lost""".split()


@dataclass(frozen=True)
class LogLines:
    """Complete lines of one rank. `t`: when they were written at the latest, where times were requested."""

    role: str
    rank: int
    node: int
    lines: Sequence[str]
    t: float | None = None


@dataclass(frozen=True)
class LogPiece:
    """Bytes of a log from an offset on, as they are."""

    log: str
    offset: int
    data: bytes


Item = LogLines | LogPiece | News | Wait


@dataclass
class JobView:
    """The view of a job that the frames of its nodes give: its status, lines that are not complete, and delayed news.

    Call take() for each frame, take_due() regularly, and take_rest() at the end. pieces: take() also returns the bytes of logs.
    """

    nodes: frozenset[int]
    status: JobStatus = field(default_factory=JobStatus)
    received: dict[int, float] = field(default_factory=dict)
    offsets: dict[int, dict[str, int]] = field(default_factory=dict)
    events_at: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    closed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # nodes that sent something not valid, and what
    pieces: bool = False
    _lines: dict[Key, dict[int, Lines]] = field(default_factory=dict)  # by attempt
    _times: dict[Key, float] = field(default_factory=dict)  # of the newest piece of each rank
    _open: int = 0  # bytes of lines that have no end yet
    _reminded: dict[type[Wait], int] = field(default_factory=dict)  # kind of wait -> reports so far
    _failures: Failures = field(default_factory=Failures)
    _lost: set[int] = field(default_factory=set)  # nodes whose loss was reported

    def __post_init__(self) -> None:
        self.status.silent = self.closed  # as it changes

    @property
    def over(self) -> bool:
        """Whether the stream of every node has ended or its connection was closed."""
        return self.ended | set(self.closed) >= self.nodes

    def take(self, node: int, header: StreamFrame, payload: bytes, now: float) -> list[Item]:
        """Update the view by a frame of a node, and return the lines of logs and the news that follow from it.

        The last frame of a node ends its stream and its last lines. Events that have come before change nothing. A node that
        sent something not valid is ignored from then on. now: time.monotonic().
        """
        self.received[node] = now
        if node in self.refused:
            return []
        if header["type"] == "log":
            return self._log(node, header, payload)
        if header["type"] == "events":
            if int(header["at"]) <= self.events_at.get(node, -1):
                return []
            self.events_at[node] = int(header["at"])
            found = [item for event in header["events"] for item in self._event(node, event, now)]
            return [*found, *self._failures.release(now)]
        if header["type"] == "end":
            self.ended.add(node)
            return self._flush(node)
        if header["type"] == "closed" and header.get("refused"):
            return self._refuse(node, header["why"])
        if header["type"] == "closed" and node not in self.ended:
            self.closed[node] = header["why"]
        return []

    def _refuse(self, node: int, why: str) -> list[Item]:
        """Ignore a node from now on, as closed, because it sent something not valid, and return the news of that."""
        self.refused[node] = self.closed[node] = why
        return [RefusedNews(0.0, self.status.name(node), why)]

    def take_due(self, now: float) -> list[Item]:
        """Return failures that have waited long enough, and progress bars without a newline that have changed.

        now: time.monotonic().
        """
        found: list[Item] = [*self._failures.release(now)]
        for key, lines in self._all_lines():
            shown = lines.take_bar(now)
            if shown:
                found.append(LogLines(*key, self._node_of(key), shown, self._times.get(key)))
        return found

    def remind(self, now: float) -> list[Item]:
        """Return the waits of the job that have to be reported now, for the first time or again, and count them as reported.

        See count_due_reports(). A wait that is over begins anew the next time. now: seconds since the epoch.
        """
        found: list[Item] = []
        reports: dict[type[Wait], int] = {}
        for wait in find_waits(self.status, now):
            reports[type(wait)] = max(count_due_reports(wait), reports.get(type(wait), 0))
            if count_due_reports(wait) > self._reminded.get(type(wait), 0):
                found.append(wait)
        self._reminded = reports
        return found

    def take_rest(self) -> list[Item]:
        """Return all failures and news that are still delayed, due or not."""
        return [*self._failures.release()]

    @property
    def shown(self) -> dict[str, int]:
        """{path of a log: offset behind its last byte that has arrived}. The path has the number of the rank in the job."""
        return {log: size for offsets in self.offsets.values() for log, size in offsets.items()}

    @property
    def without_coordinator(self) -> bool:
        """Whether all nodes but the coordinator have ended as LOST because they received nothing from it."""
        coordinator = self.status.coordinator
        others = [self.status.nodes.get(node) for node in self.nodes - {coordinator}]
        ends = [node.ended for node in others if node is not None and node.ended is not None]
        lost = [end for end in ends if end.state is JobState.LOST and end.node == coordinator]
        return 0 < len(others) == len(lost)

    def end_by_engine(self, reason: str, t: float) -> list[Item]:
        """Record that the engine has ended the job; mark all other nodes as ended, and return the last lines of their ranks.

        t: seconds since the epoch.
        """
        self.status.end_by_engine(reason, t)
        left = self.nodes - self.ended
        self.ended |= left
        return [item for node in sorted(left) for item in self._flush(node)]

    def printed(self, outcome: Outcome) -> bool:
        """Check whether news have named the reason of an outcome: a failure of FAILED, the lost node of LOST; else False."""
        if outcome.state is JobState.FAILED:
            return any(self._failures.printed(key) for key in outcome.culprits)
        return outcome.state is JobState.LOST and outcome.node in self._lost

    def add_pause(self, seconds: float, now: float) -> None:
        """Move the times of the nodes' last frames forward by the seconds in which this process did not run, at most to `now`.

        Else each node would seem to have been silent in that time.
        """
        for node, at in list(self.received.items()):
            self.received[node] = min(now, at + seconds)

    def _log(self, node: int, header: LogFrame, payload: bytes) -> list[Item]:
        """Add a piece of a log, without the part that came before, and return its complete lines; with `pieces` also its bytes.

        A piece can come twice: over a connection that was lost, and over the next one. A log of a rank that the node does not
        run refuses the node.
        """
        key, attempt, log = (str(header["role"]), int(header["rank"])), int(header["attempt"]), str(header["log"])
        offsets, start = self.offsets.setdefault(node, {}), int(header["off"])
        if not self.status.has_rank(node, key, attempt) or log != JobPaths.log(*key, attempt):
            why = f"it sent a log ({log[:80]}) of {role_name(key[0])} {key[1]}, which it does not run"
            return self._refuse(node, why)
        at = offsets.get(log, start)
        payload = payload[max(0, at - start) :]
        offsets[log] = max(at, start) + len(payload)
        found: list[Item] = [LogPiece(log, max(at, start), payload)] if self.pieces and payload else []
        lines = self._feed(self._lines_of_attempt(key, attempt), payload)
        if "t" in header:
            self._times[key] = float(header["t"])
        return [*found, LogLines(*key, node, lines, self._times.get(key))] if lines else found

    def _lines_of_attempt(self, key: Key, attempt: int) -> Lines:
        """Return the lines of an attempt of a rank, and drop those of attempts before the last two.

        The last but one may still print when the next one begins.
        """
        found = self._lines.setdefault(key, {})
        lines = found.setdefault(attempt, Lines())
        while len(found) > _ATTEMPTS:
            self._open -= found.pop(min(found)).buffered
        return lines

    def _feed(self, lines: Lines, data: bytes) -> list[str]:
        """Add data to the lines of a rank and return those that are complete.

        The beginnings of the incomplete lines of all ranks share one limit of memory: longer ones are cut.
        """
        self._open -= lines.buffered
        lines.limit = max(_LEAST, min(_LONGEST, _OPEN - self._open))
        found = lines.feed(data)
        self._open += lines.buffered
        return found

    def _all_lines(self) -> list[tuple[Key, Lines]]:
        """List the lines of all ranks and attempts, with their ranks."""
        return [(key, lines) for key, attempts in self._lines.items() for lines in attempts.values()]

    def _flush(self, node: int) -> list[Item]:
        """Return the last lines of a node's ranks, with or without a newline at their end, and clear them."""
        found: list[Item] = []
        for key, lines in self._all_lines():
            if self._node_of(key) == node:
                self._open -= lines.buffered
                rest = lines.end()
                if rest:
                    found.append(LogLines(*key, node, rest, self._times.get(key)))
        return found

    def _node_of(self, key: Key) -> int:
        """Return the node of a rank, -1 if it is not known."""
        process = self.status.processes.get(key)
        return process.node if process else -1

    def _event(self, node: int, event: Event, now: float) -> Iterable[Item]:
        """Apply an event to the status, and yield the news that can be printed now; ignore an event that this node cannot know.

        Failures are delayed, and news behind them, too: see Failures.
        """
        before, t = self.status.phase, float(event.get("t", 0))
        if not self.status.knows(node, event):
            return
        self.status.apply(node, event)
        if event["type"] == "exited" and not event.get("stopped") and (event["code"] or event.get("signal")):
            process = self.status.processes[str(event["role"]), int(event["rank"])]
            self._failures.add_failure(process.failure(self.status.name(node)), t, now)
        elif event["type"] == "phase" and self.status.phase != before:
            culprits = [(str(role), int(rank)) for role, rank in event.get("culprits", ())]
            why = EventNews(t, self.status.name(node), event)
            self._failures.add_culprits(culprits, int(event.get("attempt", 0)), why, now)
        if event["type"] == "restart":  # the next attempt has failures of its own
            yield from self._failures.release()
        news = self._news(node, event, before)
        if news is not None:
            yield from self._failures.add_news(news)

    def _news(self, node: int, event: Event, before: str) -> News | None:
        """Convert an event to news, None if it is not reported; note a node that is lost. before: the phase before it."""
        t, name = float(event.get("t", 0)), self.status.name(node)
        if event["type"] == "phase" and self.status.phase != before:
            roles = frozenset(role for role in ROLES if self.status.of(role))
            end = JobState(event["end"]) if event.get("end") else None
            end = None if end is JobState.NEXT_EPOCH else end
            news = PhaseNews(t, self.status.phase, self.status.attempt, roles, end)
            nothing = news.phase == "ending" and end is JobState.SUCCEEDED and "pserver" not in roles  # is left to end
            return news if news.phase in _PHASES and not nothing else None
        if event["type"] == "lost":
            self._lost.add(int(event["node"]))
            return EventNews(t, self.status.name(int(event["node"])), event)
        reported = event["type"] in _REPORTED
        reported |= event["type"] == "epoch" and bool(event["attempt"])
        reported |= event["type"] == "notification" and bool(event["failed"])
        survived = event["type"] == "clean" and bool(event.get("survivors"))
        return EventNews(t, name, event) if reported or survived else None
