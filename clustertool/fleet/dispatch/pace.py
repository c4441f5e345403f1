"""A pace tells which pieces are late: others that were begun after them are there.

So it is not the time that judges, which all need more of on a slow uplink or a busy machine, but what came meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

_TIMES = 4  # a piece's size; with three senders that are equally fast twice its size comes while it is on its way
_LEAST = 256 << 10  # bytes
_MORE = 0.5  # seconds


@dataclass
class _Way:
    """A piece on its way to a node. `passed`: bytes that were begun later and have come, to whomever."""

    size: int
    since: float
    passed: int = 0


class Pace:
    """`report`: seconds between two words of a node; so late it may tell of a piece that has long been there."""

    def __init__(self, report: float) -> None:
        self._patience = report + _MORE
        self._ways: dict[tuple[int, int], _Way] = {}  # by node and piece

    def begun(self, node: int, piece: int, size: int, now: float) -> None:
        self._ways[node, piece] = _Way(size, now)

    def came(self, node: int, piece: int) -> None:
        """The node has told that it has it."""
        way = self._ways.pop((node, piece), None)
        if way is None:
            return
        for other in self._ways.values():
            if other.since < way.since:
                other.passed += way.size

    def owed(self, node: int) -> set[int]:
        """Pieces that are on their way to it."""
        return {piece for at, piece in self._ways if at == node}

    def late(self, now: float) -> set[tuple[int, int]]:
        """(node, piece) of what should be there by now."""
        return {
            key for key, way in self._ways.items() if now - way.since > self._patience and way.passed >= self._most(way)
        }

    @staticmethod
    def _most(way: _Way) -> int:
        return _TIMES * max(way.size, _LEAST)
