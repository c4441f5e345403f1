"""The connections of a relay: to other nodes, and to the laptop through the agent."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any, Deque, List, Optional

from clustertool.model.dispatch import manifest
from clustertool.model.dispatch.fetch_scheduler import Address
from clustertool.model.wire.frames import Decoder, Frame, encode
from clustertool.model.wire.payload import Sink
from clustertool.node.system.tls_link import TlsLink


class PeerLink:
    """A connection to another node: a source, which sends pieces to us, or a taker, which is sent some."""

    wire: TlsLink

    def __init__(self, source: Optional[Address], now: float) -> None:
        self.source = source  # its address; None: a taker
        self.since = now
        self.coming: Deque[Sink] = deque()  # where pieces go that a source sends
        self.owed: List[int] = []  # pieces that a taker has requested
        self.announced: Optional[int] = None  # number of this node's pieces that a taker knows of

    @property
    def taker(self) -> bool:
        return self.source is None


class LaptopLink:
    """The agent's end of a socket pair. `closed`: the agent has ended, and the relay ends."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.active_at = now  # when something came last
        self.closed = False
        self._sock = sock
        self._decoder = Decoder(max_payload=manifest.MOST)
        self._out = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def report(self, kind: str, **more: Any) -> None:
        self._out += encode({"type": f"relay-{kind}", **more})
        self._flush()

    def turn(self, now: float) -> List[Frame]:
        """The messages that came; sends what is left."""
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            self._flush()
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self.active_at = now
        frames = list(self._decoder.feed(data))
        self._flush()
        return frames

    def _flush(self) -> None:
        try:
            with memoryview(self._out) as view:
                sent = self._sock.send(view)
            del self._out[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
