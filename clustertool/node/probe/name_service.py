"""This module asks the name service of this machine for the address of a host."""

from __future__ import annotations

import socket
from typing import Optional, Tuple

from clustertool.node.devices import detect


def first_address(host: str, port: int = 0) -> Tuple[int, Tuple[object, ...]]:
    """Resolve a host to the family and the socket address for TCP. Raises OSError or UnicodeError for no such name.

    The name is passed as bytes. getaddrinfo encodes a str with the codec idna, whose import takes 2 ms of CPU time, also where
    the name is an IP address.
    """
    name = host.encode("ascii" if host.isascii() else "idna")
    family, _, _, _, address = socket.getaddrinfo(name, port, socket.AF_UNSPEC, socket.SOCK_STREAM)[0]
    return family, address


def resolved(name: str, seconds: float = 1.0) -> Optional[str]:
    """Ask the name service for a name: "" if the name does not exist, None if it does not answer in time."""

    def ask() -> Optional[str]:
        try:
            return str(first_address(name)[1][0])
        except (OSError, UnicodeError):
            return ""

    return detect.within(seconds, ask, None)
