"""This module chooses every port of a job: one set of ports per machine, none that is in use or in the kernel's own range."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Set, Tuple

from clustertool.errors import ClustertoolError, PreflightError, Several, raise_all
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import Facts
from clustertool.model.planning.ranks import OPTIONS, Seat
from clustertool.model.quantities import HIGHEST_PORT

_LOWEST = 10000


@dataclass(frozen=True)
class Ports:
    """`of`: (role, rank) -> its ports, the endpoint's first. The rest: one port each, 0 where the mode has none."""

    of: Mapping[Tuple[str, int], Tuple[int, ...]]
    master: int
    gloo: int
    lead: int
    moved: Tuple[Tuple[int, int, int], ...] = ()  # (node, busy port, port taken instead) of pservers' default ports


def choose(seats: Sequence[Seat], cluster: Cluster, job: JobSpec, facts: Mapping[int, Facts], job_id: str) -> Ports:
    """Raises PreflightError (all of them at once) naming the holder of a port that was asked for and is taken."""
    desk = _PortChooser(cluster, facts, job_id)
    of: Dict[Tuple[str, int], Tuple[int, ...]] = {}
    trainers = [seat for seat in seats if seat.role == "trainer"]
    servers = [seat for seat in seats if seat.role == "pserver"]
    lead = desk.exactly(0, cluster.lead_port, "LEAD_PORT") if cluster.lead_port else 0
    width = cluster.ports_num + cluster.ports_num_for_sparse
    for seat in seats:  # ports that were asked for go first
        if seat.port:
            of[seat.role, seat.rank] = (desk.exactly(seat.node, seat.port, OPTIONS[seat.role], alone=False),)
    gloo = desk.exactly(servers[0].node, job.http_port, "--http-port") if job.http_port and servers else 0
    for seat in servers:
        if seat.port:
            of[seat.role, seat.rank] += desk.rest(seat.node, seat.port, width)
    for seat in servers:
        if not seat.port:
            of[seat.role, seat.rank] = desk.block(seat.node, width)
    for seat in seats:
        if not seat.port and seat.role != "pserver":
            collective = job.mode == "collective" and cluster.start_port
            of[seat.role, seat.rank] = (desk.next(seat.node) if collective else desk.free(seat.node),)
    first = trainers[0].node
    master = desk.next(first) if job.mode == "collective" and cluster.start_port else desk.free(first)
    gloo = gloo or (desk.free(servers[0].node) if servers else 0)
    lead = lead or desk.free(0)
    raise_all(desk.taken)
    return Ports(of, master, gloo, lead, tuple(desk.moved))


def sample(cluster: Cluster, facts: Mapping[int, Facts], seed: str) -> Dict[int, Tuple[int, ...]]:
    """Free ports as a job would get them on each node: conf.py's, else any. Ports in use are left out."""
    desk = _PortChooser(cluster, facts, seed)
    found: Dict[int, List[int]] = {}
    for node in facts:
        wanted = [desk.exactly(node, cluster.lead_port, "LEAD_PORT")] if cluster.lead_port and node == 0 else []
        wanted.append(desk.next(node) if cluster.start_port else desk.free(node))
        if cluster.pserver_port_given:
            wanted += desk.block(node, cluster.ports_num + cluster.ports_num_for_sparse)
        fit = [port for port in dict.fromkeys(wanted) if port <= HIGHEST_PORT and port not in facts[node].busy]
        found[node] = fit or [desk.free(node)]
    return {node: tuple(ports) for node, ports in found.items()}


