"""News of a job are what a follower must know beyond the lines of its logs. show/job_text.py makes sentences of them.

`t` is when it happened, in seconds since the epoch by the clock of the node that recorded it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clustertool.model.config.folded_names import grouped
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Key, Outcome, RankExit, alike, same_error
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.event_types import Event

HOLD = 1.0  # seconds: the coordinator names the failures after half a second
_CAUSE = 2.5  # seconds: it waits for so long where it knows lost connections only


@dataclass(frozen=True)
class FailureNews:
    """The news that processes failed with the same error, the first one first. `like`: an earlier one with this error.

    followed: they failed after another one, because a connection to it was lost, or a collective with it had no more time.
    """

    t: float
    failures: Sequence[RankExit]
    like: RankExit | None
    followed: bool = False


@dataclass(frozen=True)
class PhaseNews:
    """The news that the coordinator has begun a phase. `roles` are those of the job. `end`: what an ending is for.

    That is SUCCEEDED where all trainers have ended, and None where the next attempt follows.
    """

    t: float
    phase: str
    attempt: int
    roles: frozenset[str]
    end: JobState | None

    @property
    def at_once(self) -> bool:
        """Whether the phase starts the first processes of the first attempt, for which nothing was waited."""
        return self.attempt == 0 and self.phase == ("pserver" if "pserver" in self.roles else "trainer")


@dataclass(frozen=True)
class EventNews:
    """The news of an event that is reported by itself. `node`: the name of the node that it is about."""

    t: float
    node: str
    event: Event


@dataclass(frozen=True)
class RefusedNews:
    """The news that a node sent something not valid, and is not followed any more."""

    t: float
    node: str
    why: str


@dataclass(frozen=True)
class DisconnectNews:
    """The news that the connection to a node was lost. It is opened again."""

    t: float
    node: str
    why: str


@dataclass(frozen=True)
class RevivedNews:
    """The news that a lost node of an elastic job answers, and was started again."""

    t: float
    node: str


News = FailureNews | PhaseNews | EventNews | RefusedNews | DisconnectNews | RevivedNews


# -- failures that wait for their cause --------------------------------------------------------------------------------


@dataclass
class Failures:
    """The failures of a job that wait for a common report: causes before consequences, equal ones together, each printed once.

    add_failure(), add_culprits() and add_news() take events as they come; release() returns what is due. Reports of failed
    processes are delayed for a short time, for two reasons. The nodes' events come in any order, and only the coordinator knows
    which failure was first. And processes that fail of the same error fail at the same time. Consequences of a failure ("ending
    the job on all nodes") wait behind it, so that a cause is printed before its consequences.
    """

    _waiting: list[tuple[float, RankExit]] = field(default_factory=list)
    _behind: list[News] = field(default_factory=list)
    # In the order in which the coordinator knew them, with the attempt.
    _first: list[tuple[Key, int]] = field(default_factory=list)
    _why: EventNews | None = None
    _reported: set[tuple[Key, int]] = field(default_factory=set)
    _leaders: dict[tuple[object, ...], RankExit] = field(default_factory=dict)  # error -> the first that was printed
    _causes: set[int] = field(default_factory=set)  # attempts of which a failure is known that has a cause of its own
    _due: float | None = None

    def add_failure(self, failure: RankExit, t: float, now: float) -> None:
        """Add the failure of a process, unless it has been reported; release() is due 1 s later, 2.5 s for a consequence.

        t: when it failed, by its node's clock. now: time.monotonic().
        """
        if _process_attempt(failure) not in self._reported:
            self._waiting.append((t, failure))
            self._set_due(now + (_CAUSE if failure.consequence else HOLD))

    def add_culprits(self, culprits: Iterable[Key], attempt: int, why: EventNews, now: float) -> None:
        """Note the first failures that the coordinator has named; release() returns them first.

        why: the coordinator's event, which release() returns instead if events of these processes have not come.
        """
        named = [(key, attempt) for key in culprits]
        self._first += named
        if named and not self._reported.intersection(named):
            self._why = why
            self._set_due(now + HOLD)

    def add_news(self, news: News) -> list[News]:
        """Return [news] if no failure waits; else keep it until release(), and return []."""
        if self._due is None:
            return [news]
        self._behind.append(news)
        return []

    def release(self, now: float | None = None) -> list[News]:
        """Return the delayed failures, grouped by error, and the news behind them, and forget them; [] if they are not due.

        Those that the coordinator has named come first, in its order; consequences come last. now: time.monotonic(); None: all
        are due.
        """
        if self._due is None or (now is not None and now < self._due):
            return []
        places = {key: number for number, key in enumerate(self._first)}
        last = len(places)
        waiting = sorted(
            self._waiting, key=lambda item: (places.get(_process_attempt(item[1]), last), item[1].consequence, *item)
        )
        times = {_process_attempt(failure): t for t, failure in waiting}
        self._reported.update(times)
        found: list[News] = []
        for attempt, items in grouped((failure.attempt, failure) for _, failure in waiting).items():
            for group in alike(items, attempt in self._causes):
                followed = group[0].consequence and attempt in self._causes
                found.append(self._build_news(group, times[_process_attempt(group[0])], followed))
                self._causes.update({attempt} if not group[0].consequence else ())
        if self._why is not None and not self._reported.intersection(self._first):
            found.insert(0, self._why)
            self._reported.update(self._first)
        found += self._behind
        self._waiting, self._behind, self._why, self._due = [], [], None, None
        return found

    def printed(self, key: Key) -> bool:
        """Check whether a failure of this process has been returned by release(), or named by the coordinator's event."""
        return any(reported == key for reported, _ in self._reported)

    def _set_due(self, due: float) -> None:
        """Set when the delayed failures are due, unless they are due earlier."""
        self._due = due if self._due is None else min(self._due, due)

    def _build_news(self, group: list[RankExit], t: float, followed: bool) -> FailureNews:
        """Build the news of failures with the same error, and name in it the first one reported before with this error.

        t: when the first of them failed, by its node's clock. followed: see FailureNews.
        """
        before = self._leaders.setdefault(same_error(group[0]), group[0])
        return FailureNews(t, group, None if before is group[0] else before, followed)


def _process_attempt(failure: RankExit) -> tuple[Key, int]:
    return (failure.role, failure.rank), failure.attempt


# -- the verdict -------------------------------------------------------------------------------------------------------


def failed_by_themselves(status: JobStatus, outcome: Outcome) -> list[list[ProcessStatus]]:
    """Group the processes that failed by themselves by error, the first failure first; [] unless the job has failed.

    Those that failed as a consequence of another failure are left out.
    """
    culprits = [key for key in outcome.culprits if key not in outcome.followed]
    culprits = culprits if outcome.state is JobState.FAILED else []
    groups = alike(status.processes[key].failure() for key in culprits if key in status.processes)
    return [[status.processes[failure.role, failure.rank] for failure in group] for group in groups]


def first_culprit(status: JobStatus, outcome: Outcome) -> ProcessStatus | None:
    """Return the process that failed first, None if the job has not failed or the process is not known."""
    return status.processes.get(outcome.culprits[0]) if outcome.state is JobState.FAILED and outcome.culprits else None
