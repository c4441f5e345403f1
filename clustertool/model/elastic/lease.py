"""A lease is a node's right to have ranks of the present epoch. This module computes when it ends; it has no clock of its own.

All times are seconds of one machine's CLOCK_BOOTTIME, which also runs while the machine is suspended. Times of two machines
are never compared: a node measures from when it sent a beat, and the coordinator from when it received this beat, which is
later. So a node's lease has ended when the coordinator gives the node up.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple


class Lease(NamedTuple):
    """The lease of one node for one epoch. Each method returns the next value.

    seconds: how long it lasts. since: when the newest acknowledged beat was sent, or when the epoch began here. number: of the
    newest beat. pending: number and time of each beat that is not acknowledged. ended: it has ended, and never comes back.
    """

    seconds: float
    since: float
    number: int = 0
    pending: Tuple[Tuple[int, float], ...] = ()
    ended: bool = False

    @property
    def end(self) -> float:
        return self.since + self.seconds

    def send(self, now: float) -> Lease:
        """Record that the next beat is sent, whose number is in the result.

        now: a time before it is written to the connection.
        """
        number = self.number + 1
        return self._replace(number=number, pending=(*self.pending, (number, now)))

    def acknowledge(self, number: int) -> Lease:
        """Extend the lease from the time at which this beat was sent: the coordinator has it.

        An unknown or old number, and any one after the lease has ended, changes nothing.
        """
        sent = [at for beat, at in self.pending if beat == number]
        if not sent or self.ended:
            return self
        pending = tuple(one for one in self.pending if one[0] > number)
        return self._replace(since=max(self.since, sent[0]), pending=pending)

    def check(self, now: float) -> Lease:
        """Set `ended` if the lease has ended. Call it each loop, after acknowledgements were read and before orders are obeyed.

        A loop that was stopped for longer than the lease has lost it: all beats that can be acknowledged then were sent before.
        """
        return self._replace(ended=True) if now >= self.end else self

    def renew(self, now: float) -> Lease:
        """Extend the coordinator's own lease from now on, unless it has ended because its loop was stopped.

        Call it each loop.
        """
        checked = self.check(now)
        return checked if checked.ended else checked._replace(since=now)


def is_silent(received: float, now: float, seconds: float) -> bool:
    """Return whether the coordinator gives a node up: its newest beat came (`received`) more than `seconds` ago."""
    return now - received > seconds


def ends_by(received: float, seconds: float) -> float:
    """Return when a silent node has no ranks any more, by the coordinator's clock."""
    return received + seconds
