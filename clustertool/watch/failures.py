"""Failures of one moment are one report: causes before consequences, equal ones together, each printed once. Pure.

Reports of failed processes are delayed for a short time, for two reasons. The nodes' events come in any order, and only the
coordinator knows which failure was first. And processes that fail of the same error fail at the same time. Consequences of a
failure ("ending the job on all nodes") wait behind it, so that a cause is printed before its consequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from clustertool.model.config.folded_names import grouped
from clustertool.model.job.outcome import Failure, Key, alike, same_error
from clustertool.watch.news import EventNews, FailureNews, News

HOLD = 1.0  # seconds: the coordinator names the failures after half a second
_CAUSE = 2.5  # seconds: it waits for so long where it knows lost connections only


@dataclass
class Failures:
    """fail(), expect() and follow() as events come; release() what is due."""

    _waiting: list[tuple[float, Failure]] = field(default_factory=list)
    _behind: list[News] = field(default_factory=list)
    # In the order in which the coordinator knew them, with the attempt.
    _first: list[tuple[Key, int]] = field(default_factory=list)
    _why: EventNews | None = None
    _reported: set[tuple[Key, int]] = field(default_factory=set)
    _leaders: dict[tuple[object, ...], Failure] = field(default_factory=dict)  # error -> the first that was printed
    _causes: set[int] = field(default_factory=set)  # attempts of which a failure is known that has a cause of its own
    _due: float | None = None

    def fail(self, failure: Failure, t: float, now: float) -> None:
        """Add the failure of a process at `t` to those that wait, unless it has been reported."""
        if _key(failure) not in self._reported:
            self._waiting.append((t, failure))
            self._hold(now + (_CAUSE if failure.consequence else HOLD))

    def expect(self, culprits: Iterable[Key], attempt: int, why: EventNews, now: float) -> None:
        """Put the first failures that the coordinator has named in front of those that wait.

        why: the coordinator's event. It is reported instead, in case that their own events never come.
        """
        named = [(key, attempt) for key in culprits]
        self._first += named
        if named and not self._reported.intersection(named):
            self._why = why
            self._hold(now + HOLD)

    def follow(self, news: News) -> list[News]:
        """Return the news if they can be printed now; else keep them behind the failures that wait, and return none."""
        if self._due is None:
            return [news]
        self._behind.append(news)
        return []

    def release(self, now: float | None = None) -> list[News]:
        """Return the failures that are due, grouped by cause, and the news behind them. now: None for all of them."""
        if self._due is None or (now is not None and now < self._due):
            return []
        places = {key: number for number, key in enumerate(self._first)}
        last = len(places)
        waiting = sorted(self._waiting, key=lambda item: (places.get(_key(item[1]), last), item[1].consequence, *item))
        times = {_key(failure): t for t, failure in waiting}
        self._reported.update(times)
        found: list[News] = []
        for attempt, items in grouped((failure.attempt, failure) for _, failure in waiting).items():
            for group in alike(items, attempt in self._causes):
                followed = group[0].consequence and attempt in self._causes
                found.append(self._report(group, times[_key(group[0])], followed))
                self._causes.update({attempt} if not group[0].consequence else ())
        if self._why is not None and not self._reported.intersection(self._first):
            found.insert(0, self._why)
            self._reported.update(self._first)
        found += self._behind
        self._waiting, self._behind, self._why, self._due = [], [], None, None
        return found

    def printed(self, key: Key) -> bool:
        """Check whether a failure of this process has been reported."""
        return any(reported == key for reported, _ in self._reported)

    def _hold(self, due: float) -> None:
        self._due = due if self._due is None else min(self._due, due)

    def _report(self, group: list[Failure], t: float, followed: bool) -> FailureNews:
        before = self._leaders.setdefault(same_error(group[0]), group[0])
        return FailureNews(t, group, None if before is group[0] else before, followed)


def _key(failure: Failure) -> tuple[Key, int]:
    return (failure.role, failure.rank), failure.attempt
