"""Dispatch: a node that has the release is done; the others get what they lack, and the laptop sends each byte once.

In this order: nothing to do, a patch (the release differs little from one that is there), the relay (fleet/dispatch/spread.py).
Nodes that share a ROOT_DIR receive once.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertool.errors import ClustertoolError, DispatchError
from clustertool.fleet.dispatch.cache import Memory
from clustertool.fleet.dispatch.receivers import Progress, Receiver, Tally, as_dispatch, receivers
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.spread import Spread
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.dispatch import manifest
from clustertool.model.dispatch.portions import Portion
from clustertool.model.facts import Facts

HELPERS = 3  # nodes that have the release and serve it to those that do not
_MUCH = 1 << 20  # bytes of a workspace for which the uplink begins with the first node, before the others are reached
_AHEAD = 0.4  # seconds which that one has for itself
_PATCH = 24 << 10  # bytes up to which a change goes to every node straight away


@dataclass(frozen=True)
class Dispatched:
    """`sent`, `had` and `shared` are node ids (shared: another node's copy is theirs too). `releases`: what each node has."""

    releases: Mapping[int, str]
    tally: Tally
    seconds: float
    sent: tuple[int, ...]
    had: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def failed(self) -> Mapping[int, ClustertoolError]:
        return self.tally.failed


def dispatch(
    fleet: Fleet,
    workspace: Workspace,
    portions: Mapping[int, Portion],
    facts: Mapping[int, Facts],
    progress: Progress,
    spread: Spread | None = None,
) -> Dispatched:
    """Raises nothing for single nodes: they are in `failed`. `spread`: what has begun already, see quickly()."""
    start = time.monotonic()
    by_node, group = receivers(portions, facts, spread.nodes if spread else ())
    wanted = {node: receiver for node, receiver in by_node.items() if receiver.node == node}
    had = [node for node, receiver in wanted.items() if receiver.release in facts[node].releases]
    todo = {node: receiver for node, receiver in wanted.items() if node not in had}
    lacking = tuple(todo)
    for node in had:
        progress.done(node)
    tally = spread.tally if spread else Tally()
    if todo or spread:
        _send(fleet, workspace, facts, progress, _Order(wanted, todo, group, tally), spread)
    shared = [node for node in facts if node not in wanted]
    for node in shared:
        owner = by_node[node].node
        if owner in tally.failed:
            what = f"{fleet.name(owner)}, which shares its ROOT_DIR, has no copy"
            tally.failed[node] = DispatchError(what, "", fleet.name(node))
        else:
            progress.done(node)
    return Dispatched(
        {node: receiver.release for node, receiver in by_node.items()},
        tally,
        time.monotonic() - start,
        tuple(node for node in lacking if node not in tally.failed),
        tuple(had),
        tuple(shared),
    )


def quickly(fleet: Fleet, workspace: Workspace, look: Callable[[int], Facts]) -> tuple[Dispatched, Spread | None]:
    """Open the fleet, and no more than that for nodes that have the release, or need only a small patch of the last one.

    Who is neither in `had` nor in `sent` is to be looked at and dispatched to. Where there is more to send, that begins with
    the first node that is there, while the others are still being reached.
    """
    start = time.monotonic()
    memory = Memory(workspace.top)
    before, packs = memory.packs()
    last = before if _little_changed(workspace, memory, before, packs) else ""
    early = _Early(fleet, workspace, look, before, wanted=not last)
    fleet.open(workspace.release, early.opened, 0.0 if last or workspace.size < _MUCH else _AHEAD)
    tally, had = Tally(), tuple(sorted(fleet.held))
    sent: tuple[int, ...] = ()
    if last and fleet.agents:
        todo = {node: Receiver(node, workspace.release, None) for node in fleet.agents}
        _patch(fleet, Shipment(workspace, {}, (last,)), dict.fromkeys(todo, (last,)), _Order(todo, todo, {}, tally))
        sent = tuple(node for node in fleet.agents if node not in todo and node not in tally.failed)
    releases = dict.fromkeys((*had, *sent), workspace.release)
    return Dispatched(releases, tally, time.monotonic() - start, sent, had, ()), early.spread


class _Early:
    """opened() is called by the thread that has opened a node's agent. The first one begins, others join.

    Who may share its ROOT_DIR with one that has joined waits until that is known. `last`: the release that was sent before.
    """

    def __init__(
        self, fleet: Fleet, workspace: Workspace, look: Callable[[int], Facts], last: str, wanted: bool
    ) -> None:
        self.spread: Spread | None = None
        self._fleet, self._workspace, self._look = fleet, workspace, look
        self._lock = threading.Lock()
        self._wanted = wanted
        self._last = last
        self._roots: set[str] = set()
        self._above: set[str] = set()

    def opened(self, node: int) -> None:
        if not self._wanted:
            return
        facts = self._look(node)
        with self._lock:
            roots = {facts.root_id, facts.root_hint}
            above = {each for both in facts.root_above for each in both}  # what they were before somebody made ROOT_DIR
            alike = (roots | above) & self._roots or roots & self._above
            joins = self._wanted and not alike and self._may_join(facts)
            self._roots |= roots
            self._above |= above
            if joins and self.spread is None:
                self._begin(facts)
        if joins and self.spread:
            self.spread.add([Receiver(node, self._workspace.release, None)], {node: facts})

    def _begin(self, facts: Facts) -> None:
        try:
            shipment = Shipment(self._workspace, {}, facts.releases)
        except DispatchError:  # a file changed: no fault of this node, and told when all are there
            self._wanted = False
        else:
            self.spread = begin(self._fleet, shipment, Tally())

    def _may_join(self, facts: Facts) -> bool:
        if self._last and (self._last == self._workspace.release or self._last not in facts.releases):
            self._wanted = False  # a new node: the others may have all of it, or most
        wrong = any(level == "error" for _, level, _, _ in facts.problems)
        return self._wanted and not wrong and bool(facts.address) and facts.disk_free >= self._workspace.size


def merged(first: Dispatched, then: Dispatched) -> Dispatched:
    """Two halves of one dispatch. What the second one found there may be what the first one sent."""
    tally = Tally(
        first.tally.uplink + then.tally.uplink, then.tally.between, dict(then.tally.served), dict(then.tally.failed)
    )
    sent = tuple(sorted({*first.sent, *then.sent}))
    return Dispatched(
        {**first.releases, **then.releases},
        tally,
        first.seconds + then.seconds,
        sent,
        tuple(sorted({*first.had, *then.had} - {*sent, *then.shared})),
        then.shared,
    )


def _little_changed(workspace: Workspace, memory: Memory, last: str, packs: Sequence[manifest.Pack]) -> bool:
    """Whether a patch of the last release sent will do."""
    text = memory.manifest(last)
    if not last or last == workspace.release or text is None:
        return False
    known = {content for pack in packs for content, _ in pack.files}
    known.update(piece.name for piece in manifest.pieces(manifest.read_rows(text)))
    sizes = (
        size
        for entry in workspace.entries
        if entry.kind == "file" and entry.content not in known
        for name, size in zip(workspace.chunks[entry.path], manifest.cut(entry.size))
        if name not in known
    )
    return sum(sizes) < _PATCH


@dataclass
class _Order:
    wanted: Mapping[int, Receiver]
    todo: dict[int, Receiver]
    group: Mapping[str, str]
    tally: Tally


def _send(
    fleet: Fleet,
    workspace: Workspace,
    facts: Mapping[int, Facts],
    progress: Progress,
    order: _Order,
    spread: Spread | None,
) -> None:
    if spread is None:
        held = set.intersection(*(set(facts[node].releases) for node in order.todo))
        shipment = Shipment(workspace, order.group, held)
    else:
        shipment = spread.shipment
        for node in spread.nodes:
            order.todo.pop(node, None)
    if not order.group:
        _patch(fleet, shipment, {node: facts[node].releases for node in order.todo}, order)
    going = {*order.todo, *(spread.nodes if spread else ())}
    for node in order.wanted:
        if node not in going and node not in order.tally.failed:
            progress.done(node)
    if going:
        _spread(spread or begin(fleet, shipment, order.tally), facts, progress, order, going)


def begin(fleet: Fleet, shipment: Shipment, tally: Tally) -> Spread:
    spread = Spread(fleet, shipment, tally)
    spread.start()
    return spread


def _spread(spread: Spread, facts: Mapping[int, Facts], progress: Progress, order: _Order, going: set[int]) -> None:
    """To its end, or to an interrupt."""
    spread.watch(progress)
    whole = [receiver for node, receiver in order.wanted.items() if node not in going and receiver.groups is None]
    spread.add(
        [receiver for receiver in whole if receiver.node not in order.tally.failed][:HELPERS], facts, helper=True
    )
    spread.add(list(order.todo.values()), facts)
    spread.complete = True
    spread.wait()
    spread.end()


def _patch(fleet: Fleet, shipment: Shipment, releases: Mapping[int, Container[str]], order: _Order) -> None:
    """Nodes that have a release which differs little get the difference at once; they leave `todo`."""
    requests: dict[int, Mapping[str, Any]] = {}
    by_base: dict[str, Mapping[str, Any] | None] = {}
    for node, receiver in order.todo.items():
        for base in shipment.memory.manifests():
            if base in releases[node] and node not in requests:
                if base not in by_base:
                    by_base[base] = _difference(shipment, base)
                step = by_base[base]
                if step:
                    requests[node] = {**step, "release": receiver.release, "groups": None}
    gathered = fleet.ask(requests)
    for node, answer in gathered.ok.items():
        order.tally.uplink += len(json.dumps(requests[node]))
        if answer["have"]:
            del order.todo[node]
    for node, error in gathered.failed.items():
        del order.todo[node]
        order.tally.failed[node] = as_dispatch(error)


def _difference(shipment: Shipment, base: str) -> Mapping[str, Any] | None:
    """The request that makes this release of `base`, if it is small."""
    old = shipment.memory.manifest(base)
    if old is None:
        return None
    held = {piece.name for piece in manifest.pieces(manifest.read_rows(old))}
    new = [piece for piece in shipment.pieces[1:] if piece.name not in held]
    steps = manifest.delta(old, shipment.text)
    if sum(piece.size for piece in new) * 4 // 3 + len(json.dumps(steps)) > _PATCH:
        return None
    pieces = {piece.name: base64.b64encode(shipment.of(piece.name)).decode() for piece in new}
    return {"q": "patch", "base": base, "steps": steps, "manifest": shipment.name, "pieces": pieces}
