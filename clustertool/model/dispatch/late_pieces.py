"""A piece is late when others that were begun after it have come, four times its size.

Time alone does not judge: on a slow uplink or a busy machine all pieces need more of it. Only when there is nothing else to
send, nothing can overtake a piece. Its time is then compared with that of the pieces that have come: it may be overdue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Set, Tuple

_TIMES = 4  # a piece's size; with three senders that are equally fast twice its size comes while it is on its way
_LEAST = 256 << 10  # bytes
_MORE = 1.0  # seconds; with 0.5 a busy machine (load 12 on 2 cores) sent every fourth piece twice
_SMOOTHING = 8  # pieces over which the usual time is averaged


@dataclass
class _Transit:
    """A piece on its way to a node. `passed`: bytes that were begun later and have come, to any node."""

    size: int
    since: float
    passed: int = 0

    @property
    def weight(self) -> int:
        """Its size in bytes, at least _LEAST: a smaller piece takes no less time."""
        return max(self.size, _LEAST)


class LatePieces:
    """The pieces on their way to nodes, and which of them are late.

    `report`: seconds between two reports of a node, which may report a piece so long after it came.
    """

    def __init__(self, report: float) -> None:
        self._patience = report + _MORE
        self._transits: Dict[Tuple[int, int], _Transit] = {}  # by node and piece
        self._usual = 0.0  # seconds that a byte took; 0: no piece has come

    def begun(self, node: int, piece: int, size: int, now: float) -> None:
        """Record that a piece is on its way to a node."""
        self._transits[node, piece] = _Transit(size, now)

    def came(self, node: int, piece: int, now: float) -> None:
        """Record that a node has a piece, and add its size to what has overtaken the pieces that were begun before it.

        It updates the usual seconds per byte, too. Does nothing for a piece that is not on its way to this node.
        """
        done = self._transits.pop((node, piece), None)
        if done is None:
            return
        for other in self._transits.values():
            if other.since < done.since:
                other.passed += done.size
        took = (now - done.since) / done.weight
        self._usual += (took - self._usual) / _SMOOTHING if self._usual else took

    def on_the_way(self, node: int) -> Set[int]:
        """Return the pieces on their way to a node."""
        return {piece for at, piece in self._transits if at == node}

    def find_late(self, now: float) -> Set[Tuple[int, int]]:
        """Find (node, piece) on its way for more than a report and 1 s, which pieces of four times its size have overtaken."""
        old = {key: transit for key, transit in self._transits.items() if now - transit.since > self._patience}
        return {key for key, transit in old.items() if transit.passed >= _TIMES * transit.weight}

    def find_slowest(self, now: float) -> Set[Tuple[int, int]]:
        """Find (node, piece) that takes four times the usual time of its size, and longer than two reports of its node.

        Use it only if no other piece can be sent. Where all machines are busy, all of the last pieces are reported late.
        """
        least, transits = 2 * self._patience, self._transits.items() if self._usual else ()
        return {key for key, one in transits if now - one.since > max(least, _TIMES * one.weight * self._usual)}
