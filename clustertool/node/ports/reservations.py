"""A reservation protects a job's ports from jobs of other users, who cannot read its claims: by names of abstract sockets.

The kernel gives the name of an abstract unix socket only once per network namespace, and releases it with the supervisor. A
name contains the port and the user's uid. Any user can take any name, so the kernel reports its owner (SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import Collection, Dict, List, Optional, Sequence

from clustertool.errors import PortInUse
from clustertool.node.system import users

_PREFIX = "clustertool/port/"
_MOST = 128  # a pserver may have a thousand ports, and descriptors are limited
_WAITING = 128  # connections of processes that ask for the owner of a name, until turn() accepts them
_BETWEEN = 1.0  # seconds that a process may take between its bind and its listen


class Reservations:
    """The ports that one supervisor reserves, until it ends or until close()."""

    def __init__(self) -> None:
        self._sockets: Dict[int, socket.socket] = {}  # by port

    def take(self, ports: Sequence[int]) -> None:
        """Reserve ports. Raises PortInUse with the user.

        Jobs of one user have claims: a reservation of another node of this job is fine. It takes its names before it searches
        for
        others: of two users that do so at once, at least one sees the other.
        """
        ports = ports[:_MOST]
        for port in ports:
            self._take(port)
        names = reserved_ports()
        for port in ports:
            for uid in names.get(port, ()):
                if uid == os.getuid() and port in self._sockets:
                    continue
                real = owner(port, uid)
                if real != os.getuid():
                    what = f"port {port} is in use by {_job_of(real)}"
                    raise PortInUse(what, "wait for its end, or choose another port")

    def _take(self, port: int) -> None:
        """Take the name of a port.

        A name of another process stays. Too few descriptors, for example, do not prevent a start.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_name(port, os.getuid()))
            sock.listen(_WAITING)
            sock.setblocking(False)
        except OSError:
            sock.close()
        else:
            self._sockets[port] = sock

    def turn(self) -> None:
        """Accept and close the connections of processes that have asked for the owner of a name."""
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):
                while True:
                    sock.accept()[0].close()

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


def _name(port: int, uid: int) -> bytes:
    return f"\0{_PREFIX}{port}/{uid}".encode()


def reserved_ports() -> Dict[int, List[int]]:
    """Port -> uids in the names that reserve it. A name proves nothing: owner() finds its owner."""
    found: Dict[int, List[int]] = {}
    with contextlib.suppress(OSError):
        with open("/proc/net/unix", errors="replace", encoding="utf-8") as file:
            for line in file:
                port, slash, uid = line.rstrip("\n").partition(" @" + _PREFIX)[2].partition("/")
                if (
                    slash
                    and _is_number(port, 5)
                    and _is_number(uid, 10)
                    and int(uid) not in found.setdefault(int(port), [])
                ):
                    found[int(port)].append(int(uid))
    return found


def _is_number(text: str, digits: int) -> bool:
    """Check that a text is a number of so many digits. Any user can have a name of this form."""
    return text.isdecimal() and text.isascii() and len(text) <= digits


def owner(port: int, uid: int) -> Optional[int]:
    """Find the uid of the process that has a name; None if the kernel does not report it."""
    end = time.monotonic() + _BETWEEN
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(_name(port, uid))
                return users.peer(sock).uid
            except OSError as error:  # it does not listen yet, is of another kind, or is asked by too many
                if error.errno != errno.ECONNREFUSED or time.monotonic() > end:
                    return None
        time.sleep(0.01)


def holder(port: int, uids: Collection[int]) -> str:
    """Name the owner of a port, for the uids of its names: `a job of user ann`."""
    return _job_of(next((found for found in (owner(port, uid) for uid in uids) if found is not None), None))


def _job_of(uid: Optional[int]) -> str:
    return "a job of another user" if uid is None else f"a job of user {users.name_of(uid)}"
