"""The fields of an offer and of other messages of a machine that joins, which may have any content."""

from __future__ import annotations

from typing import cast

from clustertool.model import field_types as f
from clustertool.model.joining.join_file import MOST_MEMBERS, OwnSettings
from clustertool.model.joining.join_offers import Address, Offer
from clustertool.model.shape import check_of, read, read_own, whole
from clustertool.model.wire.frames import Header

_MOST_RANKS = 4096  # of one machine: a plan has each of them
_attempt = whole(-1, MOST_MEMBERS - 1)


def read_offer(message: Header) -> Offer:
    """Read an offer. Raises LookupError or ValueError."""
    fields = {name: message[name] for name in Offer._fields if name in message}
    return read(Offer, {**fields, "node": message["index"]})


def read_settings(message: Header) -> OwnSettings:
    """Read the settings in an offer. Raises LookupError or ValueError."""
    own: OwnSettings = read_own(OwnSettings, message["own"])
    if own.nproc is not None and not 0 < own.nproc <= _MOST_RANKS:
        raise ValueError("an offer with a wrong number of processes")
    return own


def read_address(value: object) -> str:
    """Check an address. Raises ValueError."""
    return cast(str, check_of(Address)(value, "the address"))


def read_attempt(value: object) -> int:
    """Check the number of an attempt; -1: none. Raises ValueError."""
    return cast(int, _attempt(value, "the epoch"))


def read_port(value: object) -> int:
    """Check a port; 0: there is none. Raises ValueError."""
    return cast(int, check_of(f.Port)(value, "the port"))
