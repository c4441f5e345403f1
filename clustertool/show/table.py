"""Rows become a table on a terminal and stable aligned lines otherwise. Equal values of many nodes are printed once.

Names are folded as in ClusterShell, `node[1-3,7]`, and `clustertool.model.config.hosts.expand` reads them back. Cells may have
any text of a node: they are never markup and never control a terminal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from clustertool.show.terminal import Terminal

_NUMBER = re.compile(r"([0-9]+)")
_NUMERIC = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?( ?(%|s|ms|[kMGT]?B|[kMGT]iB)(/s)?)?|-?")
_GAP = "  "
_RICH_GAP = 2  # columns between two columns of a drawn table
_CUT = 12  # columns that remain of a column which is cut

Output = TypeVar("Output", bound=Hashable)
Item = TypeVar("Item")
Numbers = frozenset[str]  # the values one number of a name takes, as they were written (leading zeros count)


class Cell(NamedTuple):
    """Text with a style of `terminal.STYLES`; wherever no style is needed a plain value does."""

    text: str
    style: str = ""


class Narrow(NamedTuple):
    """What gives way on a terminal that is too narrow: the texts of one column are cut, columns are left out in this order."""

    cut: str = ""
    out: Sequence[str] = ()


_ALL = Narrow()


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    terminal: Terminal,
    narrow: Narrow = _ALL,
) -> None:
    """Show rows under a title. Empty cells are `-` in plain lines, so that awk can count columns."""
    cells = [[_cell(value, terminal.printable) for value in row] for row in rows]
    title = terminal.printable(title)
    if terminal.is_terminal:
        _rich(title, columns, cells, terminal, narrow)
    else:
        terminal.write("".join(line + "\n" for line in _plain(title, columns, cells)))


def _plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Title, header, rows; columns at least two blanks apart."""
    texts = [list(columns)] + [[cell.text or "-" for cell in row] for row in rows]
    widths = _widths(texts)
    lines = [title] if title else []
    for row in texts:
        filled = (text + " " * (width - _columns(text)) for text, width in zip(row, widths))
        lines.append(_GAP.join(filled).rstrip())
    return lines


def _cell(value: object, printable: Callable[[str], str]) -> Cell:
    if isinstance(value, Cell):
        return Cell(printable(value.text), value.style)
    return Cell("" if value is None else printable(str(value)))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_columns, column)) for column in zip(*rows)]


def _columns(text: str) -> int:
    """Columns of a terminal that a text takes: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _rich(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], terminal: Terminal, narrow: Narrow
) -> None:
    if title:  # not rich's own, which it would wrap to the width of the table
        terminal.line(title, "bold")
    drawn = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    widths = _widths([list(columns), *([cell.text for cell in row] for row in rows)])
    shown = _shown(columns, widths, rows, terminal.width, narrow)
    beyond = _drawn([widths[index] for index in shown]) - terminal.width
    for index in shown:
        if columns[index] == narrow.cut and beyond > 0:
            room = max(widths[index] - beyond, _CUT)
            drawn.add_column(Text(columns[index]), overflow="ellipsis", no_wrap=True, max_width=room)
            continue
        numeric = bool(rows) and all(_NUMERIC.fullmatch(row[index].text) for row in rows)
        justify: Literal["right", "left"] = "right" if numeric else "left"
        drawn.add_column(Text(columns[index]), justify=justify, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(row[index].text, row[index].style) for index in shown))
    terminal.draw(drawn)


def _shown(
    columns: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[Cell]], room: int, narrow: Narrow
) -> list[int]:
    """The columns to draw: all, but if there is no room, empty ones go, and then those that `narrow` names."""
    every = list(range(len(widths)))
    if not rows or _drawn(widths) <= room:
        return every
    shown = [index for index in every if any(row[index].text for row in rows)]
    least = [min(width, _CUT) if name == narrow.cut else width for name, width in zip(columns, widths)]
    for name in narrow.out:
        if _drawn([least[index] for index in shown]) <= room:
            break
        shown = [index for index in shown if columns[index] != name]
    return shown


def _drawn(widths: Sequence[int]) -> int:
    """Columns of the terminal that a drawn table of these columns takes."""
    return sum(widths) + _RICH_GAP * (len(widths) - 1)


def grouped(pairs: Iterable[tuple[Output, Item]]) -> dict[Output, list[Item]]:
    """(key, value) pairs -> {key: its values}, both in their order."""
    found: dict[Output, list[Item]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def gather(outputs: Mapping[str, Output]) -> list[tuple[str, Output]]:
    """Nodes' outputs -> (folded names, output), the biggest group first, as `clush -b` and `dshbak -c` do."""
    groups = grouped((output, name) for name, output in outputs.items())
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))  # stable: first come, first shown
    return [(fold(names), output) for output, names in ordered]


def fold(names: Iterable[str]) -> str:
    """node1 node2 node3 node7 login -> `node[1-3,7],login`; a group has the place of its first name."""
    groups: dict[tuple[str, ...], list[tuple[Numbers, ...]]] = {}
    for name in dict.fromkeys(names):
        # A name with brackets or commas could be mistaken for a folded one, so it is not folded.
        parts = [name] if re.search(r"[\[\],]", name) else _NUMBER.split(name)
        groups.setdefault(tuple(parts[::2]), []).append(tuple(frozenset({number}) for number in parts[1::2]))
    return ",".join(_written(texts, item) for texts, items in groups.items() for item in _merge(items))


def _merge(items: list[tuple[Numbers, ...]]) -> list[tuple[Numbers, ...]]:
    """Join what differs in one number only, the last number first: rack1-node1 ... -> rack[1-2]-node[1-8]."""
    for axis in reversed(range(len(items[0]))):
        alike: dict[tuple[Numbers, ...], Numbers] = {}
        for item in items:
            others = item[:axis] + item[axis + 1 :]
            alike[others] = alike.get(others, frozenset()) | item[axis]
        items = [(*others[:axis], numbers, *others[axis:]) for others, numbers in alike.items()]
    return items


def _written(texts: Sequence[str], numbers: Sequence[Numbers]) -> str:
    text = texts[0]
    for values, part in zip(numbers, texts[1:]):
        text += (next(iter(values)) if len(values) == 1 else f"[{','.join(_ranges(values))}]") + part
    return text


def _ranges(values: Numbers) -> list[str]:
    """Numbers as written -> ranges. A range is as wide as its first number if that begins with 0 (see expand)."""
    left = set(values)
    ranges: list[tuple[int, str]] = []
    # Padded numbers first: 10 may follow 09, but 09 follows nothing.
    for first in sorted(values, key=lambda v: (not _padded(v), len(v), int(v))):
        if first not in left:
            continue
        width = len(first) if _padded(first) else 0
        last, after = first, first
        while after in left:
            left.remove(after)
            last, after = after, str(int(after) + 1).zfill(width)
        ranges.append((int(first), first if first == last else f"{first}-{last}"))
    return [text for _, text in sorted(ranges)]


def ranges(numbers: Iterable[int]) -> str:
    """0-3,7."""
    return ",".join(_ranges(frozenset(map(str, numbers))))


def _padded(number: str) -> bool:
    return len(number) > 1 and number.startswith("0")
