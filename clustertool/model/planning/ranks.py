"""This module assigns ranks: processes on earlier nodes + local index, or the position in an explicit list."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from clustertool.errors import UsageError
from clustertool.model import roles
from clustertool.model.config.hosts import Host, is_address
from clustertool.model.config.job import JobSpec
from clustertool.model.config.job_tables import Role
from clustertool.model.facts import ByNode, Facts
from clustertool.model.quantities import HIGHEST_PORT, whole

_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
OPTIONS = {"pserver": "--servers", "trainer": "--workers", "heter": "--heter-workers"}
Place = Tuple[int, int]  # node, port


@dataclass(frozen=True)
class Seat:
    """One process before it has ports and an environment. `port` 0: to be chosen. `stage`: 2, 3, ... of heter trainers."""

    role: str
    rank: int
    local_rank: int
    node: int
    port: int
    devices: Tuple[int, ...]
    stage: int


def assign(
    hosts: Sequence[Host], job: JobSpec, facts: ByNode, devices: Mapping[int, Tuple[int, ...]]
) -> Tuple[Seat, ...]:
    """Assign all seats, servers first, each role in rank order: heter trainers stage by stage.

    devices: usable physical ids per node, which give the number of trainers of a collective job; model/planning/devices.py
    assigns them. Raises UsageError for a role without a process, an endpoint that is none or of no host, and --nproc-per-node
    by devices that a host does not have.
    """
    seats: List[Seat] = []
    ranks: Counter[str] = Counter()
    locals_: Counter[Tuple[str, int]] = Counter()
    for name, stage, role in _groups(job):
        if role.endpoints:
            places = _places_of(name, role.endpoints, hosts, facts)
        else:
            counts = [_count(name, role, host, job, devices[host.index], facts) for host in hosts]
            places = [(node, 0) for node, count in enumerate(counts) for _ in range(count)]
        if not places:
            fix = f"give some host the role {name} in HOSTS of a conf.py"
            raise UsageError(f"no host is left to run a {roles.role_name(name)}", fix)
        for node, port in places:
            seats.append(Seat(name, ranks[name], locals_[name, node], node, port, (), stage))
            ranks[name] += 1
            locals_[name, node] += 1
    return tuple(seats)


def _groups(job: JobSpec) -> List[Tuple[str, int, Role]]:
    """List the groups that are ranked one after the other: role, stage (0: none) and how many processes it has."""
    single = {"pserver": job.pserver, "trainer": job.trainer}
    groups = [(name, 0, single[name]) for name in job.roles if name in single]
    return groups + [("heter", stage, role) for stage, role in enumerate(job.heter, 2)]


def _count(name: str, role: Role, host: Host, job: JobSpec, devices: Tuple[int, ...], facts: ByNode) -> int:
    """Count the processes of a role on one host: by the command line, else job.toml, else HOSTS, else the default.

    That is one for each device for trainers that are no launchers, in a job without pservers; else 1. 0 if HOSTS does not give
    the host this role.
    """
    if not host.plays(name):
        return 0
    wanted: Tuple[Optional[int], ...] = (role.per_node, host.count(name))
    if name == "trainer":
        asked = _count_by_devices(job.nproc_of, host, devices, facts[host.index]) if job.nproc_of else job.nproc
        wanted = (asked, role.per_node, host.count(name), host.nproc)
        if not (job.has_pservers or job.nested):
            wanted += (len(devices) or None,)
    return next((number for number in wanted if number is not None), 1)


def _count_by_devices(what: str, host: Host, devices: Tuple[int, ...], facts: Facts) -> int:
    """Count the processes for --nproc-per-node: the devices of the node, its CPUs for cpu, and for auto without devices.

    what: the value of the option. Raises UsageError for another kind without devices.
    """
    if what == "cpu" or (what == "auto" and not devices):
        return facts.cpus
    if not devices:
        raise UsageError(f"--nproc-per-node {what}: {host.name} has none", "give a number, or auto")
    return len(devices)


def _places_of(role: str, endpoints: Sequence[str], hosts: Sequence[Host], facts: ByNode) -> List[Place]:
    """Find node and port of each listed endpoint, port 0 if it names none; the rank is the position in the list.

    Of several hosts with its address the first counts. Raises UsageError for an address of no host. An address is compared
    whole, so 10.0.0.1 never takes 10.0.0.11's place.
    """
    nodes: Dict[str, int] = {}
    for host in reversed(hosts):
        for known in (facts[host.index].address, host.address, host.host):
            nodes[known] = host.index
    places: List[Place] = []
    for endpoint in endpoints:
        address, port = _endpoint(endpoint, role)
        if address not in nodes or not address:
            fix = f"use the host or address of an entry: {', '.join(host.host for host in hosts)}"
            raise UsageError(f"{OPTIONS[role]} {endpoint!r}: {address!r} is no host of {hosts[0].listed}", fix)
        places.append((nodes[address], port))
    return places


def _endpoint(text: str, role: str) -> Tuple[str, int]:
    """Parse ip, ip:port, [IPv6]:port, or an IPv6 address alone, to address and port, 0 if it has none.

    Raises UsageError for another text, and a wrong port.
    """
    if is_address(text):
        return text, 0
    match = _ENDPOINT.fullmatch(text)
    typed = match.group("port") if match else None
    port = whole(typed, 1, HIGHEST_PORT) if typed else 0
    if not match or port is None:
        fix = f"write ip:port, the port from 1 to {HIGHEST_PORT}"
        raise UsageError(f"{text!r} is no endpoint of a {roles.role_name(role)}", fix)
    return match.group("bracketed") or match.group("plain"), port
