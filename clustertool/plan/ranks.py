"""THE place for ranks: rank = processes on earlier nodes + local index, or the position in an explicit list."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from clustertool.errors import UsageError
from clustertool.plan.facts import Facts
from clustertool.plan.hosts import Host, is_address
from clustertool.plan.job import JobSpec, Role
from clustertool.plan.shards import split

_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
ROLES = {"collective": ("trainer",), "ps": ("pserver", "trainer")}


@dataclass(frozen=True)
class Seat:
    """One process before it has ports and an environment. `port` 0: to be chosen."""

    role: str
    rank: int
    local_rank: int
    node: int
    port: int = 0
    devices: Tuple[int, ...] = ()


def assign(
    hosts: Sequence[Host], job: JobSpec, facts: Mapping[int, Facts], devices: Mapping[int, Tuple[int, ...]]
) -> Tuple[Seat, ...]:
    """All seats, servers first, each role in rank order. `devices`: usable physical ids per node. Raises UsageError."""
    seats: List[Seat] = []
    for name in ROLES[job.mode]:
        role = job.pserver if name == "pserver" else job.trainer
        if role.endpoints:
            seats += _listed(name, role.endpoints, hosts, facts)
        else:
            seats += _numbered(name, [_count(name, role, host, job, devices[host.index]) for host in hosts])
    for name in ROLES[job.mode]:
        if not any(seat.role == name for seat in seats):
            raise UsageError(f"no host is left to run a {name}", f"give some host the role {name} in HOSTS")
    return tuple(_with_devices(seats, devices))


def _count(name: str, role: Role, host: Host, job: JobSpec, devices: Tuple[int, ...]) -> int:
    """Processes of a role on one host: command line, job.toml, HOSTS, then the default of the mode."""
    if not host.plays(name):
        return 0
    wanted: Tuple[Optional[int], ...] = (role.per_node, host.count(name))
    if name == "trainer":
        wanted = (job.nproc, role.per_node, host.count(name), host.nproc)
        if job.mode == "collective":
            wanted += (len(devices) or None,)
    return next((number for number in wanted if number is not None), 1)


def _numbered(role: str, counts: Sequence[int]) -> List[Seat]:
    seats: List[Seat] = []
    for node, count in enumerate(counts):
        for local in range(count):
            seats.append(Seat(role, len(seats), local, node))
    return seats


def _listed(role: str, endpoints: Sequence[str], hosts: Sequence[Host], facts: Mapping[int, Facts]) -> List[Seat]:
    """Rank = position in the list. An address is compared whole, so 10.0.0.1 never takes 10.0.0.11's place."""
    nodes: Dict[str, int] = {}
    for host in reversed(hosts):
        for known in (facts[host.index].address, host.address, host.host):
            nodes[known] = host.index
    seen: Dict[int, int] = {}
    seats: List[Seat] = []
    for endpoint in endpoints:
        address, port = _endpoint(endpoint, role)
        if address not in nodes or not address:
            option = "--servers" if role == "pserver" else "--workers"
            raise UsageError(
                f"{option} {endpoint!r}: {address!r} is no host of HOSTS",
                f"use the host or address of an entry: {', '.join(host.host for host in hosts)}",
            )
        node = nodes[address]
        local = seen.get(node, 0)
        seen[node] = local + 1
        seats.append(Seat(role, len(seats), local, node, port))
    return seats


def _endpoint(text: str, role: str) -> Tuple[str, int]:
    """ip, ip:port, [IPv6]:port, or an IPv6 address alone -> address and port, 0 if it has none."""
    if is_address(text):
        return text, 0
    match = _ENDPOINT.fullmatch(text)
    port = match.group("port") if match else None
    if not match or (port is not None and not 0 < int(port) < 65536):
        raise UsageError(f"{text!r} is no endpoint of a {role}", "write ip:port, the port from 1 to 65535")
    return match.group("bracketed") or match.group("plain"), int(port or 0)


def _with_devices(seats: Sequence[Seat], devices: Mapping[int, Tuple[int, ...]]) -> List[Seat]:
    """Trainers of a node share its devices: divided evenly, or taken in turns when there are fewer; servers take none."""
    local_sizes: Dict[int, int] = {}
    for seat in seats:
        if seat.role == "trainer":
            local_sizes[seat.node] = local_sizes.get(seat.node, 0) + 1
    result = []
    for seat in seats:
        cards = devices[seat.node] if seat.role == "trainer" else ()
        if cards and len(cards) >= local_sizes[seat.node]:
            cards = split(cards, local_sizes[seat.node])[seat.local_rank]
        elif cards:
            cards = (cards[seat.local_rank % len(cards)],)
        result.append(Seat(seat.role, seat.rank, seat.local_rank, seat.node, seat.port, cards))
    return result
