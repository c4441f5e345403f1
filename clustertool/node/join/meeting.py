"""The machines of a job meet at the addresses and the ports of the coordinator."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from dataclasses import replace
from typing import List, Sequence, Tuple
from urllib.parse import urlsplit

from clustertool.errors import PreflightError
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.joining.typed_meeting import on_loopback
from clustertool.model.planning.environment import endpoint
from clustertool.model.planning.ports import LOWEST_PORT
from clustertool.node.devices.detect import within
from clustertool.node.ports import listeners
from clustertool.node.system.tls_link import listen

_PORTS = 16  # that a job id determines
_HIGHEST = 32768  # the ports of the kernel's own range begin here
_RESOLVE = 5.0  # seconds for a name server
_BACKLOG = 1024
Endpoint = Tuple[str, int]


def ports(join: JoinFile) -> List[int]:
    """List the coordinator's port, or those that all machines compute from the job id, of which it takes the first free one."""
    if join.coordinator.port:
        return [join.coordinator.port]
    number = int.from_bytes(hashlib.sha256(join.identity.job_id.encode()).digest()[:8], "big")
    first = LOWEST_PORT + number % (_HIGHEST - LOWEST_PORT - _PORTS)
    return list(range(first, first + _PORTS))


def where(join: JoinFile) -> str:
    """Name the coordinator in messages."""
    host, port = join.coordinator.host, join.coordinator.port
    return endpoint(host, port) if port else host


def addresses(host: str) -> List[str]:
    """Find the addresses of a host, IPv4 first and the loopback last.

    Raises OSError for a name that is not known, or a name server that is late.
    """

    def ask() -> List[str]:
        found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
        return sorted(
            {str(row[4][0]) for row in found}, key=lambda address: (loopback(address), ":" in address, address)
        )

    found: List[str] = within(_RESOLVE, ask, [])
    if not found:
        raise OSError(f"no answer of a name server about {host}")
    return found


def endpoints(join: JoinFile) -> List[Endpoint]:
    """List all endpoints that may be the coordinator's, as addresses. Raises OSError."""
    return [(address, port) for address in addresses(join.coordinator.host) for port in ports(join)]


def own_address(host: str) -> str:
    """Return the coordinator's address if it is one of this machine's, else ""."""
    try:
        return next((address for address in addresses(host) if listeners.own_address(address)), "")
    except (OSError, UnicodeError):
        return ""


def loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def listens_on_all(host: str, address: str) -> bool:
    """Check whether a coordinator with this address of its own listens on all.

    A name that is a loopback address only on its own machine (127.0.1.1 in /etc/hosts) leads others to another address.
    """
    return host != address and loopback(address) and not on_loopback(host)


def open_port(join: JoinFile, address: str) -> Tuple[socket.socket, int]:
    """Open a socket that listens at the first free port, and return it with the port. Raises PreflightError."""
    bound = "0.0.0.0" if listens_on_all(join.coordinator.host, address) else address
    wanted = ports(join)
    for port in wanted:
        try:
            return listen(bound, port, _BACKLOG), port
        except OSError as error:
            reason = error.strerror
    users = listeners.holders(wanted)
    if len(wanted) > 1:
        what = f"the ports {wanted[0]} to {wanted[-1]}, where machines join, are all in use"
        raise PreflightError(what, "name a free port: LEAD_PORT in conf.py, or --master HOST:PORT")
    user = f"in use by {users[wanted[0]]}" if wanted[0] in users else f"not usable: {reason}"
    raise PreflightError(f"port {wanted[0]}, where machines join, is {user}", "end that program, or take another port")


def free_port(join: JoinFile, address: str) -> int:
    """Find a port at which this machine could coordinate: that of the last coordinator, else one that the job id determines.

    Raises PreflightError.
    """
    listening = None
    for host in (join, replace(join, coordinator=replace(join.coordinator, port=0))):
        try:
            listening, port = open_port(host, address)
            break
        except PreflightError:
            if not host.coordinator.port:
                raise
    assert listening is not None
    listening.close()
    return port


def address_to(urls: Sequence[str]) -> str:
    """Find this machine's address on the way to a server, "" if there is no way. Nothing is sent."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        with contextlib.suppress(OSError, UnicodeError, IndexError):
            address = addresses(host)[0]
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((address, 9))
                return str(sock.getsockname()[0])
    return ""
