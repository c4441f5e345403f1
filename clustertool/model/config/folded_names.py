"""Names of nodes are folded as in ClusterShell: `node[1-3,7]`. Equal values of many nodes are grouped under such names. Pure.

`clustertool.model.config.hosts.expand` reads folded names back.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import FrozenSet, TypeVar

_NUMBER = re.compile(r"([0-9]+)")

Output = TypeVar("Output", bound=Hashable)
Item = TypeVar("Item")
Numbers = FrozenSet[str]  # the values one number of a name takes, as they were written (leading zeros count)


def grouped(pairs: Iterable[tuple[Output, Item]]) -> dict[Output, list[Item]]:
    """Group (key, value) pairs to {key: list of its values}, both in the order of the pairs."""
    found: dict[Output, list[Item]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def gather(outputs: Mapping[str, Output]) -> list[tuple[str, Output]]:
    """Group nodes by equal outputs: (folded names, output), the biggest group first, as `clush -b` and `dshbak -c` do."""
    groups = grouped((output, name) for name, output in outputs.items())
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))  # stable: first come, first shown
    return [(fold(names), output) for output, names in ordered]


def fold(names: Iterable[str]) -> str:
    """Fold names: node1 node2 node3 node7 login -> `node[1-3,7],login`. A group has the place of its first name.

    Each name counts once. A name with brackets or commas stays as it is.
    """
    groups: dict[tuple[str, ...], list[tuple[Numbers, ...]]] = {}
    for name in dict.fromkeys(names):
        # A name with brackets or commas could be mistaken for a folded one, so it is not folded.
        parts = [name] if re.search(r"[\[\],]", name) else _NUMBER.split(name)
        groups.setdefault(tuple(parts[::2]), []).append(tuple(frozenset({number}) for number in parts[1::2]))
    return ",".join(_format_name(texts, item) for texts, items in groups.items() for item in _merge(items))


def _merge(items: list[tuple[Numbers, ...]]) -> list[tuple[Numbers, ...]]:
    """Join names that differ in one number only, the last number first: rack1-node1 ... -> rack[1-2]-node[1-8]."""
    for axis in reversed(range(len(items[0]))):
        alike: dict[tuple[Numbers, ...], Numbers] = {}
        for item in items:
            others = item[:axis] + item[axis + 1 :]
            alike[others] = alike.get(others, frozenset()) | item[axis]
        items = [(*others[:axis], numbers, *others[axis:]) for others, numbers in alike.items()]
    return items


def _format_name(texts: Sequence[str], numbers: Sequence[Numbers]) -> str:
    """Format a name: its texts with the numbers between them, several numbers in brackets."""
    text = texts[0]
    for values, part in zip(numbers, texts[1:]):
        text += (next(iter(values)) if len(values) == 1 else f"[{','.join(_ranges(values))}]") + part
    return text


def _ranges(values: Numbers) -> list[str]:
    """Convert numbers as written to ranges, in ascending order.

    A range is as wide as its first number if that begins with 0 (see expand).
    """
    left = set(values)
    ranges: list[tuple[int, str]] = []
    # Padded numbers first: 10 may follow 09, but 09 follows nothing.
    for first in sorted(values, key=lambda v: (not _is_padded(v), len(v), int(v))):
        if first not in left:
            continue
        width = len(first) if _is_padded(first) else 0
        last, after = first, first
        while after in left:
            left.remove(after)
            last, after = after, str(int(after) + 1).zfill(width)
        ranges.append((int(first), first if first == last else f"{first}-{last}"))
    return [text for _, text in sorted(ranges)]


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0-3,7."""
    return ",".join(_ranges(frozenset(map(str, numbers))))


def _is_padded(number: str) -> bool:
    """Check whether a number has zeros in front."""
    return len(number) > 1 and number.startswith("0")
