"""The listener of the lead accepts connections and keeps each one until its first message arrives.

An unknown connection costs one descriptor for two seconds at most, and their number is bounded: when the limit is
reached, those that had time to send a message are closed, and new ones wait in the kernel's queue. All nodes of a big
job may connect at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Set, Tuple

from clustertool.model.wire.frames import Header
from clustertool.node.system.tls_link import TlsLink, context, listen

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_MOST = 64  # connections, and two more for each node
_TIMEOUT = 2.0  # for the first message, and this much more for each node: many that join at once take turns
_TIMEOUT_EACH = 0.02
_SHORT_TIMEOUT = 0.5  # the same when the limit is reached
_MAX_HEADER = 1 << 16


class LeadListener:
    """Call turn() each loop. `nodes`: how many other nodes the job has. All times are of the lead's own clock."""

    def __init__(self, spec: Spec, nodes: int) -> None:
        """Raises OSError if the port cannot be used."""
        self._limit = _MOST + 2 * nodes
        self._timeout = _TIMEOUT + _TIMEOUT_EACH * nodes
        self._pending: Dict[TlsLink, float] = {}  # and when each one times out
        self._context = context(spec["certificate"], spec["key"], server=True)
        self._socket = listen(str(spec["lead"]["host"]), int(spec["lead"]["port"]), 1024)

    def readers(self) -> List[Any]:
        return [*([] if self._full() else [self._socket]), *self._pending]

    def writers(self) -> List[TlsLink]:
        return [wire for wire in self._pending if wire.wants_write]

    def turn(self, now: float, ready: Optional[Set[int]]) -> Iterator[Tuple[TlsLink, List[Header]]]:
        """Yield each connection whose first messages have arrived, with them; from then on it belongs to the caller.

        `ready`: the descriptors that can be read or written, None if that is not known.
        """
        if ready is None or self._full() or self._socket.fileno() in ready:
            self._accept(now)
        for wire, until in list(self._pending.items()):
            if ready is not None and wire.fileno() not in ready and now <= until:
                continue
            try:
                messages = wire.turn()
            except ConnectionError:
                self._drop(wire)
                continue
            if messages:
                del self._pending[wire]
                yield wire, messages
            elif now > until:
                self._drop(wire)

    def _full(self) -> bool:
        return len(self._pending) >= self._limit

    def _accept(self, now: float) -> None:
        if self._full():
            for wire, until in list(self._pending.items()):
                if now > until - self._timeout + _SHORT_TIMEOUT:
                    self._drop(wire)
        while not self._full():
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError, OSError):
                return
            self._pending[TlsLink(sock, self._context, server=True, max_header=_MAX_HEADER)] = now + self._timeout

    def _drop(self, wire: TlsLink) -> None:
        del self._pending[wire]
        wire.close()

    def close(self) -> None:
        for wire in self._pending:
            wire.close()
        self._socket.close()
