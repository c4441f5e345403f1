"""The first machine of a job that is typed on every machine has an address and a port where the others meet it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from clustertool.errors import PreflightError
from clustertool.node.join import meeting
from clustertool.node.probe import network_addresses

# Of networks for documentation (RFC 5737, RFC 3849): no packet is sent, the kernel only chooses the route.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def address() -> str:
    """Find the address of this machine on its default route, else the first one that other machines may reach.

    Raises PreflightError.
    """
    for family, far in _FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            return str(sock.getsockname()[0])
    own = [text for pairs in network_addresses.interfaces().values() for text, _ in pairs]
    others = [text for text in own if not (_is(text).is_loopback or _is(text).is_link_local)]
    if not others:
        what = "this machine has no address that another machine can reach"
        raise PreflightError(what, "name the one where the machines meet: --master HOST:PORT")
    return sorted(others, key=lambda text: ":" in text)[0]


def own_address(host: str) -> str:
    """Return the address of a name or address that is one of this machine, "" if it is of another one."""
    return meeting.own_address(host)


def free_port(host: str) -> int:
    """Find a port of this address that no program uses now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _is(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])
