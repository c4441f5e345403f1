"""The meeting of an elastic job with a store: which member coordinates the next epoch, and where.

A member that has no connection to a coordinator reads the store. If a coordinator is present there, the member offers itself to
it. If none is, the member takes the next epoch, by compare-and-swap. Members begin that at different times, so that mostly one
does. The member that coordinates takes its next epoch itself.

StoreMeeting decides, in the member's loop, which never waits for the store. A thread (_StoreThread) makes the requests, by the
StoreKeeper.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Callable, Deque, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ConfigError, NodeLost
from clustertool.model.elastic.epochs import FormerCoordinator
from clustertool.model.joining import store_rules as rules
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from clustertool.model.joining.store_rules import Standing, StoreContent, StoreRecord
from clustertool.node.join.etcd_client import EtcdAccess, EtcdClient, EtcdError, KeyValue, Put, Unchanged
from clustertool.node.system.process_clock import boottime

if TYPE_CHECKING:
    from clustertool.model.wire.coordinator_messages import Incarnation

PREFIX = "clustertool/"
ARCHIVE = 86400  # seconds that the record of a job stays after its last coordinator: no node waits longer to join again
_RENEWAL = 3600.0  # seconds after which a coordinator renews that
_CONNECT = 0.5  # seconds for a TCP connection; a lost packet is sent again after one second
_TRIES = 3  # for the last record: it is not written if the store has just ended a lease
_ANSWER = 1.0  # the least seconds for an answer: a loaded server needs that long for a handshake and a password
_POLL = 0.02  # seconds
_STAGGER = 0.3  # seconds between the campaigns of two members
_AT_START = 5.0  # seconds that the member has that is to coordinate first, beyond LOSS_TIMEOUT
_CLOSE = 2.0


class Won(NamedTuple):
    """An epoch that this member has won in the store, so that it coordinates it.

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


class StoreView(NamedTuple):
    """What is known of the store. Times are of CLOCK_BOOTTIME.

    order: the number of the newest request of the member that it reflects. standing: of this member's campaign, None if it has
    none. content: the newest, None before the first answer. won_at: when it was known that the campaign is won. seen_at: when
    the record that it has replaced had been seen first. outdated: a later epoch than this member's has begun, or its record is
    gone. reachable_until: how long the member may have ranks of its epoch, 0.0 before the first confirmation. valid_until: the
    same for a coordinator, 0.0 if it is none. problem: why the last request failed, "" if it did not.
    """

    order: int = 0
    standing: Optional[Standing] = None
    content: Optional[StoreContent] = None
    won_at: float = 0.0
    seen_at: float = 0.0
    outdated: bool = False
    reachable_until: float = 0.0
    valid_until: float = 0.0
    problem: str = ""


