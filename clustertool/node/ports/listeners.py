"""This module lists the ports of this machine from /proc. A port is in use if a process listens on it or is bound to it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import Container, Dict, Iterator, List, NamedTuple, Sequence

from clustertool.errors import PortInUse, PreflightError
from clustertool.node.system import processes, tcp_table, users

_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _REQUEST_DUMP, _DONE, _FAILED = 20, 0x301, 3, 2
_LISTEN = 10  # TCP_LISTEN


# `address` as text; 0.0.0.0 and :: are all addresses.
Listener = NamedTuple("Listener", [("address", str), ("port", int), ("uid", int), ("inode", int)])


def listeners() -> List[Listener]:
    """List the TCP listeners of this machine, by netlink; if there is none, as in some containers, from /proc/net/tcp.

    The file costs milliseconds, as the kernel walks every socket.
    """
    with contextlib.suppress(OSError):  # some containers have no netlink
        return [*_read_by_netlink(socket.AF_INET), *_read_by_netlink(socket.AF_INET6)]
    return [*_read_table("/proc/net/tcp"), *_read_table("/proc/net/tcp6")]


def _read_by_netlink(family: int) -> Iterator[Listener]:
    """Yield the TCP listeners of an address family. Raises OSError if the kernel does not answer."""
    request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 0, 1 << _LISTEN)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _DIAG) as sock:
        sock.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
        while True:
            data = sock.recv(1 << 16)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind == _FAILED:
                    raise OSError(errno.EOPNOTSUPP, "sock_diag")
                if kind == _DONE:
                    return
                port, uid, inode = struct.unpack_from(">H", data, 20) + struct.unpack_from("=II", data, 80)
                yield Listener(
                    tcp_table.address_text(data[24 : 28 if family == socket.AF_INET else 40]), port, uid, inode
                )
                data = data[(size + 3) & ~3 :]


def _read_table(path: str) -> Iterator[Listener]:
    """Yield the TCP listeners in /proc/net/tcp or tcp6; none if it cannot be read."""
    for row in tcp_table.rows(path):
        if int(row[3], 16) == _LISTEN:
            yield Listener(*tcp_table.endpoint(row[1]), int(row[7]), int(row[9]))


def own_address(host: str) -> str:
    """Return `host` in the form of Listener.address if it is a literal address of this machine, else ""."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        packed = socket.inet_pton(family, host.split("%")[0])
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((host, 0))
    except OSError:
        return ""
    return tcp_table.address_text(packed)


def serves(listener: Listener, address: str) -> bool:
    """Check whether a connection to `address`, one of this machine's, reaches this listener."""
    return listener.address in (address, "::") or (listener.address == "0.0.0.0" and ":" not in address)


def holders(asked: Container[int]) -> Dict[int, str]:
    """Map each of the ports that has a listener to its process, `nginx (pid 812, user www)`, else only to its user."""
    matching = [listener for listener in listeners() if listener.port in asked]
    found = {listener.port: f"a process of user {users.name_of(listener.uid)}" for listener in matching}
    for pid in os.listdir("/proc") if matching else ():
        if pid.isdigit():
            with contextlib.suppress(OSError):
                for listener in listeners_of_process(pid, matching):
                    found[listener.port] = _describe_process(pid, listener.uid)
    return found


def listeners_of_process(pid: "int | str", among: Sequence[Listener]) -> List[Listener]:
    """Select the listeners in `among` that a process has. Raises OSError for one that has ended or belongs to another user."""
    by_name = {f"socket:[{listener.inode}]": listener for listener in among}
    names = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return [by_name[name] for name in names if name in by_name]


def _describe_process(pid: str, uid: int) -> str:
    """Describe a process by name, job, pid and user. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        name = file.read().strip()
    job = processes.environment(int(pid)).get(b"CLUSTERTOOL_JOB", b"").decode(errors="replace")
    return f"{name}{f' of job {job}' * bool(job)} (pid {pid}, user {users.name_of(uid)})"


def require_free(ports: Sequence[int]) -> None:
    """Check that each port is free, by binding it for a moment.

    Raises PortInUse with the process that has it, PreflightError for another error.
    """
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    what = f"port {port} cannot be used: {error.strerror}"
                    raise PreflightError(what, "choose another port") from None
                what = f"port {port} is in use by {holders([port]).get(port, 'another process')}"
                raise PortInUse(what, "end that program, or choose another port") from None


def ephemeral() -> "tuple[int, int]":
    """Read the first and last of the ports that the kernel itself gives to connections; 32768 and 60999 if that fails."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="utf-8") as file:
            low, high = file.read().split()
        return int(low), int(high)
    return 32768, 60999
