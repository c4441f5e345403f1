"""A model of an elastic job: coordinator, nodes, their guards, leases and the network, with the rules of the real code.

The leases, the decisions of the coordinator, and what the next epoch waits for are the real functions. The model has the rest:
processes that take turns, links that deliver in order, and faults. Time goes by in ticks. A world is a value, and a Turn makes
the next one of it, so that all histories can be explored.

In each tick first faults change, then the guards act, then each node that is not frozen takes its turn, and then the
coordinator. What a node sends arrives in the same tick, what the coordinator sends in the next one; later if the link is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from clustertool.model.elastic import epochs, lease
from clustertool.model.elastic.epochs import Gathering, Readiness
from clustertool.model.elastic.lease import Lease
from clustertool.model.wire.spec_types import ElasticSpec
from clustertool.node.supervisor.coordinator import epoch_decisions as e
from clustertool.node.supervisor.coordinator import job_decisions as l

LEASE = 5  # ticks; a message and its answer take one, and the margin of the next epoch is one
COORDINATOR = 0
RULES: ElasticSpec = {
    "epoch": 0,
    "lease": LEASE,
    "grow": "next",
    "minimum": 1,
    "maximum": 0,  # an offer joins no epoch that runs
    "members": 0,
    "waiting": [],
    "absent": 0,
    "restarts": 0,
    "blamed": [],
    "steps": None,
    "store": False,
}
Message = tuple[Any, ...]  # its kind and its epoch first
Fault = tuple[str, int]  # its kind and the node


class Node(NamedTuple):
    """A member. epoch: of its supervisor, -1 while it offers itself. last: the highest epoch that it has been in. ranks: the
    epoch of its living ranks, -1 if none lives. armed: it may have ranks, so the lease counts. guard: the end of the lease that
    its guard knows."""

    lease: Lease = Lease(LEASE, 0)
    epoch: int = -1
    last: int = -1
    ranks: int = -1
    armed: bool = False
    guard: float = math.inf
    alive: bool = True


class Coordinator(NamedTuple):
    """What the coordinator's process has besides its own node. state: None while it gathers. known: numbers of epochs.

    received, seen: of each node, the time and the number of its newest beat. given_up: nodes of which no beat is acknowledged.
    """

    state: l.State | None = None
    epoch: int = -1
    received: tuple[float, ...] = ()
    seen: tuple[int, ...] = ()
    given_up: frozenset[int] = frozenset()
    own: Lease = Lease(LEASE, 0)
    gathered: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()
    gathering: Gathering | None = None


class World(NamedTuple):
    """nodes: the coordinator's is the first. links: messages on the way, by node, to the coordinator and from it. faults: those
    that last. used: epochs that have begun, in their order."""

    now: int
    nodes: tuple[Node, ...]
    coordinator: Coordinator
    to_coordinator: tuple[tuple[Message, ...], ...]
    from_coordinator: tuple[tuple[Message, ...], ...]
    faults: frozenset[Fault] = frozenset()
    used: tuple[int, ...] = ()


# The kinds of faults. A link is cut in one direction or in both; a supervisor or a whole machine is frozen; a machine is lost;
# a node sends what cannot be read, and is given up at once; an offer that it sent before the epoch comes late.
CUT_UP, CUT_DOWN, CUT, FROZEN, SUSPENDED, CRASHED = "cut up", "cut down", "cut", "frozen", "suspended", "crashed"
GARBLED, LATE_OFFER = "garbled", "late offer"


def kinds(node: int) -> tuple[str, ...]:
    return (
        (FROZEN, SUSPENDED)
        if node == COORDINATOR
        else (CUT_UP, CUT_DOWN, CUT, FROZEN, SUSPENDED, CRASHED, GARBLED, LATE_OFFER)
    )


def first_world(count: int) -> World:
    nothing: tuple[tuple[Message, ...], ...] = ((),) * count
    gathering = Gathering(0, 1, count, 2.0, 0)
    coordinator = Coordinator(received=(0.0,) * count, seen=(0,) * count, gathering=gathering)
    return World(0, (Node(),) * count, coordinator, nothing, nothing)


@functools.cache
def shape(nodes: frozenset[int], epoch: int) -> l.Shape:
    """One trainer on each node."""
    names = tuple(f"n{node}" for node in range(max(nodes) + 1))
    place = tuple((("trainer", rank), node) for rank, node in enumerate(sorted(nodes)))
    return l.Shape(nodes, names, place, "abort", 0, epoch)


def replaced(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


class Turn:
    """One tick of a world. The methods can be overridden, to see that a wrong rule is found."""

    def __init__(self, world: World, faults: Iterable[Fault]) -> None:
        self.now = world.now + 1
        self.faults = frozenset(faults)
        self.nodes = list(world.nodes)
        self.coordinator = world.coordinator
        self.to_coordinator = list(world.to_coordinator)
        self.from_coordinator = list(world.from_coordinator)
        self.used = world.used

    def run(self) -> World:
        for number in range(len(self.nodes)):
            self.guard(number)
        for number in range(1, len(self.nodes)):
            if self.runs(number):
                self.node_turn(number, self.arrived(self.from_coordinator, number, CUT_DOWN))
        if self.runs(COORDINATOR):
            for number in range(1, len(self.nodes)):
                for message in self.arrived(self.to_coordinator, number, CUT_UP):
                    self.coordinator_reads(number, message)
                if (LATE_OFFER, number) in self.faults:
                    self.coordinator_reads(number, ("offer", self.nodes[number].last - 1))
            self.coordinator_turn()
        up, down = tuple(self.to_coordinator), tuple(self.from_coordinator)
        return World(self.now, tuple(self.nodes), self.coordinator, up, down, self.faults, self.used)

    def runs(self, node: int) -> bool:
        return self.nodes[node].alive and not {(FROZEN, node), (SUSPENDED, node)} & self.faults

    def arrived(self, links: list[tuple[Message, ...]], node: int, cut: str) -> tuple[Message, ...]:
        """What a process reads now. One that does not run finds it later."""
        if {(cut, node), (CUT, node)} & self.faults:
            return ()
        messages, links[node] = links[node], ()
        return messages

    # -- nodes --

    def set(self, number: int, **values: Any) -> None:
        self.nodes[number] = self.nodes[number]._replace(**values)

    def guard(self, number: int) -> None:
        """The guard kills the ranks at the end of the lease that it knows, also those of a frozen supervisor."""
        node = self.nodes[number]
        if (CRASHED, number) in self.faults:
            self.set(number, alive=False, ranks=-1)
        elif not node.alive:  # it was started again: it knows nothing, and has new connections
            self.nodes[number], self.to_coordinator[number], self.from_coordinator[number] = Node(), (), ()
        elif (SUSPENDED, number) not in self.faults and self.now >= node.guard:
            self.set(number, ranks=-1, lease=node.lease._replace(ended=True))  # the supervisor gets to know it

    def node_turn(self, number: int, messages: Iterable[Message]) -> None:
        node, orders = self.nodes[number], []
        for message in messages:
            kind, epoch = message[0], message[1]
            if kind == "go" and node.epoch < 0:
                if self.may_enter(epoch, node.last):
                    node = Node(Lease(LEASE, self.now), epoch, epoch)
            elif epoch == node.epoch and kind == "beat":
                node = node._replace(lease=self.acknowledged(node.lease, message[2]))
            elif epoch == node.epoch:
                node = node._replace(armed=True)
                orders.append(kind)
        if node.epoch < 0:
            return self.post(number, ("offer", node.last))
        if node.armed:
            node = node._replace(lease=node.lease.check(self.now))
        for order in orders:
            if order == "start" and not node.lease.ended:
                node = node._replace(ranks=node.epoch)
            elif order == "stop":
                node = node._replace(ranks=-1)
                self.post(number, ("clean", node.epoch))
        if node.lease.ended or "finish" in orders:
            self.nodes[number] = Node(last=node.last)
            return None
        node = node._replace(lease=node.lease.send(self.now))
        kind = "garbled" if (GARBLED, number) in self.faults else "beat"
        self.post(number, (kind, node.epoch, node.lease.number))
        self.nodes[number] = node._replace(guard=node.lease.end if node.armed else math.inf)
        return None

    def acknowledged(self, of: Lease, number: int) -> Lease:
        return of.acknowledge(number)

    def may_enter(self, epoch: int, last: int) -> bool:
        return epochs.may_enter(epoch, last)

    def post(self, number: int, message: Message) -> None:
        waiting = self.to_coordinator[number]
        if message[0] == "offer":  # a connection that breaks takes it along
            waiting = tuple(one for one in waiting if one[0] != "offer")
        self.to_coordinator[number] = (*waiting, message)

    # -- the coordinator --

    def tell(self, nodes: Iterable[int], message: Message) -> None:
        for node in nodes:
            if node != COORDINATOR:
                self.from_coordinator[node] = (*self.from_coordinator[node], message)

    def coordinator_reads(self, node: int, message: Message) -> None:
        coordinator, kind = self.coordinator, message[0]
        if kind == "offer":
            self.coordinator = coordinator._replace(
                gathered=coordinator.gathered | {node}, known=coordinator.known | {message[1]}
            )
            if coordinator.state is not None and node in coordinator.state.shape.nodes and self.has_ended(message[1]):
                self.give_up(node)
                self.decide(e.Returned(node))
            return
        if coordinator.state is None or message[1] != coordinator.epoch:
            return
        if kind == "clean":
            self.decide(l.Clean(node, (), coordinator.epoch))
            return
        if kind == "garbled":
            self.give_up(node)
            if node not in coordinator.state.gone:
                self.decide(l.Lost(node, "it sent a message that cannot be read"))
            return
        if node not in coordinator.given_up:
            received, seen = (
                replaced(coordinator.received, node, self.now),
                replaced(coordinator.seen, node, message[2]),
            )
            self.coordinator = coordinator._replace(received=received, seen=seen)
        if node not in coordinator.state.joined:
            self.decide(l.Joined(node))

    def has_ended(self, last: int) -> bool:
        """Whether an offer comes from a process that has ended the present epoch. An older offer may have been on its way."""
        return last >= self.coordinator.epoch

    def give_up(self, node: int) -> None:
        self.coordinator = self.coordinator._replace(given_up=self.coordinator.given_up | {node})

    def coordinator_turn(self) -> None:
        if self.coordinator.state is None:
            return self.gather()
        own = self.coordinator.own.renew(self.now)
        if self.nodes[COORDINATOR].lease.ended:
            own = own._replace(ended=True)
        if own.ended and not self.coordinator.own.ended:
            nothing = (0,) * len(self.nodes)
            self.coordinator = self.coordinator._replace(given_up=frozenset(range(len(self.nodes))), seen=nothing)
            self.set(COORDINATOR, ranks=-1)
            self.decide(e.LeaseEnded(COORDINATOR, "it did not run"))
        self.coordinator = self.coordinator._replace(own=own)
        for node in sorted(self.members() - {COORDINATOR}):
            state = self.coordinator.state
            if state is not None and node not in state.gone and self.is_silent(self.coordinator.received[node]):
                self.give_up(node)
                self.decide(l.Lost(node, "silent"))
        for node in sorted(self.members() - {COORDINATOR}):
            self.tell([node], ("beat", self.coordinator.epoch, self.coordinator.seen[node]))
        if self.coordinator.state is not None:
            self.set(COORDINATOR, guard=self.coordinator.own.end)
        return None

    def members(self) -> frozenset[int]:
        return self.coordinator.state.shape.nodes if self.coordinator.state is not None else frozenset()

    def is_silent(self, received: float) -> bool:
        return lease.is_silent(received, self.now, LEASE)

    def decide(self, event: e.Event) -> None:
        state = self.coordinator.state
        if state is None:
            return
        of = state.shape
        state, actions = e.decide(RULES, state, event)
        self.coordinator = self.coordinator._replace(state=state)
        for action in actions:
            if isinstance(action, l.Start):
                self.tell(of.nodes, ("start", self.coordinator.epoch))
                if not self.coordinator.own.ended:
                    self.set(COORDINATOR, ranks=self.coordinator.epoch)
            elif isinstance(action, l.Stop):
                self.tell(of.nodes, ("stop", self.coordinator.epoch))
                self.set(COORDINATOR, ranks=-1)
                self.decide(l.Clean(COORDINATOR, (), self.coordinator.epoch))
            elif isinstance(action, l.Finish):
                self.finish(of)

    def finish(self, of: l.Shape) -> None:
        """The epoch is over: the next one waits for the leases of the nodes that are lost."""
        state = self.coordinator.state
        assert state is not None
        self.tell(of.nodes, ("finish", self.coordinator.epoch))
        lost = {node: self.coordinator.received[node] for node in self.lost(state)}
        expected = of.nodes - state.lost - {COORDINATOR}
        gathering = Gathering(
            0,
            1,
            len(self.nodes),
            math.inf,
            self.now,
            first=False,
            earliest=self.earliest(lost),
            expected=frozenset({COORDINATOR, *expected}),
            patience=LEASE,
        )
        known = self.coordinator.known | {self.coordinator.epoch}
        self.nodes[COORDINATOR] = Node()
        self.coordinator = self.coordinator._replace(state=None, gathered=frozenset(), known=known, gathering=gathering)

    def lost(self, state: l.State) -> frozenset[int]:
        """Those that may have ranks until their leases end: they have joined."""
        return state.lost & state.joined

    def earliest(self, lost: dict[int, float]) -> float:
        return max((end for _, end in epochs.lost_leases(lost, LEASE)), default=0.0)

    def gather(self) -> None:
        coordinator, gathering = self.coordinator, self.coordinator.gathering
        assert gathering is not None
        present = coordinator.gathered | {COORDINATOR}
        if gathering.readiness(present, self.now) is not Readiness.START:
            return
        epoch = epochs.next_number(coordinator.known)
        of, count = shape(present, epoch), len(self.nodes)
        state = l.State(of, attempt=epoch)
        received, seen = (float(self.now),) * count, (0,) * count
        own = Lease(LEASE, self.now)
        self.coordinator = Coordinator(
            state, epoch, received, seen, frozenset(), own, frozenset(), coordinator.known | {epoch}, gathering
        )
        self.used = (*self.used, epoch)
        self.tell(present, ("go", epoch))
        self.decide(l.Joined(COORDINATOR))


def problem(world: World) -> str:
    """What must never be, or "". A machine that is suspended as a whole counts when it runs again."""
    living: dict[int, list[int]] = {}
    for number, node in enumerate(world.nodes):
        if node.ranks >= 0 and (SUSPENDED, number) not in world.faults:
            living.setdefault(node.ranks, []).append(number)
    if len(living) > 1:
        return f"ranks of several epochs live: {living}"
    if len(set(world.used)) < len(world.used):
        return f"the number of an epoch is used twice: {world.used}"
    return ""
