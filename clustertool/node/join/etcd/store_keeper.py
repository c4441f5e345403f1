"""The store keeper makes the requests of one member to the store of epochs. EpochStore calls it in a thread of its own."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple

from clustertool.model.joining import store_rules as rules
from clustertool.model.joining.store_rules import Standing, StoreContent, StoreRecord
from clustertool.model.wire.coordinator_messages import Incarnation
from clustertool.node.join.etcd.etcd_client import EtcdAccess, EtcdClient, EtcdError, KeyValue, Put, Unchanged
from clustertool.node.system.process_clock import boottime

PREFIX = "clustertool/"
ARCHIVE = 86400  # seconds that the record of a job stays after its last coordinator: no node waits longer to join again
_RENEWAL = 3600.0  # seconds after which a coordinator renews that
_CONNECT = 0.5  # seconds for a TCP connection; a lost packet is sent again after one second
_TRIES = 3  # for the last record: it is not written if the store has just ended a lease
_ANSWER = 1.0  # the least seconds for an answer: a loaded server needs that long for a handshake and a password


class StoreJob(NamedTuple):
    """The job and the member. id: of the job. identity: of the job among those with this id. sender: this process."""

    id: str
    identity: str
    sender: Incarnation


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


class StoreKeeper:
    """Each method but follow() makes requests, and may take seconds. Raises EtcdError; then call beat() soon again.

    loss_timeout: seconds, LOSS_TIMEOUT of the cluster.
    """

    def __init__(self, access: EtcdAccess, job: StoreJob, loss_timeout: float) -> None:
        self.view = StoreView()
        self._ttl = rules.ttl(loss_timeout)
        self._job = job
        patience = min(_CONNECT, max(0.25, rules.beat(loss_timeout) / 2)), max(_ANSWER, self._ttl / 4)
        self._client = EtcdClient(access, patience)
        self._epoch_key = f"{PREFIX}{job.id}/epoch"
        self._presence_key = f"{PREFIX}{job.id}/coordinator"
        self._epoch: Optional[int] = None  # in which this member takes part
        self._record: Optional[StoreRecord] = None  # of this member's campaign, and of its epoch
        self._lease = 0  # of the presence
        self._lease_until = 0.0
        self._archive = 0  # the lease of the record
        self._archived_at = 0.0
        self._seen = (0, 0.0)  # the revision of the record in the store, and when it was seen first
        self._written_until = 0.0  # until when the coordinator's last write confirms its epoch

    def follow(self, epoch: Optional[int], order: int) -> None:
        """Take part in this epoch, in none if it is None, and coordinate none."""
        self._epoch, self._record = epoch, None
        self.view = StoreView(order, content=self.view.content)

    def campaign(self, record: StoreRecord, order: int) -> None:
        """Begin to campaign for the epoch of this record."""
        self.follow(None, order)
        self._record, self._written_until = record, 0.0
        self.view = self.view._replace(standing=Standing.WAIT)

    def publish(self, record: StoreRecord) -> None:
        """Change the record of the epoch that this member coordinates."""
        if self.view.standing is Standing.WON and self._record is not None and record.epoch == self._record.epoch:
            self._record = record

    def beat(self) -> None:
        """Renew and confirm what the member has, and go on with its campaign."""
        if self.view.standing in (Standing.WAIT, Standing.WON):
            self._keep_presence()
        elif self._lease:
            self._leave()
        content = self._read()
        if self.view.standing is Standing.WAIT and self._record is not None:
            self._attempt(content, self._record)
        elif self.view.standing is Standing.WON and self._record is not None:
            self._coordinate(content, self._record)
        self.view = self.view._replace(problem="")

    def resign(self, order: int) -> None:
        """Give up the epoch that the member coordinates, or its campaign: another one may take over at once."""
        self.follow(None, order)
        self._leave()

    def finish(self, code: int) -> None:
        """Record that the job is over with this exit code: members that are cut off find it in the store."""
        record = self._record
        if self.view.standing is not Standing.WON or record is None:
            return
        self._record = record._replace(over=code)
        for _ in range(_TRIES):
            self.beat()
            if self.view.content and self.view.content.record == self._record:
                break
        self._leave()
        self._record = None
        self.view = self.view._replace(standing=Standing.OVER)

    def close(self) -> None:
        self._client.close()

    def _read(self) -> StoreContent:
        pair, presence = self._client.read(self._epoch_key, self._presence_key)
        sent_at = self._client.sent_at
        try:
            content = _content(pair, presence)
        except ValueError as error:
            raise EtcdError(f"the keys {PREFIX}{self._job.id}/ are not those of this job: {error}") from None
        if content.revision != self._seen[0]:
            self._seen = content.revision, boottime()
        view = self.view._replace(content=content)
        if self._epoch is not None and not view.outdated:
            if rules.confirms(content, self._job.identity, self._epoch):
                view = self._confirmed(view, sent_at + self._ttl)
            else:
                view = view._replace(outdated=True)
        self.view = view
        return content

    def _confirmed(self, view: StoreView, until: float) -> StoreView:
        coordinates = view.standing is Standing.WON
        valid = min(until, self._lease_until, self._written_until) if coordinates else 0.0
        return view._replace(reachable_until=until, valid_until=valid)

    def _attempt(self, content: StoreContent, record: StoreRecord) -> None:
        """Take the epoch if the rules allow it. The next read shows whether that succeeded, also if its answer is lost."""
        standing = rules.standing(content, record)
        if standing is Standing.CLAIM:
            unchanged = self._conditions(content)
            puts = Put(self._epoch_key, rules.write(record), self._archive_lease()), self._presence()
            self.view = self.view._replace(seen_at=self._seen[1])
            self._written_until = self._written_until or boottime() + self._ttl  # if its answer is lost
            self._write(unchanged, puts)
            content = self._read()
            standing = rules.standing(content, record)
        if standing is Standing.WON:
            self._epoch = record.epoch
            self.view = self.view._replace(standing=standing, won_at=boottime())
            self._read()
        elif standing is not Standing.CLAIM:
            self.view = self.view._replace(standing=standing)

    def _coordinate(self, content: StoreContent, record: StoreRecord) -> None:
        """Write the record, which may have changed, and put back a presence that the store has ended early."""
        if self.view.outdated:
            return
        puts = [Put(self._epoch_key, rules.write(record), self._archive_lease())]
        if rules.may_restore(content, record) and boottime() < self.view.valid_until:
            puts.append(self._presence())
        elif not rules.is_present(content, record):
            return  # it has lost its presence for too long, or to another process
        if self._write(self._conditions(content), puts):
            self._read()

    def _write(self, unchanged: Sequence[Unchanged], puts: Sequence[Put]) -> bool:
        """Write keys, and return whether they were changed, as the answer of the store has it."""
        changed = self._client.change(unchanged, puts)
        if changed:
            self._written_until = self._client.sent_at + self._ttl
        return changed

    def _conditions(self, content: StoreContent) -> Tuple[Unchanged, Unchanged]:
        return (
            Unchanged(self._epoch_key, content.revision),
            Unchanged(self._presence_key, content.since, created=True),
        )

    def _keep_presence(self) -> None:
        if self._lease and self._client.keep(self._lease):
            self._lease_until = self._client.sent_at + self._ttl
        else:
            self._lease = 0

    def _presence(self) -> Put:
        if not self._lease:
            self._lease = self._client.grant(self._ttl)
            self._lease_until = self._client.sent_at + self._ttl
        return Put(self._presence_key, rules.write_presence(self._job.sender), self._lease)

    def _archive_lease(self) -> int:
        """Renew the lease of the record, so that a job whose nodes are all lost leaves nothing in the store for ever."""
        now = boottime()
        if not self._archive or now - self._archived_at >= _RENEWAL:
            if not (self._archive and self._client.keep(self._archive)):
                self._archive = self._client.grant(ARCHIVE)
            self._archived_at = now
        return self._archive

    def _leave(self) -> None:
        if self._lease:
            self._client.revoke(self._lease)
        self._lease = 0


def _content(pair: Optional[KeyValue], presence: Optional[KeyValue]) -> StoreContent:
    """Read the content of the store from its keys. Raises ValueError."""
    content = StoreContent()
    if pair:
        content = content._replace(record=rules.read(pair.value), revision=pair.written)
    if presence:
        content = content._replace(presence=rules.read_presence(presence.value), since=presence.created)
    return content
