"""This module merges the logs of several ranks: pieces of all nodes in the order of their times, one piece per node in memory.

A node's pieces are in order already. Its last pieces, and its events, have no time and keep their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from clustertool.model.wire.stream_messages import StreamFrame

Frame = tuple[int, StreamFrame, bytes]
_LAST = ("end", "closed")


def in_order(nodes: Iterable[int], following: Callable[[int], Frame]) -> Iterator[Frame]:
    """`following(node)` waits for a node's next frame. Ends when every node has sent its last event."""
    heads = {node: following(node) for node in nodes}
    times = dict.fromkeys(heads, 0.0)
    while heads:
        for node, (_, header, _) in heads.items():
            if header["type"] == "log":
                times[node] = max(times[node], float(header.get("t", times[node])))
        first = min(heads, key=lambda node: (times[node], node))
        frame = heads[first]
        yield frame
        if frame[1]["type"] in _LAST:
            del heads[first]
        else:
            heads[first] = following(first)
