"""Receivers are the nodes that get a workspace: one for all that share a ROOT_DIR, with what it takes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from clustertool.errors import ClustertoolError, DispatchError
from clustertool.model.dispatch.portions import Portions
from clustertool.model.facts import ByNode


@dataclass
class DispatchCounts:
    """The counts of a dispatch: bytes that went over the uplink and between nodes, and the errors of nodes (`failed`).

    served: {node that got its pieces only from the laptop: why}.
    """

    uplink: int = 0
    between: int = 0
    served: dict[int, str] = field(default_factory=dict)
    failed: dict[int, ClustertoolError] = field(default_factory=dict)


@dataclass(frozen=True)
class Receiver:
    """A node that receives, for itself and all that share its ROOT_DIR. `groups`: of files that not all take; None: all."""

    node: int
    release: str
    groups: tuple[str, ...] | None


def owners(facts: ByNode) -> dict[str, int]:
    """Map each root id to the node that receives for all that share this ROOT_DIR: the first one."""
    first: dict[str, int] = {}
    for node in sorted(facts):
        first.setdefault(facts[node].root_id, node)
    return first


def receivers(portions: Portions, facts: ByNode) -> tuple[dict[int, Receiver], dict[str, str]]:
    """Return ({node: its receiver}, {file that not all nodes take: name of its group}).

    A node that shares the ROOT_DIR of an earlier one has the receiver of that node.
    """
    first = owners(facts)
    split = frozenset().union(*(portion.without for portion in portions.values()))
    releases = {portion.release: portion for portion in portions.values()}
    group = {
        path: ",".join(sorted(release[:8] for release, portion in releases.items() if path not in portion.without))
        for path in split
    }
    found = {}
    for node in set(first.values()):
        mine = portions[node]
        groups = tuple(sorted({group[path] for path in split - mine.without})) if mine.without else None
        found[node] = Receiver(node, mine.release, groups)
    return {node: found[first[facts[node].root_id]] for node in facts}, group


def as_dispatch_error(error: ClustertoolError) -> ClustertoolError:
    """Return a DispatchError with the text and node of an error of a node that receives; return a DispatchError as it is."""
    return error if isinstance(error, DispatchError) else DispatchError(error.what, error.fix, error.node)


class ProgressReceiver(Protocol):
    """A view that gets reports of a dispatch while it runs, from one thread. Nodes are named."""

    def uplink(self, sent: int, planned: int) -> None:
        """Report how many bytes have left this machine, and how many it will be."""

    def node(self, name: str, got: int, size: int) -> None:
        """Report that a node has `got` of `size` bytes."""

    def done(self, name: str) -> None:
        """Report that a node has its release."""
