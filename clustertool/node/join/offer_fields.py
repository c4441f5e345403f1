"""The fields of an offer and of other messages of a machine that joins, which may have any content."""

from __future__ import annotations

import ipaddress

from clustertool.model.joining.join_file import MOST_MEMBERS, OwnSettings
from clustertool.model.joining.join_offers import Offer
from clustertool.model.quantities import HIGHEST_PORT
from clustertool.model.shape import read_own
from clustertool.model.wire.coordinator_messages import read_incarnation
from clustertool.model.wire.frames import Header

_LONGEST = 256  # characters of a host name and of an address
_MOST_RANKS = 4096  # of one machine: a plan has each of them


def read_offer(message: Header) -> Offer:
    """Read an offer. Raises LookupError, TypeError or ValueError."""
    index, nnodes = message["index"], message["nnodes"]
    version, code, hostname = (_text(message[name]) for name in ("version", "code", "hostname"))
    if type(nnodes) is not int or not (index is None or (type(index) is int and 0 <= index < MOST_MEMBERS)):
        raise ValueError("an offer with a wrong index")
    if not hostname:
        raise ValueError("an offer without a host name")
    address, job = read_address(message["address"]), _text(message.get("job", ""))
    return Offer(index, nnodes, version, code, read_incarnation(message["sender"]), address, hostname, job)


def read_settings(message: Header) -> OwnSettings:
    """Read the settings in an offer. Raises LookupError, TypeError or ValueError."""
    own: OwnSettings = read_own(OwnSettings, message["own"])
    if own.nproc is not None and not 0 < own.nproc <= _MOST_RANKS:
        raise ValueError("an offer with a wrong number of processes")
    return own


def _text(value: object) -> str:
    """Check a text. Raises ValueError."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError("an offer with a wrong text")
    return value


def read_address(value: object) -> str:
    """Check an address. Raises ValueError."""
    text = _text(value)
    ipaddress.ip_address(text.partition("%")[0])
    return text


def read_attempt(value: object) -> int:
    """Check the number of an attempt; -1: none. Raises ValueError."""
    if type(value) is not int or not -1 <= value < MOST_MEMBERS:
        raise ValueError("an offer with a wrong epoch")
    return value


def read_port(value: object) -> int:
    """Check a port; 0: there is none. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= HIGHEST_PORT:
        raise ValueError("no port")
    return value
