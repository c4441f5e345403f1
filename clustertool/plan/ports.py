"""Every port of a job is chosen here: one port space per machine, nothing busy, nothing the kernel gives away itself."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Set, Tuple

from clustertool.errors import ClustertoolError, PreflightError, raise_all
from clustertool.plan.cluster import Cluster
from clustertool.plan.facts import Facts
from clustertool.plan.job import JobSpec
from clustertool.plan.ranks import Seat

_LOWEST = 10000


@dataclass(frozen=True)
class Ports:
    """`of`: (role, rank) -> its ports, the endpoint's first. The rest: one port each, 0 where the mode has none."""

    of: Mapping[Tuple[str, int], Tuple[int, ...]]
    master: int
    gloo: int
    lead: int
    moved: Tuple[Tuple[int, int], ...] = ()  # (node, port) of pservers whose default port was busy


def choose(seats: Sequence[Seat], cluster: Cluster, job: JobSpec, facts: Mapping[int, Facts], job_id: str) -> Ports:
    """Raises PreflightError (all of them at once) naming the holder of a port that was asked for and is taken."""
    desk = _Desk(cluster, facts, job_id)
    of: Dict[Tuple[str, int], Tuple[int, ...]] = {}
    trainers = [seat for seat in seats if seat.role == "trainer"]
    servers = [seat for seat in seats if seat.role == "pserver"]
    lead = desk.exactly(0, cluster.lead_port, "LEAD_PORT") if cluster.lead_port else 0
    width = cluster.ports_num + cluster.ports_num_for_sparse
    for seat in sorted(seats, key=lambda seat: not seat.port):  # ports that were asked for go first
        if seat.port:
            count = width if seat.role == "pserver" else 1
            option = "--servers" if seat.role == "pserver" else "--workers"
            # Only the endpoint itself was asked for: a program that opens one port may be packed closer than `width`.
            of[seat.role, seat.rank] = (desk.exactly(seat.node, seat.port, option), *range(seat.port + 1, seat.port + count))
    gloo = desk.exactly(servers[0].node, job.http_port, "--http-port") if job.http_port and servers else 0
    for seat in servers:
        if (seat.role, seat.rank) not in of:
            of[seat.role, seat.rank] = desk.block(seat.node, width)
    for seat in trainers:
        if (seat.role, seat.rank) not in of:
            collective = job.mode == "collective" and cluster.start_port
            of[seat.role, seat.rank] = (desk.next(seat.node) if collective else desk.free(seat.node),)
    first = trainers[0].node
    master = desk.next(first) if job.mode == "collective" and cluster.start_port else desk.free(first)
    gloo = gloo or (desk.free(servers[0].node) if servers else 0)
    lead = lead or desk.free(0)
    raise_all(desk.taken)
    return Ports(of, master, gloo, lead, tuple(desk.moved))


class _Desk:
    """Hands out ports of each machine once. What was asked for and is busy is remembered in `taken`, not raised."""

    def __init__(self, cluster: Cluster, facts: Mapping[int, Facts], job_id: str) -> None:
        self.taken: List[ClustertoolError] = []
        self.moved: List[Tuple[int, int]] = []
        self._cluster = cluster
        self._facts = facts
        self._names = {host.index: host.name for host in cluster.hosts}
        self._given: Dict[str, Set[int]] = {}
        self._seed = zlib.crc32(job_id.encode())
        self._next: Dict[str, int] = {}
        self._block: Dict[str, int] = {}

    def exactly(self, node: int, port: int, why: str) -> int:
        """A port that the user named."""
        fact = self._facts[node]
        given = self._given.setdefault(fact.machine, set())
        if port in fact.busy:
            self._complain(node, port, f"is held by {fact.holder(port)}", why)
        elif port in given:
            self._complain(node, port, "is given to two processes of this job", why)
        given.add(port)
        return port

    def free(self, node: int) -> int:
        """A port outside the kernel's own range. Where to begin depends on the job, so that two jobs rarely meet."""
        fact = self._facts[node]
        low, high = fact.ephemeral
        span = range(_LOWEST, low) if low - _LOWEST >= 1000 else range(high + 1, 65536)
        if not span:
            span = range(1024, 65536)
        given = self._given.setdefault(fact.machine, set())
        reserved = {self._cluster.pserver_port + i for i in range(64)}
        for step in range(len(span)):
            port = span[(self._seed + step) % len(span)]
            if port not in fact.busy and port not in given and port not in reserved:
                given.add(port)
                return port
        raise PreflightError("no free port is left", "end the programs that hold them", self._names[node])

    def next(self, node: int) -> int:
        """START_PORT, START_PORT + 1, ... on this machine."""
        machine = self._facts[node].machine
        port = self._next.get(machine, self._cluster.start_port)
        self._next[machine] = port + 1
        return self.exactly(node, port, "START_PORT")

    def block(self, node: int, width: int) -> Tuple[int, ...]:
        """The ports of one pserver: consecutive, from PADDLE_PORT on. Only a PADDLE_PORT from conf.py is a demand."""
        fact = self._facts[node]
        given = self._given.setdefault(fact.machine, set())
        start = self._block.get(fact.machine, self._cluster.pserver_port)
        if not self._cluster.pserver_port_given:
            wanted = start
            while start + width < 65536 and any(p in fact.busy or p in given for p in range(start, start + width)):
                start += width
            if start != wanted:
                self.moved.append((node, start))
        self._block[fact.machine] = start + width
        return tuple(self.exactly(node, port, "PADDLE_PORT") for port in range(start, start + width))

    def _complain(self, node: int, port: int, what: str, why: str) -> None:
        fix = f"end that program, or choose another {why}"
        self.taken.append(PreflightError(f"port {port} ({why}) {what}", fix, self._names[node]))