class _PortChooser:
    """Hands out ports of each machine once. What was asked for and is busy is remembered in `taken`, not raised."""

    def __init__(self, cluster: Cluster, facts: Mapping[int, Facts], job_id: str) -> None:
        self.taken: List[ClustertoolError] = []
        self.moved: List[Tuple[int, int, int]] = []
        self._cluster = cluster
        self._facts = facts
        self._names = {host.index: host.name for host in cluster.hosts}
        self._handed: Dict[str, Dict[int, Set[str]]] = {}
        self._seed = zlib.crc32(job_id.encode())
        self._next: Dict[str, int] = {}
        self._block: Dict[str, int] = {}

    def given(self, node: int) -> Dict[int, Set[str]]:
        """What this machine has given away: port -> the addresses it was given on."""
        return self._handed.setdefault(self._facts[node].machine, {})

    def exactly(self, node: int, port: int, why: str, alone: bool = True) -> int:
        """A port that the user named. Not `alone`: it may be another process's too, on another address of the machine."""
        fact = self._facts[node]
        others = self.given(node).setdefault(port, set())
        if port > HIGHEST_PORT:
            self._complain(node, port, f"is above {HIGHEST_PORT}", why)
        elif port in fact.busy:
            self._complain(node, port, f"is in use by {fact.holder(port)}", why)
        elif fact.address in others or (alone and others):
            self._complain(node, port, "is given to two processes of this job", why)
        others.add(fact.address)
        return port

    def rest(self, node: int, first: int, width: int) -> Tuple[int, ...]:
        """The ports that follow a pserver's endpoint that was asked for, up to the next one that was.

        A program that opens one port only may so be packed closer than `width`; nothing else is put in between.
        """
        found: List[int] = []
        for port in range(first + 1, first + width):
            if port in self.given(node):
                break
            found.append(self.exactly(node, port, "--servers"))
        return tuple(found)

    def free(self, node: int) -> int:
        """A port outside the kernel's own range. Where to begin depends on the job, so that two jobs rarely meet."""
        fact = self._facts[node]
        low, high = fact.ephemeral
        spans = (
            range(_LOWEST, low),
            range(1024, low),
            range(high + 1, HIGHEST_PORT + 1),
            range(1024, HIGHEST_PORT + 1),
        )
        span = next(span for span in spans if len(span) >= 1000)
        given = self.given(node)
        reserved = range(self._cluster.pserver_port, self._cluster.pserver_port + 64)
        for step in range(len(span)):
            port = span[(self._seed + step) % len(span)]
            if port not in fact.busy and port not in given and port not in reserved:
                given[port] = {fact.address}
                return port
        none = PreflightError("no free port is left", "end the programs that hold them", self._names[node])
        raise Several([*self.taken, none]) if self.taken else none

    def next(self, node: int) -> int:
        """START_PORT, START_PORT + 1, ... on this machine, without those that were asked for by another name."""
        machine = self._facts[node].machine
        port = self._next.get(machine, self._cluster.start_port)
        while port != self._cluster.start_port and port in self.given(node):
            port += 1
        self._next[machine] = port + 1
        return self.exactly(node, port, "START_PORT")

    def block(self, node: int, width: int) -> Tuple[int, ...]:
        """The ports of one pserver: consecutive, from PADDLE_PORT on. Only a PADDLE_PORT from conf.py is a demand."""
        fact, given = self._facts[node], self.given(node)
        start = wanted = self._block.get(fact.machine, self._cluster.pserver_port)
        if not self._cluster.pserver_port_given:
            while start + width <= HIGHEST_PORT + 1 and any(
                p in fact.busy or p in given for p in range(start, start + width)
            ):
                start += width
            busy = [port for port in range(wanted, min(wanted + width, start)) if port in fact.busy]
            if busy:
                self.moved.append((node, busy[0], start))
        if start + width > HIGHEST_PORT + 1:
            self._complain(node, start + width - 1, f"is above {HIGHEST_PORT}", "PADDLE_PORT")
            return (start,)
        self._block[fact.machine] = start + width
        return tuple(self.exactly(node, port, "PADDLE_PORT") for port in range(start, start + width))

    def _complain(self, node: int, port: int, what: str, why: str) -> None:
        fix = f"end that program, or choose another {why}"
        error = PreflightError(f"port {port} ({why}) {what}", fix, self._names[node])
        if str(error) not in map(str, self.taken):
            self.taken.append(error)
