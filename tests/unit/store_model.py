"""A model of an elastic job with a store: members, their guards, the store, and the network, with the rules of the real code.

The rules of the store, the leases, and what an epoch waits for are the real functions. The model has the rest: each member is a
process that searches for a coordinator, or coordinates, and has ranks. Time goes by in ticks; a world is a value, and StoreTurn
makes the next one.

In each tick first faults change, then requests that were delayed reach the store, then the guards act, and then each member
that runs takes its turn: it reads its messages and the answer of the store to its last request, acts, and makes the next
request. Messages arrive in the next tick, later if a link is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from clustertool.model.elastic import epochs
from clustertool.model.elastic.epochs import Gathering, Readiness
from clustertool.model.elastic.lease import Lease, is_silent
from clustertool.model.joining import store_rules as rules
from clustertool.model.joining.store_rules import Standing, StoreContent, StoreRecord
from clustertool.model.wire.coordinator_messages import Incarnation

LEASE = 4  # ticks, of a heartbeat: the message and its answer take two
TTL = 5  # ticks, of a confirmation of the store
PATIENCE = 3  # ticks in which a coordinator of an epoch has to take the next one
JOB = "token"
EVERYWHERE = -1
Message = tuple[Any, ...]  # its sender, its kind and its epoch first
Fault = tuple[str, int]  # its kind and the member, EVERYWHERE for none

# Faults of a member: its links are cut in one direction; it does not reach the store, or does not get its answers, or its
# requests come late; its process is frozen, or its machine is lost, and starts again; it is cut off from all.
CUT_UP, CUT_DOWN, NO_STORE, NO_ANSWER, LATE = "cut up", "cut down", "no store", "no answer", "late"
FROZEN, CRASHED, ALONE = "frozen", "crashed", "alone"
# One half is this member, and only this half, or only the other one, reaches the store.
HALF_WITH, HALF_WITHOUT = "half with the store", "half without the store"
# Of the store: it does not answer; it ends all leases now; it keeps leases.
DOWN, ENDS_LEASES, KEEPS_LEASES = "down", "ends leases", "keeps leases"
OF_MEMBER = (CUT_UP, CUT_DOWN, NO_STORE, NO_ANSWER, LATE, FROZEN, CRASHED, ALONE, HALF_WITH, HALF_WITHOUT)
OF_STORE = (DOWN, ENDS_LEASES, KEEPS_LEASES)


class Ask(NamedTuple):
    """A change that is sent to the store: if nothing has changed since `seen`. record, presence: None leaves them."""

    seen: tuple[int, int]
    record: StoreRecord | None
    presence: Incarnation | None


class Store(NamedTuple):
    """revision: of the last change. until: when the lease of the presence ends."""

    content: StoreContent = StoreContent()
    revision: int = 0
    until: float = 0.0


class Member(NamedTuple):
    """life: how often its machine has started. known: the highest epoch that it has been in.

    phase: "seek" a coordinator, "wait" for its order and "follow" it, "claim" an epoch, "gather" members,
    "launch" and "publish" them, "lead", or "end" an epoch.
    epoch, chief: of which it may have ranks, and its coordinator. lease: of the heartbeats. guard: what the guard knows.
    seen, seen_at: the newest answer of the store, and when its request was sent. presence_until, written_until: of the lease of
    its presence, and of its last write, as the member knows them. version: the revision of the record, and when the member has
    seen it first. claimed_at: when it had seen the record first that it has claimed to replace, and former: its coordinator.
    record: of its claim and its epoch. since: when the phase began, or since when the store has no coordinator.
    """

    life: int = 0
    known: int = -1
    phase: str = "seek"
    epoch: int = -1
    chief: int = -1
    ranks: int = -1
    armed: bool = False
    lease: Lease = Lease(LEASE, 0)
    guard: float = math.inf
    alive: bool = True
    seen: StoreContent | None = None
    seen_at: float = 0.0
    presence_until: float = 0.0
    written_until: float = 0.0
    version: tuple[int, float] = (0, 0.0)
    claimed_at: float = 0.0
    former: int = -1
    record: StoreRecord | None = None
    since: float = 0.0
    alone_since: float = -1.0
    followed_at: float = 0.0
    published_at: float = 0.0
    # of a coordinator
    members: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    clean: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    received: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()
    offers: frozenset[int] = frozenset()
    gathering: Gathering | None = None
    continues: bool = False


class StoreWorld(NamedTuple):
    """mail: messages on the way, by receiver. late: requests that have not reached the store, by member. begun: each epoch that
    had ranks, with the process that coordinated it. away: for how many ticks each member has not reached the store."""

    now: int
    members: tuple[Member, ...]
    mail: tuple[tuple[Message, ...], ...]
    store: Store = Store()
    late: tuple[Ask | None, ...] = ()
    faults: frozenset[Fault] = frozenset()
    begun: frozenset[tuple[int, Incarnation]] = frozenset()
    away: tuple[int, ...] = ()


def new_world(count: int) -> StoreWorld:
    return StoreWorld(0, (Member(),) * count, ((),) * count, late=(None,) * count, away=(0,) * count)


@functools.cache
def process(number: int, life: int) -> Incarnation:
    return Incarnation("boot", number + 1, life)


@functools.cache
def reach(faults: frozenset[Fault], count: int) -> tuple[tuple[bool, ...], frozenset[tuple[int, int]]]:
    """Which members reach the store, and (sender, receiver) of links that are cut."""
    numbers, reached = range(count), []
    for one in numbers:
        own = {(NO_STORE, one), (ALONE, one), (HALF_WITHOUT, one), (DOWN, EVERYWHERE)} & faults
        reached.append(not own and not any(kind == HALF_WITH and half != one for kind, half in faults))
    both = {one for kind, one in faults if kind in (ALONE, HALF_WITH, HALF_WITHOUT)}
    cut = {
        (sender, receiver)
        for sender in numbers
        for receiver in numbers
        if {sender, receiver} & both or {(CUT_UP, sender), (CUT_DOWN, receiver)} & faults
    }
    return tuple(reached), frozenset(cut)


class StoreTurn:
    """One tick of a world. The methods can be overridden, to see that a wrong rule is found."""

    def __init__(self, world: StoreWorld, faults: Iterable[Fault]) -> None:
        self.now = world.now + 1
        self.faults = frozenset(faults)
        self.reached, self.apart = reach(self.faults, len(world.members))
        self.members = list(world.members)
        self.mail = list(world.mail)
        self.store = world.store
        self.late = list(world.late)
        self.begun = world.begun
        self.away = tuple(0 if there else min(TTL + 1, long + 1) for there, long in zip(self.reached, world.away))
        self.sent: list[tuple[int, Message]] = []

    def run(self) -> StoreWorld:
        self.store_turn()
        for number in range(len(self.members)):
            self.guard(number)
        for number in range(len(self.members)):
            if self.members[number].alive and (FROZEN, number) not in self.faults:
                self.member_turn(number)
        for receiver, message in self.sent:
            self.mail[receiver] = (*self.mail[receiver], message)
        late, members = tuple(self.late), tuple(self.members)
        state = members, tuple(self.mail), self.store, late, self.faults, self.begun, self.away
        return StoreWorld(self.now, *state)

    # -- the network and the store --

    def reaches_store(self, number: int) -> bool:
        return self.reached[number]

    def store_turn(self) -> None:
        for number, ask in enumerate(self.late):
            if ask is not None and (LATE, number) not in self.faults and self.reaches_store(number):
                self.late[number] = None
                self.execute(ask)
        over = self.now >= self.store.until and (KEEPS_LEASES, EVERYWHERE) not in self.faults
        if self.store.content.presence is not None and (over or (ENDS_LEASES, EVERYWHERE) in self.faults):
            content = self.store.content._replace(presence=None, since=0)
            self.store = self.store._replace(content=content)

    def execute(self, ask: Ask) -> None:
        content = self.store.content
        if not self.unchanged(ask, content):
            return
        revision, until = self.store.revision + 1, self.store.until
        if ask.record is not None:
            content = content._replace(record=ask.record, revision=revision)
        if ask.presence is not None:
            since = revision if content.presence is None else content.since
            content, until = content._replace(presence=ask.presence, since=since), self.now + TTL
        self.store = Store(content, revision, until)

    def unchanged(self, ask: Ask, content: StoreContent) -> bool:
        return ask.seen == (content.revision, content.since)

    def change(self, number: int, record: StoreRecord | None, presence: Incarnation | None) -> None:
        seen = self.members[number].seen
        assert seen is not None
        ask = Ask((seen.revision, seen.since), record, presence)
        if (LATE, number) in self.faults:
            self.late[number] = ask
        elif self.reaches_store(number):
            before = self.store.revision
            self.execute(ask)
            if self.store.revision > before and (NO_ANSWER, number) not in self.faults:
                self.set(number, written_until=float(self.now + TTL))

    def read(self, number: int) -> None:
        """The answer is there in the next turn; a member that is slow may act on it then."""
        if self.reaches_store(number) and not {(NO_ANSWER, number), (LATE, number)} & self.faults:
            content, version = self.store.content, self.members[number].version
            if content.revision != version[0]:
                version = content.revision, float(self.now)
            self.set(number, seen=content, seen_at=float(self.now), version=version)

    def renew(self, number: int) -> None:
        """Keep the lease of the presence, which the store may have ended."""
        me = process(number, self.members[number].life)
        if self.store.content.presence == me and self.reaches_store(number) and (LATE, number) not in self.faults:
            self.store = self.store._replace(until=self.now + TTL)
            if (NO_ANSWER, number) not in self.faults:
                self.set(number, presence_until=float(self.now + TTL))

    # -- guards --

    def set(self, number: int, **values: Any) -> None:
        self.members[number] = self.members[number]._replace(**values)

    def guard(self, number: int) -> None:
        """The guard kills the ranks at the time that it knows, also those of a frozen process."""
        member = self.members[number]
        if (CRASHED, number) in self.faults:
            self.set(number, alive=False, ranks=-1)
            self.mail[number] = ()
        elif not member.alive:
            self.members[number] = Member(life=member.life + 1, since=self.now)
        elif self.now >= member.guard:
            self.set(number, ranks=-1, lease=member.lease._replace(ended=True))

    # -- members --

    def post(self, sender: int, receivers: Iterable[int], *tokens: Any) -> None:
        self.sent += [(receiver, (sender, *tokens)) for receiver in receivers if receiver != sender]

    def arrived(self, number: int) -> list[Message]:
        mail = self.mail[number]
        if not self.apart:
            self.mail[number] = ()
            return list(mail)
        self.mail[number] = tuple(message for message in mail if (message[0], number) in self.apart)
        return [message for message in mail if (message[0], number) not in self.apart]

    def member_turn(self, number: int) -> None:
        messages = self.arrived(number)
        for message in messages:
            self.take(number, *message)
        member = self.members[number]
        if member.epoch >= 0 and member.armed:
            self.keep_lease(number)
        getattr(self, f"{self.members[number].phase}_turn")(number)
        if self.members[number].phase in ("claim", "gather", "launch", "publish", "lead", "end"):
            self.renew(number)
        self.read(number)
        member = self.members[number]
        self.set(number, guard=self.end(number) if member.armed else math.inf)

    def end(self, number: int) -> float:
        """By when the ranks of this member must be dead."""
        member = self.members[number]
        return min(member.lease.end, self.store_end(number))

    def store_end(self, number: int) -> float:
        member, seen = self.members[number], self.members[number].seen
        if seen is None or not rules.confirms(seen, JOB, member.epoch):
            return 0.0 if seen is not None and member.seen_at >= member.followed_at else member.followed_at + LEASE
        until = member.seen_at + TTL
        return min(until, self.written_end(number)) if member.chief == number else until

    def written_end(self, number: int) -> float:
        """Of a coordinator's ranks."""
        member = self.members[number]
        return min(member.presence_until, member.written_until)

    def keep_lease(self, number: int) -> None:
        """Its own supervisor ends the ranks of a member whose lease has ended; it joins again."""
        member = self.members[number]
        lease = member.lease.renew(self.now) if member.chief == number else member.lease.check(self.now)
        if lease.ended or self.now >= self.store_end(number):
            if member.chief == number:
                self.set(number, lease=lease._replace(ended=True), ranks=-1)
                if member.phase == "lead":
                    self.end_epoch(number)
            else:
                self.seek(number)
        else:
            self.set(number, lease=lease)

    def seek(self, number: int) -> None:
        """The member has no ranks, and no coordinator."""
        member = self.members[number]
        entered = member.epoch if member.phase in ("follow", "lead", "end") else -1
        self.members[number] = Member(
            member.life,
            max(member.known, entered),
            seen=member.seen,
            seen_at=member.seen_at,
            version=member.version,
            since=self.now,
        )

    def take(self, number: int, sender: int, kind: str, epoch: int, *more: Any) -> None:
        """One message."""
        member = self.members[number]
        if kind == "offer":
            self.offered(number, sender, epoch)
        elif kind == "launch" and member.phase == "seek" and epochs.may_enter(epoch, member.known):
            self.set(number, phase="wait", epoch=epoch, chief=sender, followed_at=self.now, since=more[0])
            self.post(number, [sender], "launched", epoch, more[0])
        elif epoch != member.epoch:
            return
        elif kind == "launched" and member.phase == "launch" and more[0] == member.since:
            self.set(number, joined=member.joined | {sender})
        elif kind == "go" and member.phase == "wait" and more[0] == member.since:
            self.set(number, phase="follow", lease=Lease(LEASE, self.now), armed=False)
        elif kind == "beat" and member.phase in ("lead", "end"):
            self.beaten(number, sender, more[0])
        elif kind == "beat" and sender == member.chief:
            self.set(number, lease=member.lease.acknowledge(more[0]))
        elif kind == "start" and sender == member.chief:
            self.set(number, armed=True)
            self.keep_lease(number)
            if self.members[number].phase == "follow" and not self.members[number].lease.ended:
                self.begin(number)
        elif kind == "stop" and sender == member.chief:
            self.set(number, ranks=-1, armed=False)
            self.post(number, [sender], "clean", epoch)
        elif kind == "clean":
            self.set(number, clean=member.clean | {sender}, lost=member.lost - {sender})
        elif kind == "finish" and sender == member.chief:
            self.seek(number)

    def begin(self, number: int) -> None:
        """The ranks of its epoch start."""
        member = self.members[number]
        chief = self.members[member.chief]
        self.set(number, ranks=member.epoch)
        if member.chief == number:
            self.begun |= {(member.epoch, process(number, chief.life))}

    # -- without an epoch, or in that of another one --

    def seek_turn(self, number: int) -> None:
        member, content = self.members[number], self.members[number].seen
        if content is None:
            return
        if member.continues:
            if self.now > member.since:
                self.claim(number)
            return
        if content.presence is not None:
            record = content.record
            self.set(number, alone_since=-1.0)
            if record is not None and rules.is_present(content, record) and record.member != number:
                self.post(number, [record.member], "offer", member.known)
            return
        if member.alone_since < 0:
            self.set(number, alone_since=self.now)
        elif self.now - member.alone_since > number:
            self.claim(number)

    def wait_turn(self, number: int) -> None:
        """The connection to the coordinator breaks if nothing comes."""
        if self.now - self.members[number].followed_at > 2 * PATIENCE:
            self.seek(number)

    def follow_turn(self, number: int) -> None:
        member = self.members[number]
        if member.lease.ended and not member.armed or self.now >= member.lease.end:
            return self.seek(number)
        lease = member.lease.send(self.now)
        self.set(number, lease=lease)
        self.post(number, [member.chief], "beat", member.epoch, lease.number)
        return None

    # -- coordinators --

    def claim(self, number: int) -> None:
        member = self.members[number]
        assert member.seen is not None
        before, me = member.seen.record, process(number, member.life)
        epoch = max(member.known, before.attempt if before is not None else -1) + 1
        nodes, was = (before.nodes, before.epoch) if before is not None else ((), -1)
        record = StoreRecord(epoch, number, "", 0, me, JOB, epoch, nodes)
        continues = member.continues and self.goes_on(member.known, was)
        former = before.member if before is not None else -1
        self.set(number, phase="claim", record=record, since=self.now, continues=continues, written_until=0.0)
        self.set(number, former=former)
        self.claim_turn(number)

    def goes_on(self, known: int, was: int) -> bool:
        """Whether a coordinator knows which ranks of the epoch before its own may live: it has coordinated that one."""
        return known == was

    def claim_turn(self, number: int) -> None:
        member, content = self.members[number], self.members[number].seen
        record = member.record
        assert record is not None
        if self.now - member.since > PATIENCE and member.gathering is not None:
            return self.seek(number)
        if content is None:
            return None
        standing = rules.standing(content, record)
        if standing is Standing.CLAIM:
            sent_at = member.written_until or float(self.now + TTL)
            self.set(number, claimed_at=member.version[1], written_until=sent_at)
            self.change(number, record, record.incarnation)
            if self.store.content.presence == record.incarnation:
                self.set(number, presence_until=float(self.now + TTL))
        elif standing is Standing.WON:
            self.won(number)
        elif standing is Standing.LOST or content.presence not in (None, record.incarnation):
            return self.seek(number)
        return None

    def won(self, number: int) -> None:
        member = self.members[number]
        record = member.record
        assert record is not None
        before = frozenset(record.nodes)
        if member.continues and member.gathering is not None:
            gathering = member.gathering
        else:
            leases = self.former_leases(before, self.now, epochs.FormerCoordinator(member.former, member.claimed_at))
            gathering = Gathering(
                0,
                1,
                99,
                math.inf,
                self.now,
                first=False,
                leases=leases,
                expected=before,
                patience=1.0,
            )
        self.set(
            number,
            phase="gather",
            epoch=record.epoch,
            chief=number,
            gathering=gathering._replace(number=record.epoch),
            lease=Lease(LEASE, self.now),
            armed=False,
            offers=frozenset(),
            followed_at=0.0,
        )

    def former_leases(self, before: frozenset[int], now: float, former: epochs.FormerCoordinator) -> epochs.Leases:
        return epochs.former_leases(before, now, TTL, former)

    def offered(self, number: int, sender: int, known: int) -> None:
        """A member waits. One that was in the present epoch has ended its ranks."""
        member = self.members[number]
        if member.phase == "gather":
            self.set(number, offers=member.offers | {sender})
        elif member.phase in ("lead", "end") and sender in member.members and known >= member.epoch:
            self.set(number, clean=member.clean | {sender}, lost=member.lost - {sender})
            if member.phase == "lead":
                self.end_epoch(number)

    def gather_turn(self, number: int) -> None:
        member = self.members[number]
        if not self.may_coordinate(number):
            return self.seek(number)
        assert member.gathering is not None and member.record is not None
        present = member.offers | {number}
        if member.gathering.readiness(present, self.now) is not Readiness.START:
            return self.coordinate(number)
        self.set(number, phase="launch", members=present, joined=frozenset({number}), since=self.now)
        self.post(number, present, "launch", member.epoch, self.now)
        return self.launch_turn(number)

    def launch_turn(self, number: int) -> None:
        """All members prepare their part, or the others gather again."""
        member = self.members[number]
        assert member.record is not None
        if not self.may_coordinate(number):
            return self.seek(number)
        if member.joined >= member.members:
            record = member.record._replace(nodes=tuple(sorted(member.members)))
            self.set(number, phase="publish", record=record, published_at=self.now)
            return self.publish_turn(number)
        if self.now - member.since > PATIENCE:
            self.set(number, phase="gather", offers=frozenset())
        return self.coordinate(number)

    def may_coordinate(self, number: int) -> bool:
        """Whether a coordinator that gathers goes on: another one may have the epoch."""
        member = self.members[number]
        return member.seen is not None and rules.confirms(member.seen, JOB, member.epoch)

    def publish_turn(self, number: int) -> None:
        member = self.members[number]
        record = member.record
        assert record is not None and member.seen is not None
        if not self.may_coordinate(number) or self.now - member.published_at > PATIENCE:
            return self.seek(number)
        if member.seen.record == record:
            return self.lead(number)
        self.coordinate(number)
        return None

    def coordinate(self, number: int) -> None:
        """Write the record, and put back a presence that the store has ended early."""
        member = self.members[number]
        record, content = member.record, member.seen
        assert record is not None and content is not None
        presence = None
        if rules.may_restore(content, record) and self.now < member.presence_until:
            presence = record.incarnation
        elif not rules.is_present(content, record):
            return
        self.change(number, record, presence)

    def lead(self, number: int) -> None:
        member, count = self.members[number], len(self.members)
        received = (float(self.now),) * count
        mine = frozenset({number})
        values = {
            "joined": mine,
            "clean": frozenset(),
            "lost": frozenset(),
            "received": received,
            "numbers": (0,) * count,
        }
        self.set(number, phase="lead", armed=True, lease=Lease(LEASE, self.now), **values)
        self.post(number, member.members, "go", member.epoch, member.since)
        self.start_all(number)

    def start_all(self, number: int) -> None:
        """All have joined: the order to start. A coordinator whose own lease has ended starts nothing."""
        member = self.members[number]
        if member.joined >= member.members and member.ranks < 0:
            self.keep_lease(number)
            if self.members[number].phase == "lead":
                self.post(number, member.members, "start", member.epoch)
                self.begin(number)

    def beaten(self, number: int, sender: int, beat: int) -> None:
        member = self.members[number]
        if sender not in member.members or sender in member.lost or member.lease.ended:
            return
        at = (*member.received[:sender], float(self.now), *member.received[sender + 1 :])
        numbers = (*member.numbers[:sender], beat, *member.numbers[sender + 1 :])
        joined = member.joined | {sender}
        self.set(number, received=at, numbers=numbers, joined=joined)
        if joined != member.joined and member.phase == "lead":
            self.start_all(number)

    def lead_turn(self, number: int) -> None:
        self.coordinate(number)
        if self.silent(number):
            return self.end_epoch(number)
        return self.answer_beats(number)

    def silent(self, number: int) -> bool:
        """Give up the members of which no beat has come."""
        member = self.members[number]
        gone = {
            one
            for one in member.members - member.clean - member.lost - {number}
            if is_silent(member.received[one], self.now, LEASE)
        }
        self.set(number, lost=member.lost | gone)
        return bool(gone)

    def answer_beats(self, number: int) -> None:
        member = self.members[number]
        if not member.lease.ended:
            for one in member.members - member.lost:
                self.post(number, [one], "beat", member.epoch, member.numbers[one])

    def end_epoch(self, number: int) -> None:
        member = self.members[number]
        self.set(number, phase="end", ranks=-1, clean=member.clean | {number})
        self.post(number, member.members, "stop", member.epoch)
        self.end_turn(number)

    def end_turn(self, number: int) -> None:
        """Until all are clean or lost. Then it takes the next epoch, by what the store has then."""
        self.coordinate(number)
        self.silent(number)
        member = self.members[number]
        if not member.members <= member.clean | member.lost:
            return self.answer_beats(number)
        self.post(number, member.members, "finish", member.epoch)
        lost = {one: member.received[one] for one in member.lost & member.joined}
        gathering = Gathering(
            0,
            1,
            99,
            math.inf,
            self.now,
            first=False,
            leases=epochs.lost_leases(lost, LEASE),
            expected=member.members - member.lost,
            patience=1.0,
        )
        known, life = max(member.known, member.epoch), member.life
        content, at, version, until = member.seen, member.seen_at, member.version, member.presence_until
        self.members[number] = Member(
            life,
            known,
            "seek",
            seen=content,
            seen_at=at,
            version=version,
            presence_until=until,
            since=self.now,
            gathering=gathering,
            continues=True,
        )
        return None


def wrong(world: StoreWorld) -> str:
    """What must never be, or ""."""
    living: dict[int, list[int]] = {}
    for number, member in enumerate(world.members):
        if member.ranks >= 0:
            living.setdefault(member.ranks, []).append(number)
    if len(living) > 1:
        return f"ranks of several epochs live: {living}"
    alone = [
        number
        for number, member in enumerate(world.members)
        if member.ranks >= 0 and world.away[number] > TTL and world.now > member.followed_at + LEASE
    ]
    if alone:
        return f"ranks live without the store: {alone}"
    numbers = [epoch for epoch, _ in world.begun]
    if len(set(numbers)) < len(numbers):
        return f"the number of an epoch is used twice: {sorted(world.begun)}"
    return ""
