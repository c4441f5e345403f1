"""The lease keeper has this node's lease for one epoch of an elastic job: it counts beats and reads acknowledgements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable, Optional

from clustertool.errors import UsageError
from clustertool.model.elastic.lease import Lease
from clustertool.model.wire.frames import Header
from clustertool.node.system.process_clock import boottime

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec


class LeaseKeeper:
    """Call stamp() for each beat, read() for each message of the coordinator, and check() each loop, before orders are obeyed.

    The node may have ranks once it is armed, by the first order. Before that, a lease that has ended may come back.
    `seconds`: how long it lasts. store_end: by when another epoch may begin, since this node has not reached the store of the
    job; None if there is no store. All times are of CLOCK_BOOTTIME.
    """

    def __init__(self, seconds: float, store_end: Optional[Callable[[], float]] = None) -> None:
        self.armed = False
        self._store_end = store_end
        self._end_taken = False
        self._lease = Lease(seconds, boottime())

    @property
    def seconds(self) -> float:
        return self._lease.seconds

    @property
    def ended(self) -> bool:
        return self._lease.ended

    @property
    def end(self) -> float:
        """By when the node's ranks must be dead; infinite if it can have none."""
        return min(self._lease.end, self._of_store) if self.armed else math.inf

    @property
    def _of_store(self) -> float:
        return math.inf if self._store_end is None else self._store_end()

    @property
    def lacks_store(self) -> bool:
        """Whether the node has not reached the store for too long."""
        return boottime() >= self._of_store

    def stamp(self, message: Header) -> Header:
        """Add its number to a beat."""
        self._lease = self._lease.send(boottime())
        return {**message, "beat": self._lease.number}

    def read(self, message: Header) -> None:
        """Read a message of the coordinator. Raises ValueError for a number that is none."""
        seen = message.get("seen", 0)
        if type(seen) is not int:
            raise ValueError("an acknowledgement that is no number")
        self._lease = self._lease.acknowledge(seen)

    def check(self) -> bool:
        """Check whether the lease has ended. It never comes back."""
        if self.armed:
            self._lease = self._lease.check(boottime())
            if self.lacks_store:
                self.lose()
        return self.ended

    def end_is_new(self) -> bool:
        """Check whether it has ended; True once."""
        new = self.ended and not self._end_taken
        self._end_taken = self.ended
        return new

    def lose(self) -> None:
        """End the lease, since the guard has ended the node's ranks because of it."""
        self._lease = self._lease._replace(ended=True)


class OwnLease(LeaseKeeper):
    """The lease of the coordinator's own node, which each turn of its loop renews."""

    def __init__(self, seconds: float, store_end: Optional[Callable[[], float]]) -> None:
        super().__init__(seconds, store_end)
        self.armed = True

    @property
    def why(self) -> str:
        """Why it has ended."""
        if self.lacks_store:
            return "it did not reach the store of the job"
        return f"it did not run for {self.seconds:g} s"

    def check(self) -> bool:
        """Renew it, or note that it has ended."""
        self._lease = self._lease.renew(boottime())
        if self.lacks_store:
            self.lose()
        return self.ended


def may_leave(spec: Spec, coordinates: bool) -> bool:
    """Return whether the job can go on without this node. coordinates: it is the coordinator's node."""
    return "elastic" in spec and not (coordinates and not spec["elastic"]["store"])


def require_may_leave(spec: Spec, coordinates: bool) -> None:
    """Raise UsageError where may_leave() is False."""
    if "elastic" not in spec:
        what = f"job {spec['job']} is not elastic: {spec['name']} belongs to it until it ends"
        raise UsageError(what, "stop the job, or start it with --nnodes MIN:MAX")
    if not may_leave(spec, coordinates):
        what = f"{spec['name']} coordinates the job, which has no --elastic-server: it cannot leave"
        raise UsageError(what, "stop the job, or release another node")
