"""This module chooses every port of a job: one set of ports per machine, none that is in use or in the kernel's own range."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Set, Tuple

from clustertool.errors import ClustertoolError, PreflightError, Several, UsageError, raise_all
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import ByNode
from clustertool.model.planning.ranks import OPTIONS, Seat
from clustertool.model.quantities import HIGHEST_PORT

LOWEST_PORT = 10000  # of those that a job takes, up to the kernel's own range (net.ipv4.ip_local_port_range)


@dataclass(frozen=True)
class Ports:
    """`of`: (role, rank) -> its ports, the endpoint's first. The rest: one port each, 0 where the mode has none.

    ras: of the nodes where NCCL serves its state. moved: (node, busy port, port taken instead) of pservers' default ports.
    """

    of: Mapping[Tuple[str, int], Tuple[int, ...]]
    master: int
    gloo: int
    coordinator: int
    ras: Mapping[int, int]
    moved: Tuple[Tuple[int, int, int], ...] = ()


def choose(
    seats: Sequence[Seat], cluster: Cluster, job: JobSpec, facts: ByNode, job_id: str, nccl: Sequence[int] = ()
) -> Ports:
    """Choose the ports of all processes, the master, gloo, the coordinator and NCCL; those that were asked for first.

    nccl: the nodes where NCCL needs a port.

    Raises PreflightErrors (all at once), each with the holder of a port that was asked for and is taken, also if no port is
    free; UsageError if all pservers must have one port, and cannot.
    """
    desk = _PortChooser(cluster, facts, job_id)
    of: Dict[Tuple[str, int], Tuple[int, ...]] = {}
    trainers = [seat for seat in seats if seat.role == "trainer"]
    servers = [seat for seat in seats if seat.role == "pserver"]
    coordinator = desk.exactly(0, cluster.lead_port, "LEAD_PORT") if cluster.lead_port else 0
    width = cluster.ports_num + cluster.ports_num_for_sparse
    any_port = desk.next if not job.has_pservers and cluster.start_port else desk.free
    for seat in seats:  # ports that were asked for go first
        if seat.port:
            of[seat.role, seat.rank] = (desk.exactly(seat.node, seat.port, OPTIONS[seat.role], alone=False),)
    asked = job.ports
    gloo = desk.exactly(servers[0].node, asked.gloo, "--http-port") if asked.gloo and servers else 0
    master = desk.exactly(trainers[0].node, asked.master, "--master-port") if asked.master else 0
    for seat in servers:
        if seat.port:
            of[seat.role, seat.rank] += desk.rest(seat.node, seat.port, width)
    _require_one_port(servers, job, facts)
    own_port = not (cluster.pserver_port_given or job.one_port or one_port(job))
    for layer in _layers(servers, facts, own_port):
        blocks = desk.blocks([seat.node for seat in layer], width)
        of.update(((seat.role, seat.rank), block) for seat, block in zip(layer, blocks))
    for seat in seats:
        if not seat.port and seat.role != "pserver":
            of[seat.role, seat.rank] = (any_port(seat.node),)
    master = master or any_port(trainers[0].node)
    gloo = gloo or (desk.free(servers[0].node) if servers else 0)
    coordinator = coordinator or desk.free(0)
    ras = {node: desk.free(node) for node in nccl}
    raise_all(desk.taken)
    return Ports(of, master, gloo, coordinator, ras, tuple(desk.moved))


def one_port(job: JobSpec) -> bool:
    """Check whether the trainers' command gets one port for all pservers, as `paddle train --port=P --pservers=IP,IP` of v2."""
    return any("{pserver_port}" in text.replace("{{", "") for text in job.trainer.command or ())


def _layers(servers: Sequence[Seat], facts: ByNode, own_port: bool) -> List[List[Seat]]:
    """Group pservers without a port of their own by equal ports: the first of each place, the second, ...

    A place is a machine, or an address where pservers of one machine may have one port (not own_port).
    """
    layers: List[List[Seat]] = []
    number: Counter[Tuple[str, str]] = Counter()
    for seat in servers:
        if not seat.port:
            fact = facts[seat.node]
            place = (fact.machine, "" if own_port else fact.address)
            layers += [[]] * (number[place] == len(layers))
            layers[number[place]] = [*layers[number[place]], seat]
            number[place] += 1
    return layers


def _require_one_port(servers: Sequence[Seat], job: JobSpec, facts: ByNode) -> None:
    """Raise UsageError where the trainers' command gets one port for all pservers, and they cannot all have it."""
    if not one_port(job):
        return
    fix = (
        "one pserver for each address: --server-num 1, another `address` of a node in HOSTS, or `roles` without pserver"
    )
    at = Counter(facts[seat.node].address for seat in servers)
    address, most = at.most_common(1)[0] if at else ("", 0)
    if most > 1:
        raise UsageError(f"{most} pservers have the address {address}, and trainers get one port for all pservers", fix)
    typed = sorted({seat.port for seat in servers})
    if len(typed) > 1:
        what = f"--servers names the ports {', '.join(str(port or 'none') for port in typed)}"
        raise UsageError(f"{what}, and trainers get one port for all pservers", "give all pservers the same port")


