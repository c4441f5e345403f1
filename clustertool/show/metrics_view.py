"""This module formats the numbers that the ranks of a job have printed: as a table, or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import Metrics
from clustertool.show.table import table
from clustertool.show.terminal import Terminal

_COLUMNS = ("role", "rank", *(name.replace("_per_second", "/s").replace("_", " ") for name in Metrics._fields))


def metrics_table(newest: Mapping[Key, Metrics], terminal: Terminal) -> None:
    """Print the newest numbers of each rank, without the columns that no rank has."""
    rows = [(*key, *("" if value is None else f"{value:.7g}" for value in newest[key])) for key in sorted(newest)]
    shown = [at for at in range(len(_COLUMNS)) if at < 2 or any(row[at] for row in rows)]
    table("", [_COLUMNS[at] for at in shown], [[row[at] for at in shown] for row in rows], terminal=terminal)


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows of `metrics --json` as CSV, with a head."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["time", "role", "rank", "attempt", *Metrics._fields], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
