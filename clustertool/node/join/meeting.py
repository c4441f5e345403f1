"""The machines of a job meet at the addresses and the ports of the coordinator.

place_of() determines whether this machine is the coordinator. Where commands are typed, the place to meet is compared with the
addresses of this machine, and what does not fit is reported in seconds. A place that may be right is tried first: two members
may be on one machine, and another machine may pass a port on to this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import time
from dataclasses import replace
from typing import List, NamedTuple, Optional, Sequence, Tuple
from urllib.parse import urlsplit

from clustertool.errors import ClustertoolError, PreflightError, UsageError
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.joining.typed_meeting import on_loopback
from clustertool.model.planning.environment import endpoint
from clustertool.model.planning.ports import LOWEST_PORT
from clustertool.node.devices.detect import within
from clustertool.node.join.join_report import JoinReport
from clustertool.node.ports import listeners
from clustertool.node.probe import network_addresses
from clustertool.node.system.tls_link import context, listen

_PORTS = 16  # that a job id determines
_HIGHEST = 32768  # the ports of the kernel's own range begin here
_RESOLVE = 5.0  # seconds for a name server
_BACKLOG = 1024
_TRIED = 8.0  # seconds: commands that are typed together have found each other by then
_ONE_MACHINE = 60.0  # seconds to type the command a second time on the same machine
_ANSWER = 1.0  # seconds for TCP and TLS
_SHOWN = 6  # addresses
Endpoint = Tuple[str, int]


class Doubt(NamedTuple):
    """Why the machines may not meet. seconds: after which this is an error; None: the place may be right, and they wait on."""

    error: ClustertoolError
    seconds: Optional[float]


class MemberPlace(NamedTuple):
    """The part of this machine in the job, or in its next epoch.

    number: in the job, None until it has one. address: the coordinator's, if this machine coordinates, else "". doubt: about
    the place where the machines meet first.
    """

    number: Optional[int]
    address: str
    doubt: Optional[Doubt] = None


def place_of(join: JoinFile) -> MemberPlace:
    """Determine whether this machine coordinates and at which address, its number, and the doubt about a place that was typed.

    Raises UsageError for a typed place at which no machines can meet, and PreflightError if this machine coordinates, and the
    coordinator's host is not known here.
    """
    coordinator, host, doubt = join.coordinator.member, join.coordinator.host, None
    coordinates = join.index in (None, coordinator)
    address = own_address(host) if coordinates or join.typed else ""
    if join.typed:
        _require_place(host)
        doubt = _doubt_of(join, address)
    if not coordinates or (join.index is None and not address):
        return MemberPlace(join.index, "", doubt)
    if not address:
        try:
            address = addresses(host)[0]  # another machine passes it on to this one (NAT)
        except (OSError, UnicodeError) as error:
            what = f"the coordinator's host {host} is not known here: {error}"
            raise PreflightError(what, "name an address of this machine") from None
    return MemberPlace(coordinator, address, doubt)


def _require_place(host: str) -> None:
    """Raise UsageError if the host's first address is unspecified, multicast, or link-local of IPv6.

    It need not be known yet.
    """
    try:
        found = [ipaddress.ip_address(address) for address in addresses(host)]
    except (OSError, ValueError):  # it may be known later
        return
    for address in found[:1]:
        scoped = address.version == 6 and address.is_link_local
        if address.is_unspecified or address.is_multicast or scoped:
            why = "has a meaning on one link only" if scoped else "is not the address of one machine"
            raise UsageError(f"{host} {why}, and the machines cannot meet there", _fix())


def _doubt_of(join: JoinFile, own: str) -> Optional[Doubt]:
    """Return the doubt whether machines can meet at the coordinator's host, as seen from this machine; None if there is none.

    own: the address of this machine at which the machines meet, "" if it has none.
    """
    host, first = join.coordinator.host, join.index in (None, join.coordinator.member)
    if not own:
        what = f"{host} is no address of this machine, which is number {join.index}: only NAT can make it right"
        return Doubt(UsageError(what, _fix()), None) if first and join.index is not None else None
    named = host if host == own else f"{host} ({own} here)"
    wrong_name = listens_on_all(host, own) and host.partition(".")[0] != socket.gethostname().partition(".")[0]
    kind = PreflightError if wrong_name else UsageError
    if not first:
        what = (
            f"{named} is this machine, and --node-rank {join.index} is not the first one; no coordinator answers there"
        )
        return Doubt(kind(what, _fix()), min(_TRIED, join.join_timeout))
    limit = min(_ONE_MACHINE, join.join_timeout)
    if listens_on_all(host, own):
        what = f"{named}: this machine listens on all its addresses, and the others must know the name by one of them"
        return Doubt(kind(what, _fix()), limit if wrong_name else None)
    if is_loopback(own):
        return Doubt(UsageError(f"{named} admits no other machine than this one", _fix()), limit)
    return None


def _fix() -> str:
    """Build the fix for a wrong place, which lists up to six addresses of this machine that others can reach."""
    pairs = [(text, name) for name, found in network_addresses.interfaces().items() for text, _ in found]
    usable = [f"{text} ({name})" for text, name in pairs if not (is_loopback(text) or text.lower().startswith("fe80:"))]
    there = f"this machine has {', '.join(usable[:_SHOWN])}" if usable else "this machine has none but the loopback"
    return f"name an address of the machine with --node-rank 0 that the others reach, the same on all; {there}"


def _require_no_other_coordinator(join: JoinFile) -> None:
    """Connect to the coordinator's host, unless it is this machine; raise UsageError if a coordinator of the job answers there.

    It answers with the job's certificate. Where the connection arrives at this process, nothing answers as long as this waits.
    """
    if own_address(join.coordinator.host):
        return
    ctx = context(join.identity.certificate, join.identity.key, server=False)
    with contextlib.suppress(OSError):
        at = addresses(join.coordinator.host)[0], join.coordinator.port
        with socket.create_connection(at, _ANSWER) as sock, ctx.wrap_socket(sock):
            what = f"index {join.coordinator.member} is in use: the coordinator answers at {describe_place(join)}"
            raise UsageError(what, f"give each machine an index of its own: --node-rank; {_fix()}")


class DoubtTimer:
    """A doubt about the place to meet: it is reported once the place was tried, and raised when its time is over."""

    def __init__(self, doubt: Optional[Doubt], report: JoinReport, join: JoinFile) -> None:
        self._doubt, self._report, self._join = doubt, report, join
        self._began = time.monotonic()
        self._checks = 0  # whether another machine coordinates the job
        self._reported = False

    def turn(self) -> None:
        """Raise the doubt's error after its seconds, and report it as a warning after 8 s, once.

        A doubt without a limit is checked every 3 seconds, too: UsageError if another machine coordinates the job.
        """
        if self._doubt is None:
            return
        (error, seconds), passed = self._doubt, time.monotonic() - self._began
        if seconds is not None and passed > seconds:
            raise error
        if seconds is None and passed > 3 * _ANSWER * (self._checks + 1):
            self._checks += 1
            _require_no_other_coordinator(self._join)
        if passed > _TRIED and not self._reported:
            self._reported = True
            self._report.warning(f"{error.what}\n  fix: {error.fix}")

    def found(self) -> None:
        """Drop the doubt, since another member is there: the place is right."""
        self._doubt = None


def ports(join: JoinFile) -> List[int]:
    """List the coordinator's port, or the 16 ports that the job id determines, of which it takes the first free one."""
    if join.coordinator.port:
        return [join.coordinator.port]
    number = int.from_bytes(hashlib.sha256(join.identity.job_id.encode()).digest()[:8], "big")
    first = LOWEST_PORT + number % (_HIGHEST - LOWEST_PORT - _PORTS)
    return list(range(first, first + _PORTS))


