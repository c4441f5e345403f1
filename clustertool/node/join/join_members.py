"""The coordinator keeps connections to the machines that join, from their offers to the start of the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from clustertool.model.wire.frames import Header
from clustertool.node.supervisor.coordinator.member_connections import CoordinatorListener
from clustertool.node.system.process_clock import ProcessClock
from clustertool.node.system.tls_link import TlsLink, beat

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_MAX_BACKLOG = 64 << 20  # bytes that a machine has not read


class Arrived(NamedTuple):
    """Messages of a connection, the first one of a new connection among them; `ended`: why there will be no more."""

    connection: int
    messages: List[Header]
    ended: str = ""


class JoinMembers:
    """Call turn() each loop. Connections have numbers from 1 on; a connection that is silent for the timeout is closed.

    Silence is measured by a clock that stops while this process does not run.
    """

    def __init__(self, listener: CoordinatorListener, loss_timeout: float) -> None:
        self._listener: Optional[CoordinatorListener] = listener
        self._timeout = loss_timeout
        self._clock = ProcessClock()
        self._links: Dict[int, TlsLink] = {}
        self._received: Dict[int, float] = {}
        self._next = 1
        self._beat_at = 0.0

    def wires(self) -> List[FileDescriptorLike]:
        return [*(self._listener.wires() if self._listener else []), *self._links.values()]

    def turn(self, ready: Set[int]) -> Iterator[Arrived]:
        now = self._clock.turn()
        all_ready = None if self._clock.napped else ready
        if self._listener is not None:
            for wire, messages in self._listener.turn(now, all_ready):
                connection, self._next = self._next, self._next + 1
                self._links[connection], self._received[connection] = wire, now
                yield Arrived(connection, messages)
        for connection, wire in list(self._links.items()):
            if all_ready is None or wire.fileno() in all_ready:
                yield from self._read(connection, wire, now)
        for connection in [one for one, at in self._received.items() if now - at > self._timeout]:
            self.close(connection)
            yield Arrived(connection, [], f"no heartbeat for {self._timeout:g} s")
        if now >= self._beat_at:
            self._beat_at = now + beat(self._timeout)
            self.send_all({"type": "beat"})

    def _read(self, connection: int, wire: TlsLink, now: float) -> Iterator[Arrived]:
        if connection not in self._links:
            return
        try:
            if wire.backlog > _MAX_BACKLOG:
                raise ConnectionError("it does not read")
            messages = wire.turn()
        except ConnectionError as error:
            self.close(connection)
            yield Arrived(connection, [], str(error))
            return
        if messages:
            self._received[connection] = now
            yield Arrived(connection, messages)

    def send(self, connection: int, message: Mapping[str, object]) -> None:
        wire = self._links.get(connection)
        if wire is not None:
            wire.send(dict(message))

    def send_all(self, message: Mapping[str, object]) -> None:
        for connection in self._links:
            self.send(connection, message)

    def close(self, connection: int, message: Optional[Mapping[str, object]] = None) -> None:
        """`message`: a last one, as far as the kernel accepts it."""
        wire = self._links.pop(connection, None)
        self._received.pop(connection, None)
        if wire is not None:
            if message is not None:
                wire.send(dict(message))
                wire.flush()
            wire.close()

    def stop_listening(self) -> None:
        """Close the listening socket. The port is free when this returns."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def leave(self) -> None:
        """Close all connections: the machines look for another coordinator."""
        self.stop_listening()
        for connection in list(self._links):
            self.close(connection)

    def end(self, message: Mapping[str, object], seconds: float, until_closed: bool = False) -> None:
        """Send all a last message, and close all connections when it is sent, after `seconds` at the latest.

        until_closed: when the other side has closed it, so it has the message. A kernel drops what it could not send so far if
        anything arrives at a closed connection.
        """
        self.stop_listening()
        self.send_all(message)
        until = time.monotonic() + seconds
        left: List[Tuple[int, TlsLink]] = list(self._links.items())
        while left and time.monotonic() < until:
            for connection, wire in left:
                try:
                    wire.turn()
                except ConnectionError:
                    self.close(connection)
            left = [(number, wire) for number, wire in self._links.items() if until_closed or wire.backlog]
            time.sleep(0.002)
        for connection in list(self._links):
            self.close(connection)
