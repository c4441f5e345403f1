"""The coordinator has connections whose first message has not arrived, and those of the members, the other nodes of a job."""

from __future__ import annotations

import errno
import time
from socket import socket
from ssl import SSLContext
from typing import TYPE_CHECKING, Collection, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from clustertool.model.elastic.lease import is_silent
from clustertool.model.wire.frames import Header
from clustertool.node.system.process_clock import ProcessClock, boottime
from clustertool.node.system.tls_link import Mailbox, TlsLink, heartbeat_interval, join_patience

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.field_types import RankOutput
    from clustertool.model.wire.coordinator_messages import Incarnation

_LATE = 1.0  # for a node that has not joined when the job ends
_MAX_BACKLOG = 4 << 20
# Connections without a message, in all and from one address. All nodes of a big job may connect at once, by one address.
_MOST = 512
_MOST_EACH = 128
_MOST_PER_NODE = 3
_ACCEPTED = 512  # connections in one turn
_TURN = 0.02  # seconds for all connections without a message, in one turn
_TIMEOUT = 2.0  # for the first message, and this much more for each node: many that join at once take turns
_TIMEOUT_EACH = 0.02
_MAX_HEADER = 1 << 16


class CoordinatorListener:
    """The socket on which the coordinator listens, with each connection until its first message arrives. Call turn() each loop.

    Strangers may open thousands of connections a second, send nothing or anything, and keep them open (decision 87). So what
    has sent no message is bounded: connections in all, and from one address; seconds until the first message; seconds of this
    process in one turn. No message is read before the handshake proves the key of the job, and OpenSSL bounds the bytes of a
    handshake. A new connection replaces the oldest one of its address, or of all.

    `nodes`: how many other nodes the job has. All times are of the coordinator's own clock. `sock` is the socket that listens;
    it is closed with this object.
    """

    def __init__(self, ctx: SSLContext, sock: socket, nodes: int, max_header: int = _MAX_HEADER) -> None:
        self._limit = max(_MOST, _MOST_PER_NODE * nodes)
        self._limit_each = max(_MOST_EACH, _MOST_PER_NODE * nodes)
        self._timeout = _TIMEOUT + _TIMEOUT_EACH * nodes
        self._pending: Dict[TlsLink, Tuple[str, float]] = {}  # the oldest first: its address, and when it times out
        self._context = ctx
        self._socket = sock
        self._max_header = max_header

    def wires(self) -> List[FileDescriptorLike]:
        """Return what wakes the loop: the socket that listens, and the connections without a message."""
        return [self._socket, *self._pending]

    def turn(self, now: float, ready: Optional[Set[int]]) -> Iterator[Tuple[TlsLink, List[Header]]]:
        """Accept new connections, and yield each one whose first messages have arrived, with them; the caller then owns it.

        Closes connections that broke or sent nothing in time. Reads for 0.02 s at most. ready: the descriptors that can be read
        or written, None if that is not known.
        """
        if ready is None or self._socket.fileno() in ready:
            self._accept(now)
        end = time.monotonic() + _TURN
        for wire in [wire for wire in self._pending if ready is None or wire.fileno() in ready]:
            try:
                messages = wire.turn()
            except ConnectionError:
                self._drop(wire)
            else:
                if messages:
                    del self._pending[wire]
                    yield wire, messages
            if time.monotonic() > end:
                break
        for wire in [wire for wire, (_, until) in self._pending.items() if now > until]:
            self._drop(wire)

    def _accept(self, now: float) -> None:
        """Accept up to 512 connections. At a limit, or if descriptors run out, close the oldest of the address, or of all."""
        for _ in range(_ACCEPTED):
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._pending:
                    self._drop(next(iter(self._pending)))
                    continue
                if isinstance(error, ConnectionError):  # the other side has closed it already
                    continue
                return
            address = str(peer[0])
            of_address = [wire for wire, (other, _) in self._pending.items() if other == address]
            if len(of_address) >= self._limit_each:
                self._drop(of_address[0])
            elif len(self._pending) >= self._limit:
                self._drop(next(iter(self._pending)))
            wire = TlsLink(sock, self._context, server=True, max_header=self._max_header)
            self._pending[wire] = address, now + self._timeout

    def _drop(self, wire: TlsLink) -> None:
        """Close a pending connection, and forget it."""
        del self._pending[wire]
        wire.close()

    def close(self) -> None:
        """Close the pending connections and the socket that listens."""
        for wire in self._pending:
            wire.close()
        self._socket.close()


class JobMember:
    """A node but the coordinator's: its connection, what came last, and `mail`, the messages that it has not acknowledged.

    Messages stay there also if the connection breaks.
    """

    def __init__(self) -> None:
        self.mail = Mailbox()
        self.wire: Optional[TlsLink] = None
        self.received_at = 0.0  # by the coordinator's own clock
        self.blocked = 0.0  # seconds that this clock had left out by then
        self.joined = False
        self.left = False
        self.first_order = 0  # the number of the first message that is an order, 0 before
        self.ranks: List[RankOutput] = []  # the progress of its ranks when it reported that
        self.sender: Optional[Incarnation] = None  # the supervisor that has joined
        self.last_at = boottime()  # when the newest message came, by CLOCK_BOOTTIME
        self.seen = self.acknowledged = 0  # the number of the newest beat, and that which was sent back
        self.given_up = False  # no beat that comes now is acknowledged

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def note_beat(self, number: object) -> None:
        """Record the number of a beat of an elastic job, to acknowledge it, unless the member is given up.

        Raises ValueError if that is no integer.
        """
        if type(number) is not int:
            raise ValueError("a beat without a number")
        if not self.given_up:
            self.seen = max(self.seen, number)


