"""The place where typed commands meet is compared with the addresses of this machine: what does not fit is reported in seconds.

A place that may be right is tried first: two members may be on one machine, and another machine may pass a port on to this one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from typing import NamedTuple, Optional

from clustertool.errors import ClustertoolError, PreflightError, UsageError
from clustertool.model.joining.join_file import JoinFile
from clustertool.node.join import meeting
from clustertool.node.join.join_report import JoinReport
from clustertool.node.probe import network_addresses
from clustertool.node.system.tls_link import context

_TRIED = 8.0  # seconds: commands that are typed together have found each other by then
_ONE_MACHINE = 60.0  # seconds to type the command a second time on the same machine
_ANSWER = 1.0  # seconds for TCP and TLS
_SHOWN = 6  # addresses


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


def require_place(host: str) -> None:
    """Raise UsageError for an address that is not one of a single machine."""
    try:
        found = [ipaddress.ip_address(address) for address in meeting.addresses(host)]
    except (OSError, ValueError):  # it may be known later
        return
    for address in found[:1]:
        scoped = address.version == 6 and address.is_link_local
        if address.is_unspecified or address.is_multicast or scoped:
            why = "has a meaning on one link only" if scoped else "is not the address of one machine"
            raise UsageError(f"{host} {why}, and the machines cannot meet there", _fix())


def doubt_of(join: JoinFile, own: str) -> Optional[Doubt]:
    """Describe what does not fit, None if all does.

    own: the address of this machine at which the machines meet, "" if it has none.
    """
    host, first = join.coordinator.host, join.index in (None, join.coordinator.member)
    if not own:
        what = f"{host} is no address of this machine, which is number {join.index}: only NAT can make it right"
        return Doubt(UsageError(what, _fix()), None) if first and join.index is not None else None
    named = host if host == own else f"{host} ({own} here)"
    wrong_name = meeting.listens_on_all(host, own) and host.partition(".")[0] != socket.gethostname().partition(".")[0]
    kind = PreflightError if wrong_name else UsageError
    if not first:
        what = (
            f"{named} is this machine, and --node-rank {join.index} is not the first one; no coordinator answers there"
        )
        return Doubt(kind(what, _fix()), min(_TRIED, join.join_timeout))
    limit = min(_ONE_MACHINE, join.join_timeout)
    if meeting.listens_on_all(host, own):
        what = f"{named}: this machine listens on all its addresses, and the others must know the name by one of them"
        return Doubt(kind(what, _fix()), limit if wrong_name else None)
    if meeting.loopback(own):
        return Doubt(UsageError(f"{named} admits no other machine than this one", _fix()), limit)
    return None


def _fix() -> str:
    pairs = [(text, name) for name, found in network_addresses.interfaces().items() for text, _ in found]
    usable = [
        f"{text} ({name})" for text, name in pairs if not (meeting.loopback(text) or text.lower().startswith("fe80:"))
    ]
    there = f"this machine has {', '.join(usable[:_SHOWN])}" if usable else "this machine has none but the loopback"
    return f"name an address of the machine with --node-rank 0 that the others reach, the same on all; {there}"


def _require_first(join: JoinFile) -> None:
    """Raise UsageError if another machine coordinates the job at an address that is none of this machine.

    It has the certificate of the job. Where the connection arrives at this process, nothing answers as long as this waits.
    """
    if meeting.own_address(join.coordinator.host):
        return
    ctx = context(join.identity.certificate, join.identity.key, server=False)
    with contextlib.suppress(OSError):
        at = meeting.addresses(join.coordinator.host)[0], join.coordinator.port
        with socket.create_connection(at, _ANSWER) as sock, ctx.wrap_socket(sock):
            what = f"index {join.coordinator.member} is in use: the coordinator answers at {meeting.where(join)}"
            raise UsageError(what, f"give each machine an index of its own: --node-rank; {_fix()}")


class DoubtTimer:
    """It reports a doubt once the place was tried, and raises its error when its time is over."""

    def __init__(self, doubt: Optional[Doubt], report: JoinReport, join: JoinFile) -> None:
        self._doubt, self._report, self._join = doubt, report, join
        self._began = self._tried = time.monotonic()
        self._silent = False

    def turn(self) -> None:
        """Raise the error, if it is time for it."""
        if self._doubt is None:
            return
        (error, seconds), now = self._doubt, time.monotonic()
        if seconds is not None and now - self._began > seconds:
            raise error
        if seconds is None and now - self._tried > 3 * _ANSWER:
            _require_first(self._join)
            self._tried = time.monotonic()
        if now - self._began > _TRIED and not self._silent:
            self._silent = True
            self._report.warning(f"{error.what}\n  fix: {error.fix}")

    def found(self) -> None:
        """Record that another member is there: the place is right."""
        self._doubt = None
