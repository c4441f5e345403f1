"""How trainers and pservers talk: one form of frame for every message, both ways; nothing but numbers.

frame   = header keys values          header = magic, op, number of keys, number of values
keys    = int32, little-endian        row numbers of the table, or small settings
values  = float32, little-endian      rows, or their gradients

trainer sends                         pserver answers
HELLO   trainer, rows, dim, sync, lr  OK, or DIFFERS: the others came with other settings
PULL    keys                          OK values
PUSH    keys, gradients               OK once applied: in sync mode, when every trainer has pushed;
                                      or LOST: a trainer died, so this step can never be complete
LEAVE                                 OK: the others go on without this trainer
WAIT                                  OK once every trainer has left, or LOST
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]
    Floats = NDArray[np.float32]

HELLO, PULL, PUSH, LEAVE, WAIT, OK, DIFFERS, LOST = range(1, 9)

MAGIC = b"w2v1"
HEADER = struct.Struct("<4sBII")
TOO_MANY = 1 << 26  # a frame that claims more numbers than this (256 MiB) is a stranger's

NO_KEYS: Ints = np.empty(0, "<i4")
NO_VALUES: Floats = np.empty(0, "<f4")


class Frame(NamedTuple):
    op: int
    keys: Ints
    values: Floats


class Link:
    """One connection, whole frames in and out. If it ends or carries anything else: ConnectionError."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        self.sock = sock
        self.incoming = sock.makefile("rb", buffering=1 << 18)

    def send(self, op: int, keys: Ints = NO_KEYS, values: Floats = NO_VALUES) -> None:
        head = HEADER.pack(MAGIC, op, keys.size, values.size)
        self.sock.sendall(b"".join((head, keys.astype("<i4").tobytes(), values.astype("<f4").tobytes())))

    def receive(self) -> Frame:
        magic, op, keys, values = HEADER.unpack(self._exactly(HEADER.size))
        if magic != MAGIC or max(keys, values) > TOO_MANY:
            raise ConnectionError("the other side does not speak this protocol")
        return Frame(op, np.frombuffer(self._exactly(4 * keys), "<i4"), np.frombuffer(self._exactly(4 * values), "<f4"))

    def _exactly(self, size: int) -> bytes:
        data: bytes = self.incoming.read(size)
        if len(data) < size:
            raise ConnectionError("connection closed")
        return data

    def close(self) -> None:
        self.incoming.close()
        self.sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Notice within about 20 s that the other machine vanished: who only waits would never be told."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux names; elsewhere the system's own pace has to do
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def address(endpoint: str) -> tuple[str, int]:
    """`10.0.0.1:7164` or `[fe80::1]:7164` as host and port."""
    host, port = endpoint.rsplit(":", 1)
    return host.strip("[]"), int(port)
