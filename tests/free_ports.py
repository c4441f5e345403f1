"""Ports of this machine that no program has, for tests that state a port.

They are neither of the range from which the kernel chooses, where any connection of another test may take one, nor of the
range from which clustertool chooses those of its jobs. A process does not get the same port twice before it had all others.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 3000, 4000
_numbers = itertools.count(os.getpid() * 61)  # processes that run at the same time begin at different ports


def free_port(address: str = "127.0.0.1") -> int:
    """Find a port on which no program listens, at this address."""
    for number in itertools.islice(_numbers, _COUNT):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, _FIRST + number % _COUNT))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError(f"no port from {_FIRST} to {_FIRST + _COUNT - 1} is free at {address}")


def free_ports(count: int) -> list[int]:
    """Find so many ports on which no program listens, at 127.0.0.1."""
    return [free_port() for _ in range(count)]
