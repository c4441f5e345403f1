"""Tables of docs/slurm.md that tests write: a row per case, found by its first cell. UPDATE_PAGES=1 writes the rows."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from tests.cli import REPO

PAGE = REPO / "docs/slurm.md"


def check_row(table: str, name: str, cells: Sequence[str], measured: Sequence[str] = ()) -> None:
    """The row `name` of a table has these cells. The last ones, which were measured, may differ.

    table: as in the comment <!-- TABLE: written by ... --> above the table.
    """
    with PAGE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith(f"<!-- {table}: written by "))
        place = next((n for n in range(start, len(lines)) if lines[n].startswith(f"| {name} |")), 0)
        if os.environ.get("UPDATE_PAGES"):
            row = f"| {' | '.join([name, *cells, *measured])} |"
            if place:
                lines[place] = row
            else:
                lines.insert(_end(lines, start), row)
            file.seek(0)
            file.truncate()
            file.write("\n".join(lines) + "\n")
            return
    assert place, f"{PAGE.name}, table {table}: there is no row {name!r}; UPDATE_PAGES=1 writes it"
    assert lines[place].split(" | ")[1 : 1 + len(cells)] == list(cells), lines[place]


def _end(lines: Sequence[str], start: int) -> int:
    """Where the table after a line ends."""
    first = next(n for n in range(start, len(lines)) if lines[n].startswith("|"))
    return next((n for n in range(first, len(lines)) if not lines[n].startswith("|")), len(lines))
