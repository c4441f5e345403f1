"""News of a job are what a follower must know beyond the lines of its logs. show/job_text.py makes sentences of them.

`t` is when it happened, in seconds since the epoch by the clock of the node that recorded it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clustertool.model.job.outcome import Failure
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.event_types import Event


@dataclass(frozen=True)
class FailureNews:
    """Processes that failed with the same error, the first one first. `like`: an earlier one with this error.

    followed: they failed after another one, because a connection to it was lost, or a collective with it had no more time.
    """

    t: float
    failures: Sequence[Failure]
    like: Failure | None
    followed: bool = False


@dataclass(frozen=True)
class PhaseNews:
    """The coordinator has begun a phase. `roles` are those of the job. `end`: what an ending is for.

    That is SUCCEEDED where all trainers have ended, and None where the next attempt follows.
    """

    t: float
    phase: str
    attempt: int
    roles: frozenset[str]
    end: JobState | None

    @property
    def at_once(self) -> bool:
        """Whether nothing was waited for: the first processes of the first attempt."""
        return self.attempt == 0 and self.phase == ("pserver" if "pserver" in self.roles else "trainer")


@dataclass(frozen=True)
class EventNews:
    """An event that is reported by itself. `node`: the name of the node that it is about."""

    t: float
    node: str
    event: Event


@dataclass(frozen=True)
class RefusedNews:
    """A node sent something that is not valid, and is not followed any more."""

    t: float
    node: str
    why: str


@dataclass(frozen=True)
class DisconnectNews:
    """The connection to a node was lost. It is opened again."""

    t: float
    node: str
    why: str


@dataclass(frozen=True)
class RevivedNews:
    """A node of an elastic job that was lost answers, and was started again."""

    t: float
    node: str


News = FailureNews | PhaseNews | EventNews | RefusedNews | DisconnectNews | RevivedNews
