"""This module reads the TCP sockets of a network namespace, and to what a socket of a process is connected, from /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Iterator, List, Tuple

_MAPPED = bytes(10) + b"\xff\xff"


def rows(path: str) -> Iterator[List[str]]:
    """Yield the fields of each TCP socket in /proc/net/tcp or tcp6; none if it cannot be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        next(file, "")
        for line in file:
            yield line.split()


def endpoint(field: str) -> Tuple[str, int]:
    """Read an address and a port as these files have them."""
    address, _, port = field.rpartition(":")
    groups = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return address_text(struct.pack(f"={len(groups)}I", *groups)), int(port, 16)


def peer_of(pid: int, descriptor: str) -> str:
    """Return address:port to which a TCP socket of a process is connected; "" for another descriptor, or without the right."""
    with contextlib.suppress(OSError):
        name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        for row in (row for table in ("tcp", "tcp6") for row in rows(f"/proc/{pid}/net/{table}")):
            if name == f"socket:[{row[9]}]":
                return "{}:{}".format(*endpoint(row[2]))
    return ""


def address_text(packed: bytes) -> str:
    """Format a packed address as text; an IPv4 address that is mapped into IPv6 as IPv4."""
    if len(packed) == 16 and packed.startswith(_MAPPED):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
