"""Delivering brings a workspace to all nodes: each ends with the release, and the laptop sends each byte once.

In this order: nothing to do, a patch (the release differs little from one that is there), pieces (fleet/dispatch/spread.py).
Where rsync is to carry it, it brings the files instead (fleet/dispatch/rsync_carrier.py).
Nodes that share a ROOT_DIR receive once.
"""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clustertool.errors import ClustertoolError, DispatchError
from clustertool.fleet.dispatch import rsync_carrier
from clustertool.fleet.dispatch.receivers import DispatchCounts, ProgressReceiver, Receiver, as_dispatch, receivers
from clustertool.fleet.dispatch.shipment import RemoteShipment, Shipment
from clustertool.fleet.dispatch.spread import Spread
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.dispatch import manifest
from clustertool.model.dispatch.portions import Portion, Portions
from clustertool.model.facts import ByNode
from clustertool.model.wire.agent_answers import PatchAnswer
from clustertool.model.wire.agent_requests import PatchSteps
from clustertool.model.wire.messages import PATCH, Request

_HELPERS = 3  # nodes that have the release and serve it to those that do not
_PATCH = 24 << 10  # bytes up to which a change is sent to every node at once


@dataclass(frozen=True)
class Dispatched:
    """`sent`, `had` and `shared` are node ids (shared: another node's copy is theirs too). `releases`: what each node has."""

    releases: Mapping[int, str]
    tally: DispatchCounts
    seconds: float
    sent: tuple[int, ...]
    had: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def failed(self) -> Mapping[int, ClustertoolError]:
        return self.tally.failed


def deliver(
    fleet: Fleet, workspace: Workspace, portions: Portions, facts: ByNode, progress: ProgressReceiver
) -> Dispatched:
    """Send a workspace to all nodes that do not have it. Raises DispatchError when a file changes.

    Nodes that fail are in the tally.
    """
    start = time.monotonic()
    by_node, group = receivers(portions, facts)
    wanted = [receiver for node, receiver in by_node.items() if receiver.node == node]
    had = [one for one in wanted if one.release in facts[one.node].releases]
    lacking = [one for one in wanted if one not in had]
    shared = tuple(node for node in facts if by_node[node].node != node)
    tally = DispatchCounts()
    for one in had:
        progress.done(fleet.name(one.node))
    if lacking and fleet.cluster.dispatch == "rsync":
        rsync_carrier.carry(fleet, workspace, group, lacking, tally, progress)
    elif lacking:
        common = set.intersection(*(set(facts[one.node].releases) for one in lacking))
        names = [f"{fleet.name(one.node)}:{facts[one.node].root}" for one in lacking]
        shipment = Shipment(workspace, group, common, names)
        patched = [] if group else _patch(fleet, shipment, lacking, facts, tally)
        progress.uplink(tally.uplink, tally.uplink)
        for one in patched:
            progress.done(fleet.name(one.node))
        rest = [one for one in lacking if one not in patched and one.node not in tally.failed]
        if rest:
            whole = [one for one in (*had, *patched) if one.groups is None]
            Spread(fleet, shipment, tally, progress).run(rest, whole[:_HELPERS], facts)
    _share(fleet, by_node, shared, tally, progress)
    releases = {node: receiver.release for node, receiver in by_node.items()}
    sent = tuple(one.node for one in lacking if one.node not in tally.failed)
    return Dispatched(releases, tally, time.monotonic() - start, sent, tuple(one.node for one in had), shared)


def deliver_from(
    fleet: Fleet, holder: int, release: str, shipment: RemoteShipment, facts: ByNode, progress: ProgressReceiver
) -> Dispatched:
    """Bring a release from the node that has it to all others of `facts`. Nodes that fail are in the tally."""
    start = time.monotonic()
    portion = Portion(release, tuple(facts), shipment.size)
    by_node, _ = receivers(dict.fromkeys(facts, portion), facts)
    source = by_node[holder].node
    wanted = [one for node, one in by_node.items() if one.node == node]
    had = [one for one in wanted if one.node == source or release in facts[one.node].releases]
    lacking = [one for one in wanted if one not in had]
    shared = tuple(node for node in facts if by_node[node].node != node)
    tally = DispatchCounts()
    for one in had:
        progress.done(fleet.name(one.node))
    if lacking:
        had.sort(key=lambda one: one.node != source)
        Spread(fleet, shipment, tally, progress).run(lacking, had[:_HELPERS], facts)
    _share(fleet, by_node, shared, tally, progress)
    releases = dict.fromkeys(facts, release)
    sent = tuple(one.node for one in lacking if one.node not in tally.failed)
    return Dispatched(releases, tally, time.monotonic() - start, sent, tuple(one.node for one in had), shared)


def _share(
    fleet: Fleet,
    by_node: Mapping[int, Receiver],
    shared: Sequence[int],
    tally: DispatchCounts,
    progress: ProgressReceiver,
) -> None:
    """Record for nodes that share the ROOT_DIR of another one that they have what that one has, or lack it."""
    for node in shared:
        owner = by_node[node].node
        if owner in tally.failed:
            what = f"{fleet.name(owner)}, which shares its ROOT_DIR, has no copy"
            tally.failed[node] = DispatchError(what, "", fleet.name(node))
        else:
            progress.done(fleet.name(node))


def _patch(
    fleet: Fleet, shipment: Shipment, lacking: list[Receiver], facts: ByNode, tally: DispatchCounts
) -> list[Receiver]:
    """Send the difference to nodes that have a release which differs little; those that made this release of it."""
    difference = functools.cache(functools.partial(_difference, shipment))
    requests: dict[int, Request[PatchAnswer]] = {}
    for one in lacking:
        bases = (base for base in shipment.memory.manifests() if base in facts[one.node].releases)
        step = next(filter(None, map(difference, bases)), None)
        if step:
            requests[one.node] = PATCH({**step, "release": one.release, "groups": None})
    gathered = fleet.ask(requests)
    tally.uplink += sum(len(json.dumps(requests[node].fields)) for node in gathered.ok)
    tally.failed.update({node: as_dispatch(error) for node, error in gathered.failed.items()})
    return [one for one in lacking if one.node in gathered.ok and gathered.ok[one.node]["have"]]


def _difference(shipment: Shipment, base: str) -> PatchSteps | None:
    """Build the request that makes this release of `base`; None if it is not small, or `base` is not known."""
    old = shipment.memory.manifest(base)
    if old is None:
        return None
    known = {piece.name for piece in manifest.pieces(manifest.read_rows(old))}
    new = {number: piece for number, piece in enumerate(shipment.pieces) if number and piece.name not in known}
    steps = manifest.delta(old, shipment.text)
    if sum(piece.size for piece in new.values()) * 4 // 3 + len(json.dumps(steps)) > _PATCH:
        return None
    pieces = {piece.name: base64.b64encode(shipment.read(number)).decode() for number, piece in new.items()}
    return {"base": base, "steps": steps, "manifest": shipment.name, "pieces": pieces}
