"""Several ranks' logs become one story: pieces of all nodes in the order of their times, with one piece a node in memory.

A node's pieces come in order already; its last pieces, and its events, have no time and come when their turn is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Frame = tuple[int, Mapping[str, Any], bytes]
_LAST = ("end", "closed")


def in_order(nodes: Iterable[int], following: Callable[[int], Frame]) -> Iterator[Frame]:
    """`following(node)` waits for a node's next frame. Ends when every node has said its last word."""
    heads = {node: following(node) for node in nodes}
    times = dict.fromkeys(heads, 0.0)
    while heads:
        for node, (_, header, _) in heads.items():
            if header.get("k") == "log":
                times[node] = max(times[node], float(header.get("t", times[node])))
        first = min(heads, key=lambda node: (times[node], node))
        frame = heads[first]
        yield frame
        if frame[1].get("k") in _LAST:
            del heads[first]
        else:
            heads[first] = following(first)
