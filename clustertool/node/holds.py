"""A job holds its ports against jobs of other users, who cannot read its claims: by names that the kernel gives only once.

An abstract unix socket is known to all users of a network namespace, as ports are, and goes with the supervisor that has it.
Two for each port: one that only one can have, and one that says whose it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
from typing import Dict, List, Optional, Sequence

from clustertool.errors import PortHeld

_PREFIX = "clustertool/port/"
_MOST = 128  # a pserver may have a thousand ports: descriptors are few, and its first one stands for the others


class Holds:
    """The ports that one supervisor holds, as long as it lives or until close()."""

    def __init__(self) -> None:
        self._sockets: List[socket.socket] = []

    def take(self, ports: Sequence[int]) -> None:
        """Raises PortHeld naming the user. One's own jobs have claims: what another node of this job holds here is no bar."""
        for port in ports[:_MOST]:
            if self._take(str(port)):
                self._take(f"{port}/{os.getuid()}")
            elif held().get(port) != os.getuid():
                what = f"port {port} is held by a job of {owner(held().get(port))}"
                raise PortHeld(what, "wait for its end, or choose another port")

    def _take(self, name: str) -> bool:
        """False if somebody has this name already."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.bind("\0" + _PREFIX + name)
        except OSError as error:
            sock.close()
            return error.errno != errno.EADDRINUSE  # too few descriptors, say: no reason to start no job
        self._sockets.append(sock)
        return True

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []


def held() -> Dict[int, int]:
    """Ports that jobs hold, of whatever user -> uid."""
    found: Dict[int, int] = {}
    with contextlib.suppress(OSError):
        with open("/proc/net/unix", errors="replace") as file:
            for line in file:
                port, slash, uid = line.rstrip("\n").partition(" @" + _PREFIX)[2].partition("/")
                if slash and _number(port, 5) and _number(uid, 10):
                    found[int(port)] = int(uid)
    return found


def _number(text: str, digits: int) -> bool:
    """Anybody can have a name that looks like ours."""
    return text.isdecimal() and text.isascii() and len(text) <= digits


def owner(uid: Optional[int]) -> str:
    with contextlib.suppress(KeyError):
        if uid is not None:
            return f"user {pwd.getpwuid(uid).pw_name}"
    return "another user"
