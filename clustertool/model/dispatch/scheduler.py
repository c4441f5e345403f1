"""The scheduler of a dispatch decides on the laptop which node is sent which piece next.

A method for each event takes in what happened and returns what to do. There are no sockets, threads or clock: `now` is the time
in seconds of any clock that only goes forward. The state is changed in place: it may have 100,000 pieces for each node.

A sender that is free sends, in this order:

    1. a piece that a node gets from the laptop only: it reaches no other node, or what another node got never came on
    2. nothing, for at most _SETTLE, while a node that may have pieces has not reported which
    3. a piece that no node has, to the node that was sent the fewest bytes; to a slow node only if no other node lacks it
    4. a piece that a slow node should have by now, or that takes far longer than others took, to one other node
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import AbstractSet, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from clustertool.model.dispatch import topology
from clustertool.model.dispatch.late_pieces import LatePieces

SETTLE = 1.0  # seconds that the others have to report what they have, once one did
_SENDERS = 3  # pieces on their way at a time, not counting those that a slow node keeps from moving:
_MOST_SENDERS = 32
_MEET = 3.0  # seconds after which the nodes that are ready get their sources without the others
_SOURCES = 12  # sources that a node is given: the best, and some for when they fail
_GRACE = 3.0  # seconds for the nodes to pass on a piece before it is sent once more
_BEAT = 5.0
_STALL = 4.0  # seconds without a byte taken, after which a piece is sent to another node as well
LOST = 20.0  # seconds without a message, or without a byte taken, after which a node is given up
_REST = 10.0  # seconds in which a slow node gets nothing that others wait for
_DAMAGED = 3  # times that a node may report a damaged piece
_NOTHING = -1  # instead of a piece: a list of sources is on its way

Address = Tuple[str, int]


# -- actions ----------------------------------------------------------------------------------------------------------


class SendPiece(NamedTuple):
    """Send a piece to a node."""

    node: int
    piece: int


class SendSources(NamedTuple):
    """The node is to keep connections to `degree` of these, the best first."""

    node: int
    sources: Tuple[Address, ...]
    degree: int


class SendBeat(NamedTuple):
    """Send a sign of life to a node."""

    node: int


class Cause(enum.Enum):
    """Why a node is given up."""

    DAMAGED = "damaged"  # pieces arrive damaged
    STUCK = "stuck"  # it takes no bytes
    SILENT = "silent"  # it sends no report
    ALONE = "alone"  # it reaches no node that has the pieces, and the laptop does not have them
    SOURCELESS = "sourceless"  # no node is left that has all pieces, and the laptop does not have them


class GiveUp(NamedTuple):
    """The node has failed; what is being sent to it is to be interrupted."""

    node: int
    cause: Cause


Action = Union[SendPiece, SendSources, SendBeat, GiveUp]


# -- state ------------------------------------------------------------------------------------------------------------


class DispatchPhase(enum.Enum):
    """How far a node is in a dispatch. READY: its relay listens. DONE: it has all pieces."""

    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"


@dataclass
class Member:
    """One node; a helper has the release and only serves. `lacks` None: not known yet. Times are those of the events."""

    node: int
    address: str
    helper: bool = False
    alone: bool = False  # it reaches no other node: all it lacks comes from the laptop
    last_report: float = 0.0
    phase: DispatchPhase = DispatchPhase.STARTING
    port: int = 0
    empty: bool = False
    lacks: Optional[Set[int]] = None
    direct: Set[int] = field(default_factory=set)  # what it is to get from the laptop, whatever other nodes have
    why_alone: str = ""
    new_sources: Optional[SendSources] = None  # to be sent once nothing else is on its way
    sending: float = 0.0  # when bytes of `piece`, or of a list of sources, were taken last; 0: nothing is on its way
    piece: int = _NOTHING
    seeding: bool = False  # others wait for the piece, too
    sent: int = 0  # bytes
    slow: float = 0.0  # until then it gets nothing that others wait for
    damaged: int = 0

    @property
    def failed(self) -> bool:
        return self.phase is DispatchPhase.FAILED

    @property
    def open(self) -> bool:
        """Whether the node still has to receive something."""
        return self.phase in (DispatchPhase.STARTING, DispatchPhase.READY) and not self.helper

    @property
    def seeds(self) -> bool:
        """Whether other nodes can get from this node what it is sent."""
        return self.open and not self.alone

    @property
    def free(self) -> bool:
        """Whether a piece can be sent to the node now."""
        return self.phase is DispatchPhase.READY and bool(self.lacks) and not self.sending

    @property
    def may_have_more(self) -> bool:
        """Whether the node may have pieces that it has not reported: with a release or a store, until it has the manifest."""
        return not self.failed and (self.helper and self.lacks is None or self.lacks == {0} and not self.empty)

    def reach(self, others: int, failures: Sequence[str], live: int) -> None:
        """Set `alone` and its reason if the node is connected to no source, and all of its first sources have failed.

        others: how many other nodes are there. live: how many sources it is connected to.
        """
        if not live and len(failures) >= min(topology.degree(others + 1), others):
            if not self.alone:
                self.why_alone = failures[0] if failures else "no other node is there"
            self.alone = True


class Scheduler:
    """The state of a dispatch. `sizes`: bytes of each piece; piece 0 is the manifest. `report`: seconds between two reports.

    Without `relays` every node gets everything from the laptop. has_pieces: of the laptop; without them it sends the manifest
    only, and helpers have them.
    """

    def __init__(
        self,
        members: Iterable[Member],
        sizes: Sequence[int],
        report: float,
        relays: bool,
        now: float,
        has_pieces: bool = True,
    ) -> None:
        self.members = {member.node: member for member in members}
        for member in self.members.values():
            member.last_report, member.alone = now, not relays
        self._sizes = sizes
        self._relays = relays
        # When the nodes get sources although some are not ready; 0: all that are ready have theirs.
        self._meet = now + _MEET
        self._settled = 0.0  # until when nodes that may have pieces are waited for
        self._beat = 0.0
        # Pieces that no node has which passes them on; the others, and since when:
        self._has_pieces = has_pieces
        self._missing = set(range(len(sizes) if has_pieces else 1))
        self._seeded: Dict[int, float] = {}
        self._confirmed: Set[int] = set()  # those of them that such a node has reported
        self._pace = LatePieces(report)
        self._late: Dict[int, int] = {}  # pieces that should have come -> the slow node
        self._copied: Set[int] = set()  # late pieces that another node was sent as well
        self._width = _SENDERS

    @property
    def over(self) -> bool:
        """Whether no node has to receive anything any more."""
        return not any(member.open for member in self.members.values())

    @property
    def gentle(self) -> bool:
        """Whether nodes still have to get their lists of sources: a piece must not delay them."""
        return bool(self._meet)

    @property
    def served(self) -> Mapping[int, str]:
        """The reason why it reaches no other node, by each node that got its pieces from the laptop because of that."""
        return {node: member.why_alone for node, member in self.members.items() if member.why_alone}

    def unsent(self) -> int:
        """Estimate how many bytes the laptop still has to send.

        They are of pieces that no node has, and of those that a node gets only from the laptop.
        """
        first = sum(self._sizes[piece] for piece in self._missing) if self._relays else 0
        return first + sum(self._sizes[piece] for one in self.members.values() if one.open for piece in one.direct)

    def _actions(self, now: float, *first: Action) -> List[Action]:
        """Return the actions `first`, and after them the lists of sources and the pieces that can be sent now."""
        return [*first, *self._send_source_lists(now), *self._choose_sends(now)]

    # -- what happens: a method for each event --

    def reported(self, node: int, now: float) -> bool:
        """Record that a node has sent a report, and return whether the node has not failed before."""
        self.members[node].last_report = now
        return not self.members[node].failed

    def ready(self, node: int, port: int, empty: bool, now: float) -> List[Action]:
        """Record that a node's relay listens at `port`; return what the laptop sends next: lists of sources, and pieces.

        empty: the node has no piece of any release.
        """
        member = self.members[node]
        member.phase, member.port, member.empty = DispatchPhase.READY, port, empty
        member.lacks = {0} if member.lacks is None else member.lacks
        member.direct = {0} if member.alone else set()
        self._meet = self._meet or now
        return self._actions(now)

    def compared(self, node: int, lacks: AbstractSet[int], has: Iterable[int], now: float) -> List[Action]:
        """Record what a node lacks and has, by the manifest; return what to send.

        A node that is alone gets all from the laptop.
        """
        member = self.members[node]
        member.lacks = set(lacks)
        self._settled = self._settled or now + SETTLE
        if member.alone:
            member.direct = set(lacks)
        else:
            for piece in has:
                self._record_seeded(piece, now)
        return self._actions(now)

    def came(self, node: int, pieces: Sequence[int], live: int, now: float) -> List[Action]:
        """Record pieces that a node got from the laptop since its last report; return what to send.

        live: how many sources the node is connected to; if it has some, it is not alone any more.
        """
        member = self.members[node]
        for piece in pieces:
            self._pace.came(node, piece, now)
        if not member.alone:
            self._confirmed.update(pieces)
        elif live and self._relays:  # it was only slow to connect
            member.alone, member.why_alone, member.direct = False, "", set()
        return self._actions(now)

    def idle(self, node: int, lacks: AbstractSet[int], live: int, failures: Sequence[str], now: float) -> List[Action]:
        """Record that nothing new has come to a node for a while; return what to send.

        failures: why each source that failed did. If it reaches no other node, it gets all from the laptop; else the pieces
        that other nodes have not passed on.
        """
        member = self.members[node]
        if self._relays:
            others = sum(one.phase in (DispatchPhase.READY, DispatchPhase.DONE) for one in self.members.values()) - 1
            member.reach(others, failures, live)
            missing = lacks - self._pace.on_the_way(node)
            member.lacks = set(lacks)
            member.direct = set(missing) if member.alone else self._find_lost(missing, now)
        return self._actions(now)

    def _find_lost(self, lacks: AbstractSet[int], now: float) -> Set[int]:
        """Find lacking pieces that were sent to a node more than 3 s ago and have not been passed on.

        The time starts anew for each of them, so that one is sent to one node at a time.
        """
        found = {piece for piece in lacks if self._seeded.get(piece, now) < now - _GRACE}
        self._seeded.update(dict.fromkeys(found, now))
        return found

    def damaged(self, node: int, piece: int, now: float) -> List[Action]:
        """Record that a piece has arrived damaged; return what to send, this piece again, or give the node up at the fourth."""
        member = self.members[node]
        member.damaged += 1
        if member.damaged > _DAMAGED:
            return self._actions(now, self._give_up(member, Cause.DAMAGED))
        if member.lacks is not None:
            member.lacks.add(piece)
            member.direct.add(piece)
        return self._actions(now)

    def done(self, node: int, now: float) -> List[Action]:
        """Record that a node has all pieces; return what to send to others."""
        self.members[node].phase, self.members[node].lacks = DispatchPhase.DONE, set()
        return self._actions(now)

    def failed(self, node: int, now: float) -> List[Action]:
        """Record that a node has failed; return what to send to others."""
        self.members[node].phase = DispatchPhase.FAILED
        return self._actions(now)

    def taken(self, node: int, now: float) -> None:
        """Record that the connection to a node has taken bytes."""
        self.members[node].sending = now

    def sent(self, node: int, good: bool, now: float) -> List[Action]:
        """Record that what was on its way to a node was sent, or (not `good`) has failed; return what to send next."""
        member = self.members[node]
        piece, member.piece, member.sending = member.piece, _NOTHING, 0.0
        if piece != _NOTHING:
            member.sent += self._sizes[piece]
            member.direct.discard(piece)
            if good and member.lacks is not None:
                member.lacks.discard(piece)
                if not member.alone:
                    self._record_seeded(piece, now)
        return self._actions(now, *self._send_new_sources(member, now))

    def tick(self, now: float) -> List[Action]:
        """Give up nodes that take or report nothing for 20 s, and if the laptop has no pieces those that no node can serve.

        Marks slow nodes, and sends beats every 5 s to nodes with nothing on its way. Returns these actions, and what to send
        next. Call it several times a second.
        """
        self._mark_slow_nodes(now)
        actions: List[Action] = []
        present = [member for member in self.members.values() if not member.failed]
        if now - self._beat > _BEAT:
            self._beat = now
            actions += [SendBeat(member.node) for member in present if not member.sending]
        for member in present:
            if member.phase is DispatchPhase.DONE and not member.helper:
                continue
            if member.sending and now - member.sending > LOST:
                actions.append(self._give_up(member, Cause.STUCK))
            elif member.open and now - member.last_report > LOST:
                actions.append(self._give_up(member, Cause.SILENT))
            elif member.open and not self._has_pieces and (cause := self._why_cut_off(member)):
                actions.append(self._give_up(member, cause))
        return self._actions(now, *actions)

    def _why_cut_off(self, member: Member) -> Optional[Cause]:
        """Return why pieces that only nodes have cannot reach this node; None if they can."""
        if member.alone:
            return Cause.ALONE
        sources = (one for one in self.members.values() if not one.failed)
        has = any(one.helper or one.phase is DispatchPhase.DONE for one in sources)
        return None if has else Cause.SOURCELESS

    def _record_seeded(self, piece: int, now: float) -> None:
        """Record that a node which passes pieces on has this one."""
        self._seeded.setdefault(piece, now)
        self._missing.discard(piece)

    @staticmethod
    def _give_up(member: Member, cause: Cause) -> GiveUp:
        """Set a node to FAILED, and return the action."""
        member.phase = DispatchPhase.FAILED
        return GiveUp(member.node, cause)

    def _mark_slow_nodes(self, now: float) -> None:
        """Record late pieces, mark their nodes as slow for 10 s, and allow one more sender for each that is stuck with one."""
        late = {(node, piece) for node, piece in self._pace.find_late(now) if not self.members[node].failed}
        for node, _ in late:
            self.members[node].slow = now + _REST
        stuck = sum(self.members[node].piece == piece for node, piece in late)
        self._late = {piece: node for node, piece in late if self.members[node].seeds}
        self._width = min(_SENDERS + stuck, _MOST_SENDERS)

    # -- sources: each node gets the others' addresses --

    def _send_source_lists(self, now: float) -> List[Action]:
        """Send all ready nodes their sources once none is starting, or 3 s have passed; later again if a node becomes ready."""
        present = [member for member in self.members.values() if not member.failed]
        met = self._meet and (now > self._meet or all(member.phase is not DispatchPhase.STARTING for member in present))
        if not met:
            return []
        self._meet = 0.0
        ready = [member for member in present if member.phase is not DispatchPhase.STARTING] if self._relays else []
        places = [(member.address, member.port) for member in ready]
        degree = topology.degree(len(ready))
        actions: List[Action] = []
        for position, member in enumerate(ready):
            best = topology.sources(len(ready), position)[:_SOURCES]
            member.new_sources = SendSources(member.node, tuple(places[other] for other in best), degree)
            actions += self._send_new_sources(member, now)
        return actions

    @staticmethod
    def _send_new_sources(member: Member, now: float) -> List[Action]:
        """Send a node its new list of sources, unless something is on its way to it."""
        if member.new_sources is None or member.sending or member.failed:
            return []
        new_sources, member.new_sources, member.sending = member.new_sources, None, now
        return [new_sources]

    # -- pieces: what each free sender sends --

    def _choose_sends(self, now: float) -> List[Action]:
        """Choose pieces to send and their nodes, until all senders are busy or there is nothing to send."""
        actions: List[Action] = []
        busy = sum(bool(member.sending) and member.piece != _NOTHING for member in self.members.values())
        while busy + len(actions) < self._width and (send := self._choose_next(now)):
            actions.append(send)
        return actions

    def _choose_next(self, now: float) -> Optional[SendPiece]:
        """Choose the next piece to send, and its node, in the order of the module's docstring; None if there is none now."""
        free = [member for member in self.members.values() if member.free]
        free.sort(key=lambda member: (member.slow > now, member.sent, member.node))
        for member in free:
            if not self._has_pieces:
                member.direct &= {0}
            if member.direct and member.lacks and not member.direct.isdisjoint(member.lacks):
                return self._send(member, min(member.direct & member.lacks), now)
        if now < self._settled and 0 in self._seeded and any(one.may_have_more for one in self.members.values()):
            return None
        seeding = [member for member in free if member.seeds]
        moving = self._find_moving(now)
        for member in seeding:
            found = self._missing & (member.lacks or set())
            piece = min(found - moving, default=_NOTHING)
            if piece != _NOTHING and not (member.slow > now and self._quick_node_lacks(piece, now)):
                return self._send(member, piece, now, seeding=True)
        return self._copy_late_piece([member for member in seeding if member.slow <= now], now)

    def _find_moving(self, now: float) -> Set[int]:
        """Find the pieces on their way to a node that passes them on, and that has taken bytes in the last 4 s."""
        moving = [one for one in self.members.values() if one.sending and now - one.sending < _STALL]
        return {member.piece for member in moving if member.seeding and not member.failed}

    def _quick_node_lacks(self, piece: int, now: float) -> bool:
        """Return whether a node that passes pieces on, and is not slow, lacks a piece."""
        others = self.members.values()
        return any(one.seeds and one.slow <= now and piece in (one.lacks or ()) for one in others)

    def _copy_late_piece(self, quick: Sequence[Member], now: float) -> Optional[SendPiece]:
        """Choose a late piece, and one of the quick nodes that lacks it; None if there is no such piece.

        Each piece is sent again once. Of the slowest pieces only one at a time, and only when the copies before it have come:
        another node is quicker then.
        """
        overdue: Dict[int, int] = {}
        if quick and self._copied <= self._confirmed:
            overdue = {piece: node for node, piece in self._pace.find_slowest(now) if self.members[node].seeds}
        waited = {**overdue, **self._late}
        for piece in sorted(waited.keys() - self._copied - self._confirmed):
            for member in quick:
                if member.node != waited[piece] and piece in (member.lacks or ()):
                    self._copied.add(piece)
                    return self._send(member, piece, now, seeding=True)
        return None

    def _send(self, member: Member, piece: int, now: float, seeding: bool = False) -> SendPiece:
        """Record that a piece is on its way to a node, and return the action. seeding: other nodes wait for it, too."""
        member.sending, member.piece, member.seeding = now, piece, seeding
        self._pace.begun(member.node, piece, self._sizes[piece], now)
        return SendPiece(member.node, piece)
