"""The rules of epochs: which number the next one has, and when it may start its first rank.

An epoch is one plan of the job, and has one coordinator. Its number is that of its first attempt. All times are seconds of
CLOCK_BOOTTIME of the machine that coordinates.

Without a store one process coordinates all epochs of the job. With a store (etcd) each epoch is a record there: the node that
replaces the record of the epoch before it, by compare-and-swap, coordinates the epoch.

1. The record of the next epoch still has the nodes of the record before it, because these may have ranks.
2. The members join. The coordinator waits for those that have not, until their leases have ended (Leases).
3. The record with the nodes of the plan is in the store before the first order to start is sent.

Gathering decides which nodes take part in the next epoch, and when it begins:

    epoch    condition, the first line that is true                               result
    any      the pause before the epoch has not passed (`earliest`)              WAIT
    any      a node that has not joined may have living ranks (`leases`)          WAIT
    first    the maximum has joined, or all that are started at first             START
    first    `timeout` has not passed                                             WAIT
    later    a node that is expected has not joined, for `patience` at most       WAIT
    any      at least the minimum has joined                                      START
    any      `timeout` has passed                                                 FAIL
    any      else                                                                 WAIT
"""

from __future__ import annotations

from enum import Enum
from typing import AbstractSet, Collection, Dict, FrozenSet, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.model.elastic.lease import ends_by

MARGIN = 1.0  # seconds between the end of the last lease and the first rank of the next epoch


# Nodes that may have ranks of an earlier epoch, and until when. One that joins has ended them.
Leases = Tuple[Tuple[int, float], ...]


class FormerCoordinator(NamedTuple):
    """The coordinator whose record in the store was replaced.

    seen_at: when its last write had come to the one that replaced it.
    """

    node: int
    seen_at: float


class EpochEnd(NamedTuple):
    """How an epoch has ended on one node. Only the coordinator's has `lost` and `left`.

    attempt: the last one of the epoch. why: for records. lost: when the last beat of each node came that is not proved to have
    no ranks. left: nodes that were released. restarts_used: failures of ranks that count for max_restarts, in all epochs so
    far. silent: this node has lost the epoch because its lease has ended. unattended: seconds without a laptop. code: with
    which a node ends that leaves. blamed: the node of the first failure of each attempt so far that ranks have ended. steps:
    JobSteps of the next attempt, None without a coordinator's.
    """

    attempt: int
    why: str
    lost: Mapping[int, float]
    left: Tuple[int, ...] = ()
    restarts_used: int = 0
    silent: bool = False
    unattended: float = 0.0
    code: int = 0
    blamed: Tuple[int, ...] = ()
    steps: object = None


def suspect(blamed: Sequence[int]) -> Optional[int]:
    """Return the node on which the last two attempts have failed first; None if it is not the same one.

    blamed: see EpochEnd.
    """
    return blamed[-1] if len(blamed) > 1 and blamed[-1] == blamed[-2] else None


def next_number(known: Iterable[int]) -> int:
    """Return the number of the next epoch, one above all attempts that a present member, the coordinator or the store knows."""
    return max(known, default=-1) + 1


def may_enter(number: int, last: int) -> bool:
    """Return whether a member may take part in an epoch: its number is above `last`, the highest attempt it was in."""
    return number > last


def lost_leases(lost: Mapping[int, float], seconds: float) -> Leases:
    """Compute when the leases of lost nodes end. lost: when the last beat of each came. seconds: how long a lease lasts."""
    return tuple((node, ends_by(received, seconds) + MARGIN) for node, received in sorted(lost.items()))


def former_leases(previous: AbstractSet[int], won_at: float, seconds: float, former: FormerCoordinator) -> Leases:
    """Compute when the leases of nodes end, for a coordinator that has replaced the record of another one in the store.

    previous: `nodes` of the replaced record. won_at: when the store's answer came. The former coordinator acknowledges no beat
    after its own lease in the store has ended, so the last lease of a node ends at most `seconds` after that. It has itself
    ranks until `seconds` after it sent its last write, which was seen here later.
    """
    ends = dict.fromkeys(previous, won_at + seconds + MARGIN)
    if former.node in ends:
        ends[former.node] = min(ends[former.node], former.seen_at + seconds + MARGIN)
    return tuple(sorted(ends.items()))


class Readiness(Enum):
    """What the coordinator does about the next epoch: wait for members, start it, or end the job."""

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
        """Build the event fields of an epoch that begins now with these members, as EpochChange has them.

        A member that left was "lost", "released", or is "not there". seconds: 0.0 for the first epoch.
        """
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
    without a laptop. blamed, steps: see EpochEnd. started: how many machines are started at first, 0 for the maximum. numbers:
    all members so far have numbers below it.
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
    steps: object = None
    started: int = 0
    numbers: int = 0

    def readiness(self, present: Collection[int], now: float) -> Readiness:
        """Decide whether the epoch starts, waits for members, or fails (the table above).

        present: the members that have joined.
        """
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
        """Choose the members of the epoch, at most the maximum: the coordinator, then the others ascending.

        If there are more, those of the last epoch come before others, then lower numbers, and last the node on which the last
        two attempts have failed.
        """
        bad = suspect(self.blamed)
        others = list(set(present) - {coordinator})
        others.sort(key=lambda member: (member == bad, member not in self.expected, member))
        return (coordinator, *sorted(others[: self.maximum - 1]))


def pause(short: int, least: float, most: float) -> float:
    """Compute the seconds of the pause before an epoch, doubled with each epoch in a row that ended early (`short`).

    It is at least `least` and at most `most`, see ElasticSettings.backoff.
    """
    return min(most, least * 2.0 ** min(short, 30))
