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
    """The sockets by which a supervisor reserves ports, until it ends or until close()."""

    def __init__(self) -> None:
        self._sockets: Dict[int, socket.socket] = {}  # by port

    def take(self, ports: Sequence[int]) -> None:
        """Reserve the first 128 of the ports by their names.

        Raises PortInUse if another user, or one that cannot be known, has reserved one. Jobs of one user have claims: a
        reservation of another node of this job is fine. It takes its names before it searches for others: of two users that do
        so at once, at least one sees the other.
        """
        ports = ports[:_MOST]
        for port in ports:
            self._take_name(port)
        names = reserved_ports()
        for port in ports:
            for uid in names.get(port, ()):
                if uid == os.getuid() and port in self._sockets:
                    continue
                real = owner(port, uid)
                if real != os.getuid():
                    what = f"port {port} is in use by {_describe_owner(real)}"
                    raise PortInUse(what, "wait for its end, or choose another port")

    def _take_name(self, port: int) -> None:
        """Create and listen on the socket with the name of a port; do nothing if that fails.

        Another process of this user may have the name, and too few descriptors do not prevent a start.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_socket_name(port, os.getuid()))
            sock.listen(_WAITING)
            sock.setblocking(False)
        except OSError:
            sock.close()
        else:
            self._sockets[port] = sock

    def turn(self) -> None:
        """Accept and close the connections of processes that ask for the owner of a name."""
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):
                while True:
                    sock.accept()[0].close()

    def close(self) -> None:
        """Close the sockets, which releases the names."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


def _socket_name(port: int, uid: int) -> bytes:
    """Build the name of the abstract socket that reserves a port for a user."""
    return f"\0{_PREFIX}{port}/{uid}".encode()


def reserved_ports() -> Dict[int, List[int]]:
    """Map each port to the uids in the names that reserve it. A name proves nothing: owner() finds its owner."""
    found: Dict[int, List[int]] = {}
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace", encoding="utf-8") as file:
        for line in file:
            port, slash, uid = line.rstrip("\n").partition(" @" + _PREFIX)[2].partition("/")
            named = slash and _is_number(port, 5) and _is_number(uid, 10)
            if named and int(uid) not in found.setdefault(int(port), []):
                found[int(port)].append(int(uid))
    return found


def _is_number(text: str, digits: int) -> bool:
    """Check whether a text is a number of at most `digits` ASCII digits. Any user can have a name of this form."""
    return text.isdecimal() and text.isascii() and len(text) <= digits


def owner(port: int, uid: int) -> Optional[int]:
    """Return the uid of the process that has the name of a port and uid; None if that cannot be known.

    Tries for 1 s if the process does not listen yet.
    """
    end = time.monotonic() + _BETWEEN
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(_socket_name(port, uid))
                return users.peer(sock).uid
            except OSError as error:  # it does not listen yet, is of another kind, or is asked by too many
                if error.errno != errno.ECONNREFUSED or time.monotonic() > end:
                    return None
        time.sleep(0.01)


def holder(port: int, uids: Collection[int]) -> str:
    """Describe the first owner of a port that is found as `a job of user ann`; without one, as `a job of another user`.

    uids: those of the names that reserve it.
    """
    return _describe_owner(next((found for found in (owner(port, uid) for uid in uids) if found is not None), None))


def _describe_owner(uid: Optional[int]) -> str:
    """Describe the job that has reserved a port, by its user; None: not known."""
    return "a job of another user" if uid is None else f"a job of user {users.name_of(uid)}"