class StoreMeeting:
    """The part of a member in the store of epochs. Call turn() each loop while there is no connection to a coordinator.

    `sender`: this process.
    """

    def __init__(self, join: JoinFile, sender: Incarnation) -> None:
        """Open the store of a job, and start its thread. Raises ConfigError for a URL or a certificate that is not valid."""
        server, secrets = join.job.elastic.server, dict(join.secrets)
        password, ca = secrets.get(server.password_name, ""), secrets.get(server.ca_name, "")
        self._join, self._sender = join, sender
        self._record: Optional[StoreRecord] = None  # of the campaign, or of the epoch that is coordinated here
        self._previous = -1  # the attempt in the record that it replaces
        self._former = -1  # and its coordinator
        self._alone_since: Optional[float] = None  # since when the store has no coordinator
        self._followed_at = 0.0  # when the present epoch began for this member
        try:
            keeper = StoreKeeper(EtcdAccess(server.urls, server.user, password, ca), join, sender)
        except EtcdError as error:
            raise ConfigError(f"--elastic-server: {error}", "see docs/elastic.md") from None
        self._keeper = keeper
        self._store = _StoreThread(keeper, rules.beat(join.cluster.loss_timeout))

    @property
    def view(self) -> StoreView:
        """The newest view of the store, after all orders so far."""
        return self._store.view

    @property
    def _stored(self) -> Optional[StoreRecord]:
        """Return the record of this job in the newest view of the store, without a request to the store.

        None if the store has no record, has that of another job, or has not answered yet (then view.content is None).
        """
        return self._record_of_job(self.view.content)

    def _record_of_job(self, content: Optional[StoreContent]) -> Optional[StoreRecord]:
        """Return the record in the content, if it is of this job; else None."""
        record = content.record if content is not None else None
        return record if record is not None and record.job == self._join.identity.token else None

    @property
    def coordinator(self) -> Optional[MeetingPoint]:
        """Where the coordinator is that is present in the store; None if none is, or if it is this process."""
        content = self.view.content
        record = self._record_of_job(content)
        if content is None or record is None or record.over is not None or content.presence in (None, self._sender):
            return None
        there = record.incarnation == content.presence
        return MeetingPoint(record.address, record.port, record.member) if there else None

    @property
    def owns_epoch(self) -> bool:
        """Whether this member coordinates the epoch that it has won: no other one can have taken a later epoch."""
        view = self.view
        until = view.valid_until or view.won_at + rules.ttl(self._join.cluster.loss_timeout)
        return view.standing is Standing.WON and not view.outdated and boottime() < until

    @property
    def exit_code(self) -> Optional[int]:
        """The exit code of the job as the store has it, None if the job has not ended."""
        record = self._stored
        return record.over if record is not None else None

    def turn(self, member: int, known: int, place: Callable[[], MeetingPoint], now: float) -> Optional[Won]:
        """Begin or continue a campaign, if no coordinator is present in the store. Returns the epoch once it is won, else None.

        member: this one, -1 if it has no number so far. known: the highest attempt that it has been in, -1 if none. place:
        where it would listen. now: seconds of a clock that only grows. Raises ConfigError if the store has another job with
        this id.
        """
        content = self.view.content
        if self._record is not None:
            return self._campaign_result(self._record)
        if content is None or content.presence is not None or member < 0 or self.exit_code is not None:
            self._alone_since = None
            return None
        if self._alone_since is None:
            self._alone_since = now
        start = 0.0 if self._stored is not None else _AT_START + self._join.cluster.loss_timeout
        if now - self._alone_since >= start + _STAGGER * member:
            self.campaign(member, known, place())
        return None

    def campaign(self, member: int, known: int, place: MeetingPoint) -> None:
        """Begin a campaign for the epoch after the highest known one. Arguments: see turn()."""
        before, token = self._stored, self._join.identity.token
        self._previous, self._former = (before.attempt, before.member) if before is not None else (-1, -1)
        number = max(known, self._previous) + 1
        nodes, restarts = (before.nodes, before.restarts) if before is not None else ((), 0)
        record = StoreRecord(number, member, place.host, place.port, self._sender, token, number, nodes, restarts)
        self._record = record
        self._store.begin(lambda order: self._keeper.campaign(record, order), Standing.WAIT)

    def win(self, member: int, known: int, place: MeetingPoint, seconds: float) -> Optional[Won]:
        """Campaign for the next epoch as the coordinator of the last one, and wait up to `seconds` until it is won.

        None: another member has it, or the store is not reached. Other arguments: see turn().
        """
        until = time.monotonic() + seconds
        while self.view.content is None and time.monotonic() < until:
            time.sleep(_POLL)
        self.campaign(member, known, place)
        while self._record is not None and time.monotonic() < until:
            won = self._campaign_result(self._record)
            if won is not None:
                return won
            time.sleep(_POLL)
        self.give_up()
        return None

    def _campaign_result(self, record: StoreRecord) -> Optional[Won]:
        """Return the epoch if the campaign is won; give up if it is lost, the job is over, or a coordinator is present.

        Raises ConfigError if another job has this id in the store.
        """
        view = self.view
        if view.standing is Standing.WON:
            place = MeetingPoint(record.address, record.port, record.member)
            former = FormerCoordinator(self._former, view.seen_at)
            first = record.epoch == 0
            return Won(record.epoch, self._previous, record.nodes, record.restarts, view.won_at, first, place, former)
        if view.standing is Standing.FOREIGN:
            what = f"another job with the id {self._join.identity.job_id} runs, as the store has it"
            raise ConfigError(what, "take another --job-id")
        beaten = view.standing is Standing.WAIT and self.coordinator is not None
        if beaten or view.standing in (Standing.LOST, Standing.OVER):
            self.give_up()
        return None

    def give_up(self) -> None:
        """End the campaign, or give up the epoch that this member coordinates: another member may take over at once."""
        self._record, self._alone_since = None, None
        self._store.begin(self._keeper.resign)

    def publish(self, nodes: Sequence[int], restarts: int, seconds: float) -> None:
        """Write nodes and restarts of this member's epoch to the store, and wait for them there; without an epoch do nothing.

        Called before the first rank of an epoch or attempt starts. Raises NodeLost if that takes longer than `seconds`.
        """
        if self._record is None:
            return
        record = self._record = self._record._replace(nodes=tuple(sorted(nodes)), restarts=restarts)
        self._store.give(lambda: self._keeper.publish(record))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            content = self.view.content
            if content is not None and content.record == record:
                return
            time.sleep(_POLL)
        what = f"the store of the job has not taken epoch {record.epoch}: {self.view.problem or 'it does not answer'}"
        raise NodeLost(what, "check the servers of --elastic-server from this node")

    def ranks_deadline(self, coordinates: bool) -> Callable[[], float]:
        """Create the function that returns by when this node's ranks must be dead, as the store decides (CLOCK_BOOTTIME).

        That is 0.0 once the epoch is outdated there. coordinates: this node coordinates the epoch.
        """

        def end() -> float:
            view = self.view
            if view.outdated:
                return 0.0
            if coordinates:
                return view.valid_until
            return view.reachable_until or self._followed_at + self._join.cluster.loss_timeout

        return end

    def follow(self, epoch: int) -> None:
        """Take part in an epoch that another member coordinates, and confirm it in the store from now on."""
        self._record, self._alone_since, self._followed_at = None, None, boottime()
        self._store.begin(lambda order: self._keeper.follow(epoch, order))

    def close(self, code: Optional[int]) -> None:
        """Write the job's exit code, if given, to the store as its coordinator, and end the thread, within 2 s."""
        if code is not None and self._record is not None:
            self._store.give(lambda: self._keeper.finish(code))
        self._store.close(_CLOSE)