class JobMembers:
    """The members of a job, all nodes but the coordinator's: sends them orders and heartbeats, and finds silent ones.

    clock: the coordinator's own clock, which its loop turns. elastic: beats are acknowledged, and silence is measured by
    CLOCK_BOOTTIME, as the nodes measure their leases.
    """

    def __init__(self, nodes: Iterable[int], loss_timeout: float, clock: ProcessClock, elastic: bool = False) -> None:
        self._elastic = elastic
        self.nodes = {node: JobMember() for node in nodes}
        self._timeout = loss_timeout
        self._join_timeout = join_patience(loss_timeout, len(self.nodes))
        self._clock = clock
        self._beat_at = 0.0
        self._all_started = False  # every node has acknowledged its first order

    def wires(self) -> List[TlsLink]:
        """Return the connections of the members that have one."""
        return [member.wire for member in self.nodes.values() if member.wire is not None]

    def connect(self, member: JobMember, wire: TlsLink, sender: Incarnation) -> None:
        """Close the old connection of a node, and use the new one; `sender` is the process behind it."""
        member.disconnect()
        member.wire, member.left, member.sender = wire, False, sender
        self._received(member)

    def read(self, member: JobMember) -> List[Header]:
        """Return the messages that have arrived from a node, [] without a connection.

        A connection that broke, or whose node does not read (4 MiB wait), is closed; the node may connect again.
        """
        if member.wire is None:
            return []
        try:
            if member.wire.backlog > _MAX_BACKLOG:
                raise ConnectionError("does not read")
            messages = member.wire.turn()
        except ConnectionError:
            member.disconnect()
            return []
        if messages:
            self._received(member)
        return messages

    def _received(self, member: JobMember) -> None:
        """Record when a message of a node came, by the own clock and, unless it is given up, by CLOCK_BOOTTIME."""
        member.received_at, member.blocked = self._clock.now, self._clock.blocked
        if not member.given_up:
            member.last_at = boottime()

    def post(self, message: Header) -> None:
        """Send an order to every node, now or when it connects, and repeat it after a reconnect until it is acknowledged."""
        for member in self.nodes.values():
            numbered = member.mail.post(message)
            member.first_order = member.first_order or int(numbered["number"])
            if member.wire is not None:
                member.wire.send(numbered)

    def post_to(self, node: int, message: Header) -> None:
        """Send an order to one node, now or when it connects, after all that were sent to it before."""
        member = self.nodes[node]
        numbered = member.mail.post(message)
        if member.wire is not None:
            member.wire.send(numbered)

    def beat(self, message: Header) -> None:
        """Send a heartbeat with acknowledgements to every connected node if one is due, else to those with a new numbered beat.

        It acknowledges the node's messages and, in an elastic job, its newest beat. Immediate acknowledgement makes their
        leases as long as possible. message: the other fields of the heartbeat.
        """
        due = self._clock.now >= self._beat_at
        if due:
            self._beat_at = self._clock.now + heartbeat_interval(self._timeout)
        for member in self.nodes.values():
            if member.wire is not None and (due or member.seen > member.acknowledged):
                member.acknowledged = member.seen
                seen = {"seen": member.seen} if self._elastic else {}
                member.wire.send({**message, **seen, "ack": member.mail.got})

    def give_up(self, member: JobMember) -> None:
        """Close the connection of a node whose supervisor has ended, and expect nothing more from it."""
        member.given_up = member.left = True
        member.disconnect()

    def acknowledge_no_more(self) -> None:
        """Acknowledge no beats of any node from now on: this process may not renew leases."""
        for member in self.nodes.values():
            member.given_up, member.seen = True, 0

    def unacknowledged(self, lost: Collection[int]) -> bool:
        """Check whether a node that is not in `lost`, and has not left, still has to acknowledge messages."""
        return any(member.mail.kept() and not member.left for node, member in self.nodes.items() if node not in lost)

    def silent(self, gone: Collection[int], ending: bool) -> List[Tuple[int, float, float]]:
        """Find the nodes that were silent for longer than their limit, as (node, limit, blocked), in seconds.

        blocked: how long this process did not run since the last message; the coordinator's own clock leaves that out. gone:
        nodes to leave out.

        The limit of a node that has joined is the loss timeout, but the join timeout until all nodes have acknowledged their
        first order or the job is `ending`. That of a node that has not joined is the join timeout, or 1 s if the job is
        `ending`. In an elastic job, silence is measured by CLOCK_BOOTTIME.
        """
        present = {node: member for node, member in self.nodes.items() if node not in gone}
        started = (member.first_order and not member.mail.keeps(member.first_order) for member in present.values())
        self._all_started = self._all_started or all(started)
        found = []
        for node, member in present.items():
            if member.joined:
                limit = self._timeout if self._all_started or ending else self._join_timeout
            else:
                limit = _LATE if ending else self._join_timeout
            passed = self._clock.now - member.received_at > limit
            if is_silent(member.last_at, boottime(), limit) if self._elastic else passed:
                found.append((node, limit, self._clock.blocked - member.blocked))
        return found

    def close(self) -> None:
        """Close the connections of all members."""
        for wire in self.wires():
            wire.close()
