"""The meeting of an elastic job with a store: which member coordinates the next epoch, and where.

A member that has no connection to a coordinator reads the store. If a coordinator is present there, the member offers itself to
it. If none is, the member takes the next epoch, by compare-and-swap. Members begin that at different times, so that mostly one
does. The member that coordinates takes its next epoch itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ConfigError, NodeLost
from clustertool.model.config.elastic_settings import ElasticServer
from clustertool.model.elastic.epochs import FormerCoordinator
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from clustertool.model.joining.store_rules import Standing, StoreRecord, ttl
from clustertool.node.join.etcd.epoch_store import EpochStore
from clustertool.node.join.etcd.etcd_client import EtcdAccess, EtcdError
from clustertool.node.join.etcd.store_keeper import StoreJob, StoreView
from clustertool.node.system.process_clock import boottime

if TYPE_CHECKING:
    from clustertool.model.wire.coordinator_messages import Incarnation

_POLL = 0.02  # seconds
_STAGGER = 0.3  # seconds between the campaigns of two members
_AT_START = 5.0  # seconds that the member has that is to coordinate first, beyond LOSS_TIMEOUT
_CLOSE = 2.0


class Won(NamedTuple):
    """The epoch that this member coordinates.

    before: nodes that may have ranks of earlier epochs. at: when it was won. place: where it listens. previous: the attempt
    that the store had before, -1 if none. former: its coordinator.
    """

    number: int
    previous: int
    before: Tuple[int, ...]
    restarts: int
    at: float
    first: bool
    place: MeetingPoint
    former: FormerCoordinator


def access_of(server: ElasticServer, secrets: Sequence[Tuple[str, str]]) -> EtcdAccess:
    """Collect what the client of the store needs. secrets: names and values of SECRETS."""
    values = dict(secrets)
    return EtcdAccess(server.urls, server.user, values.get(server.password_name, ""), values.get(server.ca_name, ""))


class StoreMeeting:
    """Call turn() each loop while there is no connection to a coordinator. `sender`: this process."""

    def __init__(self, join: JoinFile, sender: Incarnation) -> None:
        """Open the store of a job. Raises ConfigError for a URL or a certificate that is not valid."""
        job = StoreJob(join.identity.job_id, join.identity.token, sender)
        self._join, self._sender = join, sender
        self._record: Optional[StoreRecord] = None  # of the campaign, or of the epoch that is coordinated here
        self._previous = -1  # the attempt in the record that it replaces
        self._former = -1  # and its coordinator
        self._alone_since: Optional[float] = None  # since when the store has no coordinator
        self._followed_at = 0.0  # when the present epoch began for this member
        try:
            self.store = EpochStore(access_of(join.job.elastic.server, join.secrets), job, join.cluster.loss_timeout)
        except EtcdError as error:
            raise ConfigError(f"--elastic-server: {error}", "see docs/elastic.md") from None

    @property
    def view(self) -> StoreView:
        return self.store.turn()

    @property
    def coordinator(self) -> Optional[MeetingPoint]:
        """Where the coordinator is that is present in the store; None if none is, or if it is this process."""
        content = self.view.content
        if content is None or content.record is None or content.presence in (None, self._sender):
            return None
        record = content.record
        same = record.incarnation == content.presence and record.job == self._join.identity.token
        return MeetingPoint(record.address, record.port, record.member) if same and record.over is None else None

    @property
    def holds(self) -> bool:
        """Whether this member coordinates the epoch that it has won: no other one can have taken a later epoch."""
        view = self.view
        until = view.valid_until or view.won_at + ttl(self._join.cluster.loss_timeout)
        return view.standing is Standing.WON and not view.outdated and boottime() < until

    @property
    def over(self) -> Optional[int]:
        """The exit code of the job, if it has ended."""
        content = self.view.content
        known = content is not None and content.record is not None and content.record.job == self._join.identity.token
        return content.record.over if known and content is not None and content.record is not None else None

    def turn(self, member: int, known: int, place: Callable[[], MeetingPoint], now: float) -> Optional[Won]:
        """Campaign where no coordinator is present. Returns the epoch that was won.

        member: this one, -1 if it has no number so far. known: the highest attempt that it has been in, -1 if none. place:
        where it would listen. now: seconds of a clock that only grows.
        """
        content = self.view.content
        if self._record is not None:
            return self._campaigning(self._record)
        if content is None or content.presence is not None or member < 0 or self.over is not None:
            self._alone_since = None
            return None
        if self._alone_since is None:
            self._alone_since = now
        begun = content.record is not None and content.record.job == self._join.identity.token
        start = 0.0 if begun else _AT_START + self._join.cluster.loss_timeout
        if now - self._alone_since >= start + _STAGGER * member:
            self.campaign(member, known, place())
        return None

    def campaign(self, member: int, known: int, place: MeetingPoint) -> None:
        """Begin to take the next epoch. Arguments: see turn()."""
        content = self.view.content
        before = content.record if content is not None else None
        if before is not None and before.job != self._join.identity.token:
            before = None
        self._previous, self._former = (before.attempt, before.member) if before is not None else (-1, -1)
        number = max(known, self._previous) + 1
        nodes, restarts = (before.nodes, before.restarts) if before is not None else ((), 0)
        token = self._join.identity.token
        self._record = StoreRecord(number, member, place.host, place.port, self._sender, token, number, nodes, restarts)
        self.store.campaign(self._record)

    def win(self, member: int, known: int, place: MeetingPoint, seconds: float) -> Optional[Won]:
        """Take the next epoch, as the coordinator of the last one. None: another member has it, or the store is not reached."""
        until = time.monotonic() + seconds
        while self.view.content is None and time.monotonic() < until:
            time.sleep(_POLL)
        self.campaign(member, known, place)
        while self._record is not None and time.monotonic() < until:
            won = self._campaigning(self._record)
            if won is not None:
                return won
            time.sleep(_POLL)
        self.give_up()
        return None

    def _campaigning(self, record: StoreRecord) -> Optional[Won]:
        view = self.view
        if view.standing is Standing.WON:
            place = MeetingPoint(record.address, record.port, record.member)
            former = FormerCoordinator(self._former, view.seen_at)
            first = record.epoch == 0
            return Won(record.epoch, self._previous, record.nodes, record.restarts, view.won_at, first, place, former)
        if view.standing is Standing.FOREIGN:
            what = f"another job with the id {self._join.identity.job_id} runs, as the store has it"
            raise ConfigError(what, "take another --job-id")
        if (
            view.standing in (Standing.LOST, Standing.OVER)
            or view.standing is Standing.WAIT
            and self.coordinator is not None
        ):
            self.give_up()
        return None

    def give_up(self) -> None:
        """Coordinate no epoch, and want none."""
        self._record, self._alone_since = None, None
        self.store.resign()

    def publish(self, nodes: Sequence[int], restarts: int, seconds: float) -> None:
        """Store the nodes of the epoch before its first rank starts. Raises NodeLost if the store is not reached in time."""
        if self._record is None:
            return
        record = self._record = self._record._replace(nodes=tuple(sorted(nodes)), restarts=restarts)
        self.store.publish(record)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            content = self.view.content
            if content is not None and content.record == record:
                return
            time.sleep(_POLL)
        what = f"the store of the job has not taken epoch {record.epoch}: {self.view.problem or 'it does not answer'}"
        raise NodeLost(what, "check the servers of --elastic-server from this node")

    def until(self, coordinates: bool) -> Callable[[], float]:
        """Create the function that returns by when this node's ranks must be dead, as the store decides (CLOCK_BOOTTIME)."""

        def end() -> float:
            view = self.view
            if view.outdated:
                return 0.0
            if coordinates:
                return view.valid_until
            return view.reachable_until or self._followed_at + self._join.cluster.loss_timeout

        return end

    def follow(self, epoch: int) -> None:
        """Take part in an epoch that another member coordinates."""
        self._record, self._alone_since, self._followed_at = None, None, boottime()
        self.store.follow(epoch)

    def close(self, code: Optional[int]) -> None:
        """code: of the job, if this member coordinates it and it has ended."""
        if code is not None and self._record is not None:
            self.store.finish(code)
        self.store.close(_CLOSE)
