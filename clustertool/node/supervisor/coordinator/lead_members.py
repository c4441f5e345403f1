"""The members are the other nodes of a job as the lead sees them: their connections, heartbeats and unacknowledged messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Collection, Iterable, List, NamedTuple, Optional

from clustertool.model.wire.frames import Header
from clustertool.node.system.process_clock import ProcessClock
from clustertool.node.system.tls_link import Mailbox, TlsLink, beat, join_patience

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import RankOutput
    from clustertool.model.wire.lead_messages import Incarnation

_LATE = 1.0  # for a node that has not joined when the job ends
_MAX_BACKLOG = 4 << 20


class LeadMember:
    """One node. Messages to it stay in `mail` until it has acknowledged them, also if its connection breaks."""

    def __init__(self) -> None:
        self.mail = Mailbox()
        self.wire: Optional[TlsLink] = None
        self.received_at = 0.0  # by the lead's own clock
        self.blocked = 0.0  # seconds that this clock had left out by then
        self.joined = False
        self.left = False
        self.first_order = 0  # the number of the first message that is an order, 0 before
        self.ranks: List[RankOutput] = []  # the progress of its ranks when it reported that
        self.sender: Optional[Incarnation] = None  # the supervisor that has joined

    def disconnect(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.wire = None


class Silence(NamedTuple):
    """A node sent nothing for `limit` seconds of the lead's own clock, and `blocked` seconds that this clock left out."""

    node: int
    member: LeadMember
    limit: float
    blocked: float


class LeadMembers:
    """`clock`: the lead's own clock, which its loop turns."""

    def __init__(self, nodes: Iterable[int], loss_timeout: float, clock: ProcessClock) -> None:
        self.nodes = {node: LeadMember() for node in nodes}
        self._timeout = loss_timeout
        self._join_timeout = join_patience(loss_timeout, len(self.nodes))
        self._clock = clock
        self._beat_at = 0.0
        self._all_started = False  # every node has acknowledged its first order

    def wires(self) -> List[TlsLink]:
        return [member.wire for member in self.nodes.values() if member.wire is not None]

    def connect(self, member: LeadMember, wire: TlsLink, sender: Incarnation) -> None:
        """Use a new connection of a node, instead of its old one."""
        member.disconnect()
        member.wire, member.left, member.sender = wire, False, sender
        self._received(member)

    def read(self, member: LeadMember) -> List[Header]:
        """Return the messages that have arrived from a node. A broken connection is closed, and the node may connect again."""
        if member.wire is None:
            return []
        try:
            messages = member.wire.turn()
            if member.wire.backlog > _MAX_BACKLOG:
                raise ConnectionError("does not read")
        except ConnectionError:
            member.disconnect()
            return []
        if messages:
            self._received(member)
        return messages

    def _received(self, member: LeadMember) -> None:
        member.received_at, member.blocked = self._clock.now, self._clock.blocked

    def post(self, message: Header) -> None:
        """Send an order to every node, now or when it connects."""
        for member in self.nodes.values():
            numbered = member.mail.post(message)
            member.first_order = member.first_order or int(numbered["number"])
            if member.wire is not None:
                member.wire.send(numbered)

    def beat(self, message: Header) -> None:
        """Send a heartbeat to every node, if it is time for one. `message`: its fields, but for the acknowledgement."""
        if self._clock.now < self._beat_at:
            return
        self._beat_at = self._clock.now + beat(self._timeout)
        for member in self.nodes.values():
            if member.wire is not None:
                member.wire.send({**message, "ack": member.mail.got})

    def unacknowledged(self, lost: Collection[int]) -> bool:
        """Whether a node that is not lost, and has not left, has not acknowledged all messages."""
        return any(member.mail.kept() and not member.left for node, member in self.nodes.items() if node not in lost)

    def silent(self, gone: Collection[int], ending: bool) -> List[Silence]:
        """Return the nodes that were silent for too long. `gone`: nodes that are known to be lost or absent.

        The limit is the loss timeout. It is longer until all nodes have acknowledged their first order, and shorter for a node
        that has not joined when the job is `ending`.
        """
        present = {node: member for node, member in self.nodes.items() if node not in gone}
        self._all_started = self._all_started or all(
            member.first_order and not member.mail.keeps(member.first_order) for member in present.values()
        )
        found = []
        for node, member in present.items():
            if member.joined:
                limit = self._timeout if self._all_started or ending else self._join_timeout
            else:
                limit = _LATE if ending else self._join_timeout
            if self._clock.now - member.received_at > limit:
                found.append(Silence(node, member, limit, self._clock.blocked - member.blocked))
        return found

    def close(self) -> None:
        for wire in self.wires():
            wire.close()
