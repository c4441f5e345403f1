"""Rows become a table on a terminal and stable aligned lines otherwise.

Cells may have any text of a node: they are never markup and never control a terminal.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Literal, NamedTuple, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from clustertool.show.terminal import Terminal

_NUMERIC = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?( ?(%|s|ms|[kMGT]?B|[kMGT]iB)(/s)?)?|-?")
_GAP = "  "
_RICH_GAP = 2  # columns between two columns of a drawn table
_CUT = 12  # columns that remain of a column which is cut


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
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, terminal: Terminal, narrow: Narrow = _ALL
) -> None:
    """Print rows under a title: drawn on a terminal, else as aligned lines, in which empty cells are `-` so that awk can count.

    narrow: which columns are cut or left out on a terminal that is too narrow.
    """
    cells = [[_cell(value, terminal.printable) for value in row] for row in rows]
    title = terminal.printable(title)
    if terminal.is_terminal:
        _draw_table(title, columns, cells, terminal, narrow)
    else:
        terminal.write("".join(line + "\n" for line in _plain_lines(title, columns, cells)))


def _plain_lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Format the title, the column names and the rows as lines, with two blanks between columns."""
    texts = [list(columns)] + [[cell.text or "-" for cell in row] for row in rows]
    widths = _widths(texts)
    lines = [title] if title else []
    for row in texts:
        filled = (text + " " * (width - cell_len(text)) for text, width in zip(row, widths))
        lines.append(_GAP.join(filled).rstrip())
    return lines


def _cell(value: object, printable: Callable[[str], str]) -> Cell:
    """Convert a value to a cell with printable text, None to an empty one."""
    if isinstance(value, Cell):
        return Cell(printable(value.text), value.style)
    return Cell("" if value is None else printable(str(value)))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Compute the width of each column."""
    return [max(map(cell_len, column)) for column in zip(*rows)]


def _draw_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], terminal: Terminal, narrow: Narrow
) -> None:
    """Draw rows as a table of rich that fits the terminal; columns of numbers are aligned to the right."""
    if title:  # not rich's own, which it would wrap to the width of the table
        terminal.line(title, "bold")
    drawn = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    widths = _widths([list(columns), *([cell.text for cell in row] for row in rows)])
    shown = _columns_to_draw(columns, widths, rows, terminal.width, narrow)
    beyond = _drawn_width([widths[index] for index in shown]) - terminal.width
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
    draw(drawn, terminal)


def _columns_to_draw(
    columns: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[Cell]], room: int, narrow: Narrow
) -> list[int]:
    """Choose the columns to draw, by index: all that fit in `room`; if they are too wide, all but the empty ones.

    If these are too wide, too, those in narrow.out are left out, one after the other, until the rest fits. A column that can be
    cut counts with at most 12 columns of the terminal then.
    """
    every = list(range(len(widths)))
    if not rows or _drawn_width(widths) <= room:
        return every
    shown = [index for index in every if any(row[index].text for row in rows)]
    least = [min(width, _CUT) if name == narrow.cut else width for name, width in zip(columns, widths)]
    for name in narrow.out:
        if _drawn_width([least[index] for index in shown]) <= room:
            break
        shown = [index for index in shown if columns[index] != name]
    return shown


def _drawn_width(widths: Sequence[int]) -> int:
    """Compute how many columns of the terminal a drawn table of these widths takes."""
    return sum(widths) + _RICH_GAP * (len(widths) - 1)


def draw(renderable: RenderableType, terminal: Terminal) -> None:
    """Render an object of rich to text, and write it to the terminal in one piece."""
    console = rich_console(terminal)
    with console.capture() as captured:
        console.print(renderable)
    terminal.write(captured.get())


def rich_console(terminal: Terminal) -> Console:
    """Create a rich console that writes to the terminal, with its width and colours."""
    return Console(
        file=cast("IO[str]", _Stream(terminal)),
        force_terminal=terminal.is_terminal,
        width=terminal.width,
        color_system="auto" if terminal.colour else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ=dict(terminal.environ),
    )


class _Stream(io.TextIOBase):
    """What rich takes for a file: writes of a live display, which must not be diverted to itself. Each is flushed."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._terminal.encoding

    def write(self, text: str) -> int:
        self._terminal.write_drawn(text)
        return len(text)

    def isatty(self) -> bool:
        return self._terminal.is_terminal
