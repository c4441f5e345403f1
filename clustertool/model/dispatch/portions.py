"""A portion is the part of a workspace that a node gets: all of it, or all but the shards that only other nodes read.

Every portion is a release of its own, named by its content: a node that has it already needs nothing, for any job, and
a job of another shape names other releases. Nodes that share a ROOT_DIR receive once: all that any of them reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, FrozenSet, Iterable, Mapping, Optional, Sequence, Tuple

from clustertool.model.config.folded_names import grouped
from clustertool.model.dispatch.manifest import Entry, line, name

Reads = Mapping[int, FrozenSet[str]]


@dataclass(frozen=True)
class Portion:
    """A part of a workspace, and the nodes that get it. `without`: the shards that it lacks.

    `shards`: those in it that not all nodes get. `size`: bytes.
    """

    release: str
    nodes: Tuple[int, ...]
    size: int
    shards: FrozenSet[str] = frozenset()
    without: FrozenSet[str] = frozenset()

    def of(self, entries: Iterable[Entry]) -> Tuple[Entry, ...]:
        """Return the entries that nodes of this portion get."""
        return tuple(entry for entry in entries if entry.path not in self.without)


Portions = Mapping[int, Portion]  # by node


def portions(entries: Sequence[Entry], roots: Mapping[int, str], reads: Optional[Reads] = None) -> Tuple[Portion, ...]:
    """Divide the nodes into portions, each of nodes that get the same files.

    roots: the identity of each node's ROOT_DIR; nodes that share one get what any of them reads. reads: the shards that each
    node reads; None: all nodes get all.
    """
    reads = reads or {}
    split: FrozenSet[str] = frozenset().union(*reads.values())
    by_root: Dict[str, FrozenSet[str]] = {}
    for node, root in roots.items():
        by_root[root] = by_root.get(root, frozenset()) | reads.get(node, frozenset())
    by_shards = grouped((by_root[roots[node]], node) for node in sorted(roots))
    ordered = sorted(entries, key=lambda entry: entry.path)
    lines = [(entry.path, line(entry), entry.size) for entry in ordered]
    found = []
    for shards, nodes in by_shards.items():
        without = split - shards
        kept = [(text, size) for path, text, size in lines if path not in without]
        size = sum(size for _, size in kept)
        found.append(Portion(name(text for text, _ in kept), tuple(nodes), size, shards, without))
    return tuple(found)


def by_node(found: Iterable[Portion]) -> Dict[int, Portion]:
    """Map each node to its portion."""
    return {node: portion for portion in found for node in portion.nodes}
