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
from clustertool.fleet.dispatch.receivers import (
    DispatchCounts,
    ProgressReceiver,
    Receiver,
    as_dispatch_error,
    receivers,
)
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
    """The result of a dispatch. releases: {node: its release}. tally: counts of bytes, and the errors of nodes.

    sent: nodes that have received the release; had: those that had it before; shared: those that share the ROOT_DIR of another.
    """

    releases: Mapping[int, str]
    tally: DispatchCounts
    seconds: float
    sent: tuple[int, ...]
    had: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def failed(self) -> Mapping[int, ClustertoolError]:
        """The errors of nodes without the release."""
        return self.tally.failed


class _Delivery:
    """One dispatch. had: the receivers that have their release already; lacking: the others.

    source: the node from which the release is taken, None for this machine. group: {file that not all nodes take: its group}.
    """

    def __init__(
        self, fleet: Fleet, portions: Portions, facts: ByNode, progress: ProgressReceiver, holder: int | None = None
    ) -> None:
        self.tally = DispatchCounts()
        self._start = time.monotonic()
        self._fleet, self._progress = fleet, progress
        self._by_node, self.group = receivers(portions, facts)
        self.source = None if holder is None else self._by_node[holder].node
        wanted = [receiver for node, receiver in self._by_node.items() if receiver.node == node]
        self.had = [one for one in wanted if one.node == self.source or one.release in facts[one.node].releases]
        self.lacking = [one for one in wanted if one not in self.had]
        self.done(self.had)

    def done(self, some: Sequence[Receiver]) -> None:
        """Report to the progress that these receivers have their release."""
        for one in some:
            self._progress.done(self._fleet.name(one.node))

    def end(self) -> Dispatched:
        """Return the result. Nodes that share the ROOT_DIR of another one have what that node has, or fail as it does.

        The progress gets a report for each of those that have it.
        """
        shared = tuple(node for node, receiver in self._by_node.items() if receiver.node != node)
        failed, name = self.tally.failed, self._fleet.name
        for node in shared:
            owner = self._by_node[node].node
            if owner in failed:
                what = f"{name(owner)}, which shares its ROOT_DIR, has no copy"
                failed[node] = DispatchError(what, "", name(node))
            else:
                self._progress.done(name(node))
        releases = {node: receiver.release for node, receiver in self._by_node.items()}
        sent = tuple(one.node for one in self.lacking if one.node not in failed)
        seconds = time.monotonic() - self._start
        return Dispatched(releases, self.tally, seconds, sent, tuple(one.node for one in self.had), shared)


def deliver(
    fleet: Fleet, workspace: Workspace, portions: Portions, facts: ByNode, progress: ProgressReceiver
) -> Dispatched:
    """Send a workspace to all nodes that do not have it, and return the result; nodes that fail are in its tally.

    It sends a patch where the difference is small, else pieces; with DISPATCH = "rsync" the files. Raises DispatchError when a
    file changes, DataError if the manifest is too large, and PreflightError if rsync is needed and missing here.
    """
    delivery = _Delivery(fleet, portions, facts, progress)
    group, lacking, tally = delivery.group, delivery.lacking, delivery.tally
    if lacking and fleet.cluster.dispatch == "rsync":
        rsync_carrier.carry(fleet, workspace, group, lacking, tally, progress)
    elif lacking:
        common = set.intersection(*(set(facts[one.node].releases) for one in lacking))
        names = [f"{fleet.name(one.node)}:{facts[one.node].root}" for one in lacking]
        shipment = Shipment(workspace, group, common, names)
        patched = [] if group else _patch(fleet, shipment, lacking, facts, tally)
        progress.uplink(tally.uplink, tally.uplink)
        delivery.done(patched)
        rest = [one for one in lacking if one not in patched and one.node not in tally.failed]
        if rest:
            whole = [one for one in (*delivery.had, *patched) if one.groups is None]
            Spread(fleet, shipment, tally, progress).run(rest, whole[:_HELPERS], facts)
    return delivery.end()


def deliver_from(
    fleet: Fleet, holder: int, release: str, shipment: RemoteShipment, facts: ByNode, progress: ProgressReceiver
) -> Dispatched:
    """Bring a release from the node that has it to all others of `facts`, and return the result.

    Nodes that fail are in its tally.
    """
    portion = Portion(release, tuple(facts), shipment.size)
    delivery = _Delivery(fleet, dict.fromkeys(facts, portion), facts, progress, holder)
    if delivery.lacking:
        helpers = sorted(delivery.had, key=lambda one: one.node != delivery.source)[:_HELPERS]
        Spread(fleet, shipment, delivery.tally, progress).run(delivery.lacking, helpers, facts)
    return delivery.end()


def _patch(
    fleet: Fleet, shipment: Shipment, lacking: list[Receiver], facts: ByNode, tally: DispatchCounts
) -> list[Receiver]:
    """Send the difference to nodes that have a release which differs little; return those that have made this release of it.

    The tally gets the bytes that were sent, and the errors of nodes.
    """
    difference = functools.cache(functools.partial(_difference, shipment))
    requests: dict[int, Request[PatchAnswer]] = {}
    for one in lacking:
        bases = (base for base in shipment.memory.manifests() if base in facts[one.node].releases)
        step = next(filter(None, map(difference, bases)), None)
        if step:
            requests[one.node] = PATCH({**step, "release": one.release, "groups": None})
    gathered = fleet.ask(requests)
    tally.uplink += sum(len(json.dumps(requests[node].fields)) for node in gathered.ok)
    tally.failed.update({node: as_dispatch_error(error) for node, error in gathered.failed.items()})
    return [one for one in lacking if one.node in gathered.ok and gathered.ok[one.node]["have"]]


def _difference(shipment: Shipment, base: str) -> PatchSteps | None:
    """Build the request that makes this release of `base`; None if it is over 24 KiB, or the manifest of `base` is unknown."""
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
