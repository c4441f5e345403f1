"""The coordinator link joins a node's supervisor to the coordinator, which runs in this process or on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Sequence, Set

from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.job.outcome import Key, Outcome
from clustertool.node.supervisor.coordinator.lease_keeper import LeaseKeeper
from clustertool.node.supervisor.usage_recorder import Reached

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.coordinator_messages import MemberMessage, Order, RankExit


class CoordinatorLink:
    """Call turn() each loop, post() for each message to the coordinator, and close() once.

    This class has no connection: CoordinatorServer, on the coordinator's own node, and CoordinatorClient have one.
    """

    def __init__(self) -> None:
        self.orders: List[Order] = []  # of the coordinator; the supervisor removes those that it obeys
        self.attempt = 0  # of the job, as this node knows it
        self.progress: Sequence[Reached] = ()  # of this node's ranks
        self.lease: Optional[LeaseKeeper] = None  # of this node, in an elastic job

    @property
    def connecting(self) -> bool:
        """Whether turn() must be called to connect: a connection wakes the caller by its descriptor."""
        return False

    @property
    def done(self) -> bool:
        """Whether this node need not stay because of the other nodes: they have the verdict, or it is not the coordinator."""
        return True

    @property
    def loss(self) -> Optional[Outcome]:
        """The outcome of the job, as this node knows it, if the coordinator was silent for too long."""
        return None

    def lose_lease(self) -> None:
        """Record that the guard has ended the ranks of this node.

        By the end of the lease that the guard knew of, the supervisor did not run.
        """
        if self.lease is not None:
            self.lease.lose()

    def epoch_end(self, outcome: Outcome) -> EpochEnd:
        """Describe how the epoch of an elastic job has ended, as this node knows it. outcome: of the epoch."""
        lease = self.lease
        return EpochEnd(self.attempt, outcome.reason, {}, silent=lease is not None and self.loss is not None)

    @property
    def silent(self) -> bool:
        """Whether a node was lost because nothing came from it: what has started its supervisor waits for it."""
        return False

    def wires(self) -> Sequence[FileDescriptorLike]:
        return []

    def post(self, message: MemberMessage) -> None:
        return

    def launch(self, key: Key, command: str) -> None:
        """Have a daemon of mpirun started on its node: only the coordinator's own node has an mpirun."""

    def ended_daemons(self) -> List[RankExit]:
        """Return the daemons of mpirun that have ended since the last call, on any node."""
        return []

    def turn(self, ready: Set[int]) -> None:
        """`ready`: descriptors that can be read or written."""

    def close(self, outcome: Optional[Outcome] = None) -> None:
        """outcome: with which the supervisor ends."""
