"""A job view turns the frames of all nodes into a status, whole log lines and news, and knows when the job is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Union

from clustertool.model.job.outcome import Failure, Key, Outcome
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import JobPaths
from clustertool.model.roles import role_name
from clustertool.model.wire.event_types import Event, ExitedEvent
from clustertool.model.wire.stream_messages import LogFrame, StreamFrame
from clustertool.watch.failures import Failures, News
from clustertool.watch.lines import Lines
from clustertool.watch.waits import due, waits

_LONGEST = 16 << 20  # bytes of one line
_OPEN = 64 << 20  # and of all lines together that have no end yet
_LEAST = 1 << 10  # and of one line in any case
_ATTEMPTS = 2


@dataclass(frozen=True)
class LogLines:
    """Complete lines of one rank."""

    role: str
    rank: int
    node: int
    lines: Sequence[str]


Item = Union[LogLines, News]


@dataclass
class JobView:
    """take() frames as they arrive, idle() regularly; `over` when every node has sent its last event or is lost."""

    nodes: frozenset[int]
    status: JobStatus = field(default_factory=JobStatus)
    received: dict[int, float] = field(default_factory=dict)
    offsets: dict[int, dict[str, int]] = field(default_factory=dict)
    events_at: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    closed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # nodes that sent something not valid, and what
    _lines: dict[Key, dict[int, Lines]] = field(default_factory=dict)  # by attempt
    _open: int = 0  # bytes of lines that have no end yet
    _reminded: dict[str, int] = field(default_factory=dict)  # kind of wait -> reports so far
    _failures: Failures = field(default_factory=Failures)
    _lost: set[int] = field(default_factory=set)  # nodes whose loss was reported

    def __post_init__(self) -> None:
        self.status.silent = self.closed  # as it changes

    @property
    def over(self) -> bool:
        return self.ended | set(self.closed) >= self.nodes

    def name(self, node: int) -> str:
        known = self.status.nodes.get(node)
        return known.name if known and known.name else f"node {node}"

    def take(self, node: int, header: StreamFrame, payload: bytes, now: float) -> list[Item]:
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
        self.refused[node] = self.closed[node] = why
        return [News(f"{self.name(node)}: {why}; it is not followed any more", "warn")]

    def idle(self, now: float) -> list[Item]:
        """Failures that have waited long enough, and progress bars that wait for their newline."""
        found: list[Item] = [*self._failures.release(now)]
        for key, lines in self._all_lines():
            shown = lines.idle(now)
            if shown:
                found.append(LogLines(*key, self._node_of(key), shown))
        return found

    def remind(self, now: float) -> list[Item]:
        """What the job waits for, each time that a report of it is due. `now`: seconds since the epoch."""
        found: list[Item] = []
        reports: dict[str, int] = {}
        for wait in waits(self.status, now):
            reports[wait.kind] = max(due(wait), reports.get(wait.kind, 0))
            if due(wait) > self._reminded.get(wait.kind, 0):
                found.append(News(wait.text, "warn"))
        self._reminded = reports
        return found

    def rest(self) -> list[Item]:
        """At the end: failures that still wait."""
        return [*self._failures.release()]

    def printed(self, outcome: Outcome) -> bool:
        """Whether the news have named the reason of this outcome already."""
        if outcome.state is JobState.FAILED:
            return any(self._failures.printed(key) for key in outcome.culprits)
        return outcome.state is JobState.LOST and outcome.node in self._lost

    def blocked(self, seconds: float, now: float) -> None:
        """This process did not run for so long: no node was silent in that time."""
        for node, at in list(self.received.items()):
            self.received[node] = min(now, at + seconds)

    def reopened(self, node: int) -> None:
        self.closed.pop(node, None)

    def _log(self, node: int, header: LogFrame, payload: bytes) -> list[Item]:
        """What is new in a piece: one that came over a connection we had given up may be here already."""
        key, attempt, log = (str(header["role"]), int(header["rank"])), int(header["attempt"]), str(header["log"])
        offsets, start = self.offsets.setdefault(node, {}), int(header["off"])
        if (
            key not in self.status.processes
            or not self.status.runs(node, key, attempt)
            or log != JobPaths.log(*key, attempt)
        ):
            return self._refuse(
                node, f"it sent a log ({log[:80]}) of {role_name(key[0])} {key[1]}, which it does not run"
            )
        known = offsets.get(log, start)
        payload = payload[max(0, known - start) :]
        offsets[log] = max(known, start) + len(payload)
        lines = self._feed(self._of_attempt(key, attempt), payload)
        return [LogLines(*key, node, lines)] if lines else []

    def _of_attempt(self, key: Key, attempt: int) -> Lines:
        """Of each rank the lines of two attempts are kept: an old one may still print when the next one begins."""
        found = self._lines.setdefault(key, {})
        lines = found.setdefault(attempt, Lines())
        while len(found) > _ATTEMPTS:
            self._open -= found.pop(min(found)).buffered
        return lines

    def _feed(self, lines: Lines, data: bytes) -> list[str]:
        """The lines that are complete. The beginnings of all other lines take bounded memory together: longer ones are cut."""
        self._open -= lines.buffered
        lines.limit = max(_LEAST, min(_LONGEST, _OPEN - self._open))
        found = lines.feed(data)
        self._open += lines.buffered
        return found

    def _all_lines(self) -> list[tuple[Key, Lines]]:
        return [(key, lines) for key, attempts in self._lines.items() for lines in attempts.values()]

    def _flush(self, node: int) -> list[Item]:
        """The last lines of a node's ranks, newline or not."""
        found: list[Item] = []
        for key, lines in self._all_lines():
            if self._node_of(key) == node:
                self._open -= lines.buffered
                rest = lines.end()
                if rest:
                    found.append(LogLines(*key, node, rest))
        return found

    def _node_of(self, key: Key) -> int:
        process = self.status.processes.get(key)
        return process.node if process else -1

    def _event(self, node: int, event: Event, now: float) -> Iterable[Item]:
        before, t = self.status.phase, float(event.get("t", 0))
        if not self.status.knows(node, event):
            return
        self.status.apply(node, event)
        if event["type"] == "exited" and not event.get("stopped") and (event["code"] or event.get("signal")):
            self._failures.fail(self._failure(node, event), t, now)
        elif event["type"] == "phase" and self.status.phase != before:
            culprits = [(str(role), int(rank)) for role, rank in event.get("culprits", ())]
            self._failures.expect(
                culprits, int(event.get("attempt", 0)), News(str(event.get("why", "")), "warn", t), now
            )
        if event["type"] == "restart":  # the next attempt has failures of its own
            yield from self._failures.release()
        for news in self._news(node, event, before):
            yield from self._failures.follow(News(news.text, news.level, t))

    def _failure(self, node: int, event: ExitedEvent) -> Failure:
        return Failure(
            str(event["role"]),
            int(event["rank"]),
            self.name(node),
            int(event["code"]),
            int(event.get("signal", 0)),
            str(event.get("note", "")),
            int(event.get("error", 0)),
            int(event.get("attempt", 0)),
            bool(event.get("consequence")),
        )

    def _news(self, node: int, event: Event, before: str) -> Iterable[News]:
        """What else a follower must know; `before`: the phase before this event."""
        if event["type"] == "phase" and self.status.phase != before:
            yield from self._phase(done=event.get("end") == JobState.SUCCEEDED)
        elif event["type"] == "disk":
            became = "is full: what is printed now is lost" if event["full"] else "has room again"
            yield News(f"{self.name(node)}: the disk of {event['root']} {became}", "warn")
        elif event["type"] == "restart":
            yield News(f"attempt {event['attempt']} begins in {event['pause']:g} s", "warn")
        elif event["type"] == "frozen":
            process = f"{role_name(event['role'])} {event['rank']} on {self.name(node)}"
            yield News(f"{process} was stopped by a signal (SIGSTOP)", "warn")
        elif event["type"] == "elsewhere":
            process = f"{role_name(event['role'])} {event['rank']} on {self.name(node)}"
            yield News(f"{process} listens on {event['listens']}, the others expect it on {event['endpoint']}", "warn")
        elif event["type"] == "lost":
            self._lost.add(int(event["node"]))
            yield News(f"node {self.name(int(event['node']))} is lost: {event.get('why')}", "warn")
        elif event["type"] == "supervisor-lost":
            yield News(f"{self.name(node)}: {event.get('why')}; its processes were ended", "warn")
        elif event["type"] == "clean" and event.get("survivors"):
            yield News(f"{self.name(node)}: still alive: {', '.join(event['survivors'])}", "warn")

    def _phase(self, done: bool) -> Iterable[News]:
        """done: all trainers are, and there may be nothing left to end."""
        texts = {
            "pserver": "all nodes are ready, starting the pservers",
            "trainer": "starting the trainers" + (" and heter trainers" if self.status.of("heter") else ""),
            "ending": "ending the job on all nodes",
        }
        if done:
            texts["ending"] = "all trainers are done, ending the pservers" if self.status.of("pserver") else ""
        if texts.get(self.status.phase):
            again = f" (attempt {self.status.attempt})" if self.status.attempt else ""
            yield News(texts[self.status.phase] + again)