class _StoreThread:
    """A thread that executes orders one after the other, and renews what the member has once a `beat` (seconds).

    It writes nothing, starts no process and handles no signal, so the process may fork at any time.
    """

    def __init__(self, keeper: StoreKeeper, beat: float) -> None:
        """Start the thread, in which all signals are blocked."""
        self._keeper, self._beat = keeper, beat
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._sent = StoreView()  # what the newest order makes of the view
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()  # it inherits that: signals have to wake the member's loop
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @property
    def view(self) -> StoreView:
        """The view of the keeper, or what the newest order will make of it."""
        view, sent = self._keeper.view, self._sent
        return view if view.order >= sent.order else sent._replace(content=view.content, problem=view.problem)

    def give(self, order: Callable[[], None]) -> None:
        """Queue an order. It is repeated as long as the store is not reached."""
        self._orders.put(order)

    def begin(self, order: Callable[[int], None], standing: Optional[Standing] = None) -> None:
        """Queue an order that begins a new view; it gets its number. standing: of the view until the order is done."""
        number = self._sent.order + 1
        self._sent = StoreView(number, standing)
        self._orders.put(lambda: order(number))

    def close(self, seconds: float) -> None:
        """Wait until all orders are done, for at most `seconds`, and end the thread: nothing is renewed after that."""
        end = time.monotonic() + seconds
        self._orders.put(self._stop)
        self._thread.join(max(0.0, end - time.monotonic()))
        self._closed = True

    def _stop(self) -> None:
        """End the thread after this order."""
        self._closed = True

    def _run(self) -> None:
        """Execute orders when they come, until it is closed, and the keeper's beat() after them or when a beat has passed."""
        due = 0.0
        orders: Deque[Callable[[], None]] = deque()
        while not self._closed:
            try:
                orders.append(self._orders.get(timeout=max(0.0, due - time.monotonic())))
            except queue.Empty:
                pass
            due = time.monotonic() + self._beat
            self._turn(orders)
        self._keeper.close()

    def _turn(self, orders: Deque[Callable[[], None]]) -> None:
        """Execute the queued orders and the keeper's beat(). An error is noted in the view, and ends the turn.

        An order for which the store could not be reached stays first in the queue.
        """
        try:
            while orders and not self._closed:
                self._obey(orders)
            if not self._closed:
                self._keeper.beat()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: what is not renewed ends by itself
            problem = str(error) if isinstance(error, EtcdError) else repr(error)
            self._keeper.view = self._keeper.view._replace(problem=problem)

    def _obey(self, orders: Deque[Callable[[], None]]) -> None:
        """Execute the first of `orders`. Raises its EtcdError; if that is not final, the order stays first in the queue."""
        order = orders.popleft()
        try:
            order()
        except EtcdError as error:
            if not error.final:
                orders.appendleft(order)
            raise


