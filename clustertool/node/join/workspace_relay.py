"""The workspace of a job comes to the machines that lack it from node 0, and from each other: by relays, as in a dispatch.

Node 0 only serves. A relay is a process of its own (node/dispatch/relay_process.py), which ends with its parent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from clustertool.errors import DispatchError, from_wire
from clustertool.model.dispatch import manifest, topology
from clustertool.model.facts import ByNode, Identity
from clustertool.node.dispatch.relay_process import RelayProcess
from clustertool.node.storage.release_store import Store, damaged

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.agent_requests import RelayRequest
    from clustertool.model.wire.frames import Header
    from clustertool.model.wire.join_messages import FetchOrder, RelayOrder

_BEAT = 5.0  # seconds; a relay ends after 60 s without a message
_PATIENCE = 60.0  # seconds in which nothing comes, after which the workspace is given up
_REPORT = 2.0  # seconds between two reports of a relay
_FIX = "a firewall may block the ports between the machines; or write a bundle that contains the workspace"
Address = Tuple[str, int]


def build_request(root: str, release: str) -> RelayRequest:
    """Build the request for a relay, from node 0's own copy of the workspace. Raises DispatchError without a complete one."""
    store = Store(root)
    try:
        text = store.manifest(release)
        count = len(manifest.pieces(manifest.piece_rows(text))) + 1
    except FileNotFoundError:
        what = f"the coordinator does not have the workspace {release[:8]} below {root}"
        raise DispatchError(what, "start it with the bundle that contains the workspace") from None
    except (OSError, ValueError, LookupError, TypeError):
        raise damaged(release) from None
    return {
        "release": release,
        "manifest": manifest.name_of(text),
        "size": len(text),
        "count": count,
        "groups": None,
        "helper": False,
        "report": _REPORT,
        "address": "",
    }


def receivers(facts: ByNode, release: str) -> List[int]:
    """List the nodes that must fetch the release: the first node of each ROOT_DIR in which it is not. Node 0 has it."""
    having = {fact.root_id for node, fact in facts.items() if release in fact.releases or node == 0}
    first: Dict[str, int] = {}
    for node in sorted(facts):
        first.setdefault(facts[node].root_id, node)
    return sorted(node for root, node in first.items() if root not in having)


def sources(relays: Mapping[int, Address]) -> Dict[int, List[Address]]:
    """Map each node but 0 to the addresses of the other relays, node 0's among them, in the order in which it tries them."""
    nodes = sorted(relays)
    return {
        node: [relays[nodes[other]] for other in topology.sources(len(nodes), at)]
        for at, node in enumerate(nodes)
        if node != 0
    }


class WorkspaceRelay:
    """The relay of this machine. begin() and fetch() are orders; turn() returns whether the present order is done."""

    def __init__(self, identity: Identity, root: str) -> None:
        self._identity, self._root = identity, root
        self._process: Optional[RelayProcess] = None
        self._helper = False
        self._ordered = False  # an order is not done yet
        self.port = 0
        self._beat_at = self._moved_at = 0.0
        self._causes: Sequence[str] = ()

    def begin(self, order: RelayOrder) -> bool:
        """Start the relay's process; return False if the order has no request for this machine."""
        request = order["request"]
        if request is None:
            return False
        self._helper = request["helper"]
        identity = self._identity
        request = {**request, "certificate": identity.certificate, "key": identity.key}
        self._process, self._ordered = RelayProcess(request, self._root), True
        self._beat_at = self._moved_at = time.monotonic()
        return True

    def fetch(self, order: FetchOrder) -> bool:
        """Send the relay its sources, so that it fetches the workspace; False if there is no relay, or it only serves."""
        if self._process is None or self._helper:
            return False
        self._moved_at, self._ordered = time.monotonic(), True
        self._process.send({"type": "relay-sources", "sources": order["sources"], "degree": order["degree"]}, b"")
        return True

    def wires(self) -> List[FileDescriptorLike]:
        """List the descriptors that wake turn()."""
        return [self._process] if self._process is not None else []

    def turn(self, ready: Set[int]) -> bool:
        """Send heartbeats, handle the relay's reports, and return whether the present order is done.

        Raises the relay's error; DispatchError if its process has ended, or nothing has come for a minute.
        """
        now = time.monotonic()
        if self._process is None:
            return False
        if now - self._beat_at > _BEAT:
            self._beat_at = now
            self._process.send({"type": "relay-beat"}, b"")
        reports = self._process.read() if self._process.fileno() in ready else []
        if reports is None:
            self._process = None
            what = "the process that fetches the workspace ended"
            raise DispatchError(what, "see whether the machine has memory left")
        taken = [self._handle_report(report, now) for report in reports]
        done = self._ordered and any(taken)
        if self._ordered and not done and now - self._moved_at > _PATIENCE:
            causes = "; ".join(dict.fromkeys(self._causes)) or "the other relays are silent"
            raise DispatchError(f"no part of the workspace has come for {_PATIENCE:g} s: {causes}", _FIX)
        self._ordered = self._ordered and not done
        return done

    def _handle_report(self, report: Header, now: float) -> bool:
        """Handle a report, and return whether it ends an order: the relay is ready, or has all parts and is no helper.

        Raises the error of a failed relay.
        """
        kind = report["type"]
        if kind == "relay-failed":
            raise from_wire(str(report.get("kind", "DispatchError")), str(report["what"]), str(report["fix"]))
        if kind == "relay-idle":
            self._causes = [str(why) for why in report["why"]]
            return False
        self._moved_at = now
        if kind == "relay-ready":
            self.port = int(report["port"])
        return kind == "relay-ready" or (kind == "relay-done" and not self._helper)

    def end(self) -> None:
        """End the relay. Its port is free when this returns."""
        self._ordered = False
        if self._process is not None:
            self._process.end()
            self._process = None
