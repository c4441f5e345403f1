"""Gathering: which nodes take part in the next epoch of an elastic job, and when it begins.

    epoch    condition, the first line that is true                               result
    any      the pause before the epoch has not passed (`earliest`)              WAIT
    any      a node that has not joined may have living ranks (`leases`)          WAIT
    first    the maximum has joined, or all that are started at first             START
    first    `timeout` has not passed                                             WAIT
    later    a node that is expected has not joined, for `patience` at most       WAIT
    any      at least the minimum has joined                                      START
    any      `timeout` has passed                                                 FAIL
    any      else                                                                 WAIT

All times are seconds of one clock, which also counts while the machine is suspended (CLOCK_BOOTTIME).
"""

from __future__ import annotations

from enum import Enum
from typing import Collection, Dict, FrozenSet, NamedTuple, Tuple

from clustertool.model.elastic.epochs import Leases, suspect


class Readiness(Enum):
    WAIT = "wait"
    START = "start"
    FAIL = "fail"  # too few nodes for too long


class EpochBefore(NamedTuple):
    """The epoch before, as the record of the next one needs it. why: of its end. since: when its ranks did useful work last.

    lost, released: members that were lost, and that a user released.
    """

    members: FrozenSet[int] = frozenset()
    why: str = ""
    since: float = 0.0
    lost: FrozenSet[int] = frozenset()
    released: FrozenSet[int] = frozenset()

    def change(self, members: Collection[int], now: float) -> Dict[str, object]:
        """Build the fields of the event of an epoch with these members that begins now."""
        gone = sorted(self.members - set(members))

        def why(member: int) -> str:
            return "lost" if member in self.lost else "released" if member in self.released else "not there"

        return {
            "nodes": sorted(members),
            "left": [[member, why(member)] for member in gone],
            "joined": sorted(set(members) - self.members),
            "cause": self.why,
            "seconds": round(now - self.since, 1) if self.members else 0.0,
        }


class Gathering(NamedTuple):
    """What one epoch needs.

    number: of the epoch. began: when its gathering began. earliest: the end of the pause before it. leases: see Leases.
    expected: members that will join again, because they have taken part and were not lost. patience: seconds to wait for these.
    first: no epoch has begun so far. restarts: of --max-restarts that were used. before: the last epoch. unattended: seconds
    without a laptop. blamed: see EpochEnd. started: how many machines are started at first, 0 for the maximum. numbers: all
    members so far have numbers below it.
    """

    number: int
    minimum: int
    maximum: int
    timeout: float
    began: float
    first: bool = True
    earliest: float = 0.0
    leases: Leases = ()
    expected: FrozenSet[int] = frozenset()
    patience: float = 0.0
    restarts: int = 0
    before: EpochBefore = EpochBefore()
    unattended: float = 0.0
    blamed: Tuple[int, ...] = ()
    started: int = 0
    numbers: int = 0

    def readiness(self, present: Collection[int], now: float) -> Readiness:
        """present: the members that have joined."""
        late = now - self.began >= self.timeout
        dead = max((end for node, end in self.leases if node not in present), default=0.0)
        if now < max(self.earliest, dead):
            return Readiness.WAIT
        if self.first and len(present) < min(self.maximum, self.started or self.maximum) and not late:
            return Readiness.WAIT
        waited = now - max(self.began, self.earliest, dead)
        if not self.expected <= set(present) and waited < self.patience and not late:
            return Readiness.WAIT
        if len(present) >= self.minimum:
            return Readiness.START
        return Readiness.FAIL if late else Readiness.WAIT

    def taking_part(self, present: Collection[int], coordinator: int) -> Tuple[int, ...]:
        """Choose the members of the epoch: the coordinator, then the others ascending.

        Beyond the maximum, those of the last epoch come before others, and lower numbers before higher ones. All come before
        one on which the last two attempts have failed.
        """
        bad = suspect(self.blamed)
        others = sorted(
            set(present) - {coordinator}, key=lambda member: (member == bad, member not in self.expected, member)
        )
        return (coordinator, *sorted(others[: self.maximum - 1]))


def pause(short: int, least: float, most: float) -> float:
    """Compute the seconds before an epoch. short: how many epochs in a row ended early.

    least, most: see ElasticSettings.backoff.
    """
    return min(most, least * 2.0 ** min(short, 30))