class StoreKeeper:
    """The requests of a member to the store. Each method but follow() makes some, and may take seconds.

    Raises EtcdError; then call beat() soon again. sender: this process.
    """

    def __init__(self, access: EtcdAccess, join: JoinFile, sender: Incarnation) -> None:
        """Create the client. Raises EtcdError for a URL or a CA that is not valid."""
        loss_timeout = join.cluster.loss_timeout
        self.view = StoreView()
        self._ttl = rules.ttl(loss_timeout)
        self._sender, self._token = sender, join.identity.token
        patience = min(_CONNECT, max(0.25, rules.beat(loss_timeout) / 2)), max(_ANSWER, self._ttl / 4)
        self._client = EtcdClient(access, patience)
        self._keys = f"{PREFIX}{join.identity.job_id}/"
        self._epoch_key, self._presence_key = f"{self._keys}epoch", f"{self._keys}coordinator"
        self._epoch: Optional[int] = None  # in which this member takes part
        self._record: Optional[StoreRecord] = None  # of this member's campaign, and of its epoch
        self._lease = 0  # of the presence
        self._lease_until = 0.0
        self._archive = 0  # the lease of the record
        self._archived_at = 0.0
        self._seen = (0, 0.0)  # the revision of the record in the store, and when it was seen first
        self._written_until = 0.0  # until when the coordinator's last write confirms its epoch

    def follow(self, epoch: Optional[int], order: int) -> None:
        """Begin a view in which this member takes part in the epoch (None: in none) and coordinates none.

        No request is made.
        """
        self._epoch, self._record = epoch, None
        self.view = StoreView(order, content=self.view.content)

    def campaign(self, record: StoreRecord, order: int) -> None:
        """Begin a view with a campaign for the epoch of this record. beat() makes the requests."""
        self.follow(None, order)
        self._record, self._written_until = record, 0.0
        self.view = self.view._replace(standing=Standing.WAIT)

    def publish(self, record: StoreRecord) -> None:
        """Replace the record that beat() writes, if this member coordinates the epoch of the record."""
        if self.view.standing is Standing.WON and self._record is not None and record.epoch == self._record.epoch:
            self._record = record

    def beat(self) -> None:
        """Renew the presence or give it up, read the store, and continue the campaign, or write the record of the epoch won."""
        if self.view.standing in (Standing.WAIT, Standing.WON):
            self._keep_presence()
        elif self._lease:
            self._remove_presence()
        content = self._read_content()
        if self.view.standing is Standing.WAIT and self._record is not None:
            self._continue_campaign(content, self._record)
        elif self.view.standing is Standing.WON and self._record is not None:
            self._coordinate(content, self._record)
        self.view = self.view._replace(problem="")

    def resign(self, order: int) -> None:
        """Begin a view without an epoch, and remove the presence from the store: another member may take over at once."""
        self.follow(None, order)
        self._remove_presence()

    def finish(self, code: int) -> None:
        """Write to the store that the job is over with this exit code, in up to 3 attempts, and remove the presence.

        Members that are cut off find it there. Only the coordinator of an epoch does so.
        """
        record = self._record
        if self.view.standing is not Standing.WON or record is None:
            return
        self._record = record._replace(over=code)
        for _ in range(_TRIES):
            self.beat()
            if self.view.content and self.view.content.record == self._record:
                break
        self._remove_presence()
        self._record = None
        self.view = self.view._replace(standing=Standing.OVER)

    def close(self) -> None:
        """Close the connection to the store."""
        self._client.close()

    def _read_content(self) -> StoreContent:
        """Read the store, put the content into the view, and confirm the member's epoch there, or note that it is outdated.

        Raises EtcdError, also for keys of another form.
        """
        pair, presence = self._client.read(self._epoch_key, self._presence_key)
        sent_at = self._client.sent_at
        try:
            content = _content_of(pair, presence)
        except ValueError as error:
            raise EtcdError(f"the keys {self._keys} are not those of this job: {error}") from None
        if content.revision != self._seen[0]:
            self._seen = content.revision, boottime()
        view = self.view._replace(content=content)
        if self._epoch is not None and not view.outdated:
            if rules.confirms(content, self._token, self._epoch):
                view = self._confirm_view(view, sent_at + self._ttl)
            else:
                view = view._replace(outdated=True)
        self.view = view
        return content

    def _confirm_view(self, view: StoreView, until: float) -> StoreView:
        """Return the view with the epoch confirmed until then; a coordinator's also ends with its lease or write."""
        coordinates = view.standing is Standing.WON
        valid = min(until, self._lease_until, self._written_until) if coordinates else 0.0
        return view._replace(reachable_until=until, valid_until=valid)

    def _continue_campaign(self, content: StoreContent, record: StoreRecord) -> None:
        """Write the record and the presence if the rules allow it, read the store again, and set the standing of the campaign.

        The next read shows whether that succeeded, also if its answer is lost.
        """
        standing = rules.standing(content, record)
        if standing is Standing.CLAIM:
            unchanged = self._conditions(content)
            puts = Put(self._epoch_key, rules.write_record(record), self._archive_lease()), self._put_of_presence()
            self.view = self.view._replace(seen_at=self._seen[1])
            self._written_until = self._written_until or boottime() + self._ttl  # if its answer is lost
            self._write(unchanged, puts)
            content = self._read_content()
            standing = rules.standing(content, record)
        if standing is Standing.WON:
            self._epoch = record.epoch
            self.view = self.view._replace(standing=standing, won_at=boottime())
            self._read_content()
        elif standing is not Standing.CLAIM:
            self.view = self.view._replace(standing=standing)

    def _coordinate(self, content: StoreContent, record: StoreRecord) -> None:
        """Write the record, which may have changed, and put back a presence that the store has ended early.

        Nothing is written if the epoch is outdated, or the presence was lost for too long or to another process.
        """
        if self.view.outdated:
            return
        puts = [Put(self._epoch_key, rules.write_record(record), self._archive_lease())]
        if rules.may_restore(content, record) and boottime() < self.view.valid_until:
            puts.append(self._put_of_presence())
        elif not rules.is_present(content, record):
            return  # it has lost its presence for too long, or to another process
        if self._write(self._conditions(content), puts):
            self._read_content()

    def _write(self, unchanged: Sequence[Unchanged], puts: Sequence[Put]) -> bool:
        """Write keys if others have not changed them, and return whether that was done, as the answer of the store has it.

        If so, the epoch is confirmed for a TTL.
        """
        changed = self._client.change(unchanged, puts)
        if changed:
            self._written_until = self._client.sent_at + self._ttl
        return changed

    def _conditions(self, content: StoreContent) -> Tuple[Unchanged, Unchanged]:
        """Build the conditions that record and presence in the store are still those of the content."""
        presence = Unchanged(self._presence_key, content.since, created=True)
        return Unchanged(self._epoch_key, content.revision), presence

    def _keep_presence(self) -> None:
        """Renew the lease of the presence; forget it if it has ended."""
        if self._lease and self._client.renew(self._lease):
            self._lease_until = self._client.sent_at + self._ttl
        else:
            self._lease = 0

    def _put_of_presence(self) -> Put:
        """Build the write of this process's presence, and create the lease for it if there is none."""
        if not self._lease:
            self._lease = self._client.grant(self._ttl)
            self._lease_until = self._client.sent_at + self._ttl
        return Put(self._presence_key, rules.write_presence(self._sender), self._lease)

    def _archive_lease(self) -> int:
        """Return the lease of the record (one day), which is created, or renewed once an hour.

        So a job whose nodes are all lost leaves nothing in the store for ever.
        """
        now = boottime()
        if not self._archive or now - self._archived_at >= _RENEWAL:
            if not (self._archive and self._client.renew(self._archive)):
                self._archive = self._client.grant(ARCHIVE)
            self._archived_at = now
        return self._archive

    def _remove_presence(self) -> None:
        """End the lease of the presence, if there is one, so that the store removes the presence."""
        if self._lease:
            self._client.revoke(self._lease)
        self._lease = 0


def _content_of(pair: Optional[KeyValue], presence: Optional[KeyValue]) -> StoreContent:
    """Convert the values of the record and the presence to the content of the store.

    Raises ValueError if one has another form.
    """
    content = StoreContent()
    if pair:
        content = content._replace(record=rules.read_record(pair.value), revision=pair.written)
    if presence:
        content = content._replace(presence=rules.read_presence(presence.value), since=presence.created)
    return content
