"""What machines that join a job offer, and the order in which they get their numbers. Pure."""

from __future__ import annotations

import ipaddress
from itertools import count
from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ClustertoolError, NodeLost, PreflightError, UsageError
from clustertool.model import field_types as fields
from clustertool.model.job.outcome import some
from clustertool.model.joining.engine_place import messages_of
from clustertool.model.joining.join_file import MOST_MEMBERS, OwnSettings
from clustertool.model.shape import Annotated, matching, read, read_own, whole
from clustertool.model.wire.coordinator_messages import Incarnation

_MOST_RANKS = 4096  # of one machine: a plan has each of them


def _is_address(text: str) -> bool:
    """Check for an IP address, which may have a zone."""
    try:
        return bool(ipaddress.ip_address(text.partition("%")[0])) and len(text) <= 256 and text.isprintable()
    except ValueError:
        return False


_Address = Annotated[str, matching(_is_address, "an address")]
_AddressOrNone = Annotated[str, matching(lambda text: not text or _is_address(text), "an address")]
_Hostname = Annotated[str, matching(lambda name: 0 < len(name) <= 256 and name.isprintable(), "a host name")]
COORDINATOR = 0  # its connection, and mostly its index


class Offer(NamedTuple):
    """What the coordinator knows of a machine before the plan.

    node: the index that it asks for, None for any. job: the id of the job in whose epochs it has been, "" if in none. epoch:
    the highest attempt that this process has been in, -1 if none. coordinator: its address, as this machine sees it, or "".
    """

    node: Optional[Annotated[int, whole(0, MOST_MEMBERS - 1)]]
    nnodes: Annotated[int, whole(-(1 << 31))]
    version: fields.Name
    code: fields.Name
    sender: Incarnation
    address: _Address
    hostname: _Hostname
    job: fields.Name = ""
    epoch: Annotated[int, whole(-1, MOST_MEMBERS - 1)] = -1
    coordinator: _AddressOrNone = ""

    @property
    def name(self) -> str:
        return f"{self.hostname} ({self.address})"


def read_offer(message: Mapping[str, object]) -> Offer:
    """Read the fields of an offer. Raises LookupError without an index, and ValueError for another missing or a wrong field."""
    fields = {name: message[name] for name in Offer._fields if name in message}
    return read(Offer, {**fields, "node": message["index"]})


def read_settings(message: Mapping[str, object]) -> OwnSettings:
    """Read the settings in an offer of a machine that has the same code.

    Raises LookupError if there are none, and ValueError for wrong ones, or more than 4096 processes.
    """
    own: OwnSettings = read_own(OwnSettings, message["own"])
    if own.nproc is not None and not 0 < own.nproc <= _MOST_RANKS:
        raise ValueError("an offer with a wrong number of processes")
    return own


class JoinedNode(NamedTuple):
    """A machine that has joined: its connection, and what it has offered."""

    connection: int
    offer: Offer


def is_same(member: JoinedNode, offer: Offer) -> bool:
    """Check whether an offer is of the process of this member, which has connected again. The coordinator's own never is.

    Two containers of one machine may have a boot, a pid and a start in common, so the host name counts, too.
    """
    known = member.offer
    return member.connection != COORDINATOR and (known.sender, known.hostname) == (offer.sender, offer.hostname)


def has_rebooted(known: Offer, offer: Offer) -> bool:
    """Check whether an offer is of the same machine after a new boot: nothing has closed its former connection."""
    return known.hostname == offer.hostname and known.sender.boot != offer.sender.boot


def ordered(members: Sequence[JoinedNode]) -> Tuple[JoinedNode, ...]:
    """Sort members by node id. An index is a node id. The others get the free ones: by address, then by the process."""
    numbered = with_numbers(members)
    return tuple(numbered[node] for node in range(len(members)))


def _by_address(offer: Offer) -> Tuple[int, int, str, Incarnation]:
    """Compute a sort key with addresses as numbers: 10.0.0.9 is before 10.0.0.10."""
    try:
        address = ipaddress.ip_address(offer.address.partition("%")[0])
    except ValueError:
        return 9, 0, offer.address, offer.sender
    return address.version, int(address), "", offer.sender


def with_numbers(members: Sequence[JoinedNode], taken: int = 0) -> Dict[int, JoinedNode]:
    """Map members by their numbers in the job. One without a number gets the lowest free one that is not below `taken`.

    The numbers of machines that were lost stay theirs.
    """
    found = {member.offer.node: member for member in members if member.offer.node is not None}
    for member in sorted((one for one in members if one.offer.node is None), key=lambda one: _by_address(one.offer)):
        number = next(free for free in count(taken) if free not in found)
        found[number] = member._replace(offer=member.offer._replace(node=number))
    return found


def other_code(offer: Offer, own: Offer) -> ClustertoolError:
    """Create the error for a machine whose code differs from the coordinator's."""

    def version(one: Offer) -> str:
        return f"clustertool {one.version} (code {one.code[:8]})"

    what = f"{offer.hostname} has {version(offer)}, the coordinator {own.name} has {version(own)}"
    return PreflightError(what, "install the same version on all machines")


def other_job(offer: Offer, job: str) -> ClustertoolError:
    """Create the error for a member of another job with the same id."""
    what = f"{offer.hostname} is a member of job {offer.job}, and the coordinator has begun another one, {job}"
    return NodeLost(what, "the first job has lost its coordinator: see its records, and start it again")


def index_taken(offer: Offer, first: Offer) -> ClustertoolError:
    """Create the error for an offer with the index of the machine `first`."""
    role = "is the coordinator" if first.node == COORDINATOR else "has joined as it and is connected"
    what = f"index {offer.node} is in use: {first.name}, process {first.sender.pid}, {role}"
    return UsageError(what, "give each machine an index of its own, or end that process")


def present_names(members: Sequence[JoinedNode]) -> str:
    """Name the members, the first four of many."""
    return some([member.offer.name for member in members])


def too_few(
    members: Sequence[JoinedNode], total: int, lacking: Sequence[int], timeout: float, names: Sequence[str], engine: str
) -> ClustertoolError:
    """Build the error for a joining that has ended after `timeout` seconds.

    total: of machines. lacking: indices without one. names, engine: see JoinState.
    """
    what = f"{len(members)} of {total} nodes have joined within {timeout:g} s"
    if names:
        fix = (
            f"{messages_of(engine)} has the messages of these nodes; JOIN_TIMEOUT in conf.py is the time that they have"
        )
        return NodeLost(f"{what}; missing: {some([names[index] for index in lacking])}", fix)
    which = f"; missing: index {', '.join(map(str, lacking))}" if lacking else ""
    fix = "start the job on the missing machines too; JOIN_TIMEOUT is the time that they have"
    return NodeLost(f"{what}: {present_names(members)}{which}", fix)