def sample(cluster: Cluster, facts: ByNode, seed: str) -> Dict[int, Tuple[int, ...]]:
    """Choose ports on each node as a job would get them: those of conf.py that are not in use, else any free one.

    seed: determines where the search of free ones begins.
    """
    desk = _PortChooser(cluster, facts, seed)
    found: Dict[int, List[int]] = {}
    for node in facts:
        wanted = [desk.exactly(node, cluster.lead_port, "LEAD_PORT")] if cluster.lead_port and node == 0 else []
        wanted.append(desk.next(node) if cluster.start_port else desk.free(node))
        if cluster.pserver_port_given:
            wanted += desk.blocks([node], cluster.ports_num + cluster.ports_num_for_sparse)[0]
        fit = [port for port in dict.fromkeys(wanted) if port <= HIGHEST_PORT and port not in facts[node].busy]
        found[node] = fit or [desk.free(node)]
    return {node: tuple(ports) for node, ports in found.items()}


class _PortChooser:
    """The ports of each machine, each given to one process. A port that was asked for and is busy is an error in `taken`."""

    def __init__(self, cluster: Cluster, facts: ByNode, job_id: str) -> None:
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
        """Return the ports of this node's machine that were given away, each with the addresses for which it was."""
        return self._handed.setdefault(self._facts[node].machine, {})

    def exactly(self, node: int, port: int, why: str, alone: bool = True) -> int:
        """Take and return a port that the user named. One that cannot be used is noted as an error in `taken`.

        Not `alone`: it may be another process's too, on another address of the machine.
        """
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
        """Take the ports that follow a pserver's endpoint that was asked for, up to the next one that was.

        A program that opens one port only may so be packed closer than `width`; nothing else is put in between.
        """
        found: List[int] = []
        for port in range(first + 1, first + width):
            if port in self.given(node):
                break
            found.append(self.exactly(node, port, "--servers"))
        return tuple(found)

    def free(self, node: int) -> int:
        """Take and return a port outside the kernel's own range, from a start that depends on the job: two jobs rarely meet.

        Busy ports, ports already taken on the node and the 64 from PADDLE_PORT on are left out. Raises PreflightError if none
        is left, together with the errors in `taken`.
        """
        fact = self._facts[node]
        low, high = fact.ephemeral
        end = HIGHEST_PORT + 1
        spans = (range(LOWEST_PORT, low), range(1024, low), range(high + 1, end), range(1024, end))
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
        """Take and return the next port from START_PORT on, on this node's machine. Ports that were given away are left out.

        One that is in use is an error in `taken`.
        """
        machine = self._facts[node].machine
        port = self._next.get(machine, self._cluster.start_port)
        while port != self._cluster.start_port and port in self.given(node):
            port += 1
        self._next[machine] = port + 1
        return self.exactly(node, port, "START_PORT")

    def blocks(self, nodes: Sequence[int], width: int) -> List[Tuple[int, ...]]:
        """Take the ports of one pserver on each of these nodes: consecutive, from PADDLE_PORT on, and the same on all nodes.

        Only a PADDLE_PORT from conf.py is a demand, and an error in `taken` if it is busy. Else the first block that is free on
        all nodes is taken, and a busy port that was passed is noted in `moved`.
        """
        machines = {self._facts[node].machine: node for node in reversed(nodes)}
        start = wanted = max(self._block.get(machine, self._cluster.pserver_port) for machine in machines)
        if not self._cluster.pserver_port_given:
            taken = {port for node in nodes for port in self._facts[node].busy}.union(*map(self.given, nodes))
            while start + width <= HIGHEST_PORT + 1 and not taken.isdisjoint(range(start, start + width)):
                start += width
            passed = range(wanted, min(wanted + width, start))
            busy = ((node, port) for node in nodes for port in passed if port in self._facts[node].busy)
            self.moved += [(node, port, start) for node, port in itertools.islice(busy, 1)]
        if start + width > HIGHEST_PORT + 1:
            self._complain(nodes[0], start + width - 1, f"is above {HIGHEST_PORT}", "PADDLE_PORT")
            return [(start,)] * len(nodes)
        self._block.update(dict.fromkeys(machines, start + width))
        ports = range(start, start + width)
        return [
            tuple(self.exactly(node, port, "PADDLE_PORT", alone=node in machines.values()) for port in ports)
            for node in nodes
        ]

    def _complain(self, node: int, port: int, what: str, why: str) -> None:
        """Note an error about a port that was asked for, once. what: its end, "is ...". why: the option that asks for it."""
        fix = f"end that program, or choose another {why}"
        error = PreflightError(f"port {port} ({why}) {what}", fix, self._names[node])
        if str(error) not in map(str, self.taken):
            self.taken.append(error)
