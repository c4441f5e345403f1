"""A piece is late when others that were begun after it have come, four times its size.

Time alone does not judge: on a slow uplink or a busy machine all pieces need more of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Set, Tuple

_TIMES = 4  # a piece's size; with three senders that are equally fast twice its size comes while it is on its way
_LEAST = 256 << 10  # bytes
_MORE = 1.0  # seconds; with 0.5 a busy machine (load 12 on 2 cores) sent every fourth piece twice


@dataclass
class _Transit:
    """A piece on its way to a node. `passed`: bytes that were begun later and have come, to any node."""

    size: int
    since: float
    passed: int = 0


class LatePieces:
    """`report`: seconds between two reports of a node, which may report a piece so long after it came."""

    def __init__(self, report: float) -> None:
        self._patience = report + _MORE
        self._transits: Dict[Tuple[int, int], _Transit] = {}  # by node and piece

    def begun(self, node: int, piece: int, size: int, now: float) -> None:
        self._transits[node, piece] = _Transit(size, now)

    def came(self, node: int, piece: int) -> None:
        """The node has reported the piece."""
        done = self._transits.pop((node, piece), None)
        for other in self._transits.values() if done else ():
            if done and other.since < done.since:
                other.passed += done.size

    def on_the_way(self, node: int) -> Set[int]:
        return {piece for at, piece in self._transits if at == node}

    def late(self, now: float) -> Set[Tuple[int, int]]:
        """(node, piece) of what should have come by now."""
        return {
            key
            for key, transit in self._transits.items()
            if now - transit.since > self._patience and transit.passed >= _TIMES * max(transit.size, _LEAST)
        }