def describe_place(join: JoinFile) -> str:
    """Return HOST:PORT of the coordinator for messages, or the host alone if no port is set."""
    host, port = join.coordinator.host, join.coordinator.port
    return endpoint(host, port) if port else host


def addresses(host: str) -> List[str]:
    """Resolve a host to its addresses, within 5 s, IPv4 first and the loopback last.

    Raises OSError for a name that is not known, or a name server that is late.
    """

    def ask() -> List[str]:
        found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
        known = {str(row[4][0]) for row in found}
        return sorted(known, key=lambda address: (is_loopback(address), ":" in address, address))

    found: List[str] = within(_RESOLVE, ask, [])
    if not found:
        raise OSError(f"no answer of a name server about {host}")
    return found


def endpoints(join: JoinFile) -> List[Endpoint]:
    """List all endpoints that may be the coordinator's, as (address, port). Raises OSError if its host is not known."""
    return [(address, port) for address in addresses(join.coordinator.host) for port in ports(join)]


def own_address(host: str) -> str:
    """Return the host's first address that is one of this machine, "" if none is, or the host is not known."""
    with contextlib.suppress(OSError, UnicodeError):
        return next((address for address in addresses(host) if listeners.own_address(address)), "")
    return ""


def is_loopback(address: str) -> bool:
    """Check whether an address is one of the loopback."""
    return address.startswith("127.") or address == "::1"


def listens_on_all(host: str, address: str) -> bool:
    """Check whether the coordinator must listen on all addresses: its host is a name that means the loopback only here.

    Such a name (127.0.1.1 in /etc/hosts) leads others to another address. address: the host's, of this machine.
    """
    return host != address and is_loopback(address) and not on_loopback(host)


def open_port(join: JoinFile, address: str) -> Tuple[socket.socket, int]:
    """Listen at the first of the coordinator's ports that is free, and return the socket and the port.

    Raises PreflightError if none is free.
    """
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
    """Return a port at which this machine could coordinate: the last coordinator's if it is free, else one by the job id.

    Raises PreflightError if none is free.
    """
    try:
        listening, port = open_port(join, address)
    except PreflightError:
        if not join.coordinator.port:
            raise
        listening, port = open_port(replace(join, coordinator=replace(join.coordinator, port=0)), address)
    listening.close()
    return port


def address_to(urls: Sequence[str]) -> str:
    """Find this machine's address on the way to the first server to which there is one; else "". Nothing is sent."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        with contextlib.suppress(OSError, UnicodeError, IndexError):
            address = addresses(host)[0]
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((address, 9))
                return str(sock.getsockname()[0])
    return ""
