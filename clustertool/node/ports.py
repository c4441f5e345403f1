"""Ports of this machine, read from /proc/net; a port counts as taken when somebody listens on it or is bound to it."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
from typing import Container, Dict, List, Sequence, Set

from clustertool.errors import PreflightError

_LISTEN = "0A"


def _rows() -> "List[List[str]]":
    rows: List[List[str]] = []
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            with open(name) as file:
                next(file, "")
                rows += [line.split() for line in file]
    return rows


def listening() -> Set[int]:
    """TCP ports with a listener."""
    return {int(row[1].rpartition(":")[2], 16) for row in _rows() if row[3] == _LISTEN}


def holders(asked: Container[int]) -> Dict[int, str]:
    """Those of the ports that are listened on -> who holds them, as far as this user may see: `nginx (pid 812, user www-data)`.

    Costs a walk over all processes' descriptors, unless none of the ports is taken.
    """
    inodes: Dict[str, int] = {}
    users: Dict[int, str] = {}
    for row in _rows():
        port = int(row[1].rpartition(":")[2], 16)
        if row[3] == _LISTEN and port in asked:
            inodes[row[9]] = port
            users[port] = f"a process of user {_user(int(row[7]))}"
    found = dict(users)
    wanted = {f"socket:[{inode}]": port for inode, port in inodes.items()}
    for pid in os.listdir("/proc") if wanted else ():
        if not pid.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                port_held = wanted.get(os.readlink(f"/proc/{pid}/fd/{fd}"))
                if port_held is not None:
                    found[port_held] = _describe(pid, port_held, users)
    return found


def _describe(pid: str, port: int, users: Dict[int, str]) -> str:
    with open(f"/proc/{pid}/comm") as file:
        name = file.read().strip()
    job = ""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/environ", "rb") as file:
            for item in file.read().split(b"\0"):
                if item.startswith(b"CLUSTERTOOL_JOB="):
                    job = f" of job {item.partition(b'=')[2].decode(errors='replace')}"
    return f"{name}{job} (pid {pid}, user {users[port].rpartition(' ')[2]})"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def require_free(ports: Sequence[int]) -> None:
    """The last look before anything starts. Raises PreflightError naming the holder."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise PreflightError(f"port {port} cannot be used: {error.strerror}", "choose another port") from None
                holder = holders([port]).get(port, "another process")
                raise PreflightError(f"port {port} is held by {holder}", "end that program, or choose another port") from None


def ephemeral() -> "tuple[int, int]":
    """The range from which the kernel itself gives away ports."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999
