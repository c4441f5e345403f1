"""The topology defines the sources of each node: every node has a few, every source serves as many, and all paths are short."""

from __future__ import annotations

from typing import Iterable, List, Set


def degree(count: int) -> int:
    """Return how many sources a node has at a time: 3, or 2 among more than 16 nodes, since each costs a handshake."""
    return 3 if count <= 16 else 2


def sources(count: int, me: int) -> List[int]:
    """List all other nodes, in the order in which `me` tries them as sources.

    The first ones are those of Imase and Itoh's graph: with d of them, the sources of i are -d*i-1 .. -d*i-d (modulo count). A
    piece is then everywhere after log_d(count) steps, and each node is a source of as many others as it has sources itself.
    (A de Bruijn graph does as much, but its node 0, which gets most of what the laptop sends, is a source of its own.)
    """
    d = degree(count)
    first = [(-d * me - digit) % count for digit in range(1, d + 1)]
    rest = [(me - distance) % count for distance in range(1, count)]
    found: List[int] = []
    for node in [*first, *rest]:
        if node != me and node not in found:
            found.append(node)
    return found


def require_below(count: int, numbers: Iterable[int]) -> None:
    """Raise ValueError unless all numbers are from 0 to `count` - 1."""
    for number in numbers:
        if not 0 <= number < count:
            raise ValueError(f"there is no piece {number}")


def bits(numbers: Iterable[int]) -> str:
    """Encode a set of numbers as a bit mask in hex."""
    value = 0
    for number in numbers:
        value |= 1 << number
    return f"{value:x}"


def numbers(text: str, count: int) -> Set[int]:
    """Decode a bit mask in hex to the numbers below `count`. Raises ValueError for another text."""
    if len(text) > count // 4 + 2:
        raise ValueError("too many")
    value = bin(int(text, 16))[:1:-1]
    return {number for number, bit in enumerate(value[:count]) if bit == "1"}
