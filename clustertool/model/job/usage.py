"""This module decides which lines of usage.jsonl, growth.jsonl and metrics.jsonl are kept, and thins them.

usage.jsonl has one JSON object per line, written every few seconds while ranks run:

    t   the node's clock, seconds
    n   [busy, cores, used, total]: the machine: CPU seconds since its boot, its cores, bytes of memory
    r   [[role, rank, attempt, cpu, memory, processes, log], ...]: a running rank with all its descendants: CPU seconds since
        the job began, resident bytes (shared pages count in each process), living processes, bytes in its log
    d   [[index, utilisation, used, total], ...]: a card: percent, bytes; only where cards can be read

CPU is a sum that grows, so the mean between any two lines that are kept is exact.

growth.jsonl has a line [time, log, size] when a log has grown, at most two a second for each log. `inv logs` merges ranks by
them, and has the times of lines from them. Of a job of weeks some thousand lines remain for each log, so these times are less
exact for old output.

metrics.jsonl has a line [time, log, numbers] when a number has changed that the rank of this log prints, at most one in 2 s:
the values of Metrics (model/job/progress.py). `inv metrics` and the report have their curves from them.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import Callable, Dict, Iterable, Iterator, List, Sequence, Set, Tuple, TypedDict

RankUsage = Tuple[str, int, int, float, int, int, int]
CardUsage = Tuple[int, float, int, int]


class _Cards(TypedDict, total=False):
    """The part of a line that a node without cards does not write."""

    d: List[CardUsage]


class UsageLine(_Cards):
    """One line of usage.jsonl, described above."""

    t: float
    n: Tuple[float, int, int, int]
    r: List[RankUsage]


Row = Tuple[float, ...]
Fold = Callable[[Sequence[float]], float]
FINE = 250  # lines on both sides of a line that are closer than this part of its age make it one too many


def lines_to_keep(times: Sequence[float], now: float) -> List[int]:
    """Return the numbers of the lines to keep: one goes if the lines around it are closer to each other than 1/250 of its age.

    The first and the last stay. So new samples are exact and old ones coarse: a month is some 4,500 lines, not a million. What
    a line has that is left out, the next one that is kept has not much later, also where nothing was recorded for a long time
    after it.
    """
    found: List[int] = []
    for index, t in enumerate(times):
        after = times[index + 1] if index + 1 < len(times) else math.inf
        if not found or after - times[found[-1]] >= (now - t) / FINE:
            found.append(index)
    return found


def thin_out(data: bytes, now: float) -> bytes:
    """Return one of these files without the lines that lines_to_keep() does not choose, and without invalid ones.

    The last line of each log stays: what is behind it in the log has no time.
    """
    lines = data.split(b"\n")
    logs: Dict[str, List[Tuple[float, int]]] = {}  # "" for lines of usage.jsonl
    for number, line in enumerate(lines):
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):  # torn by a crash, or not ours
            found = json.loads(line)
            t, log = (float(found["t"]), "") if isinstance(found, dict) else (float(found[0]), found[1])
            logs.setdefault(log, []).append((t, number))
    stay: Set[int] = set()
    for times in logs.values():
        stay.update(times[index][1] for index in lines_to_keep([t for t, _ in times], now))
    return b"".join(lines[number] + b"\n" for number in sorted(stay))


def read_lines(data: bytes) -> Iterator[UsageLine]:
    """Yield the whole lines of usage.jsonl, parsed; what a crash or a full disk has torn is skipped."""
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found = json.loads(line)
            float(found["t"])
            yield found


def last(values: Sequence[float]) -> float:
    """Return the last value, as a fold of fewer()."""
    return values[-1]


def mean(values: Sequence[float]) -> float:
    """Compute the mean of the values, as a fold of fewer()."""
    return sum(values) / len(values)


def fewer(rows: Sequence[Row], most: int, *folds: Fold) -> List[Row]:
    """Reduce rows to at most `most` + 1: time is cut into equal parts, and each column of a part folded (last, max, mean).

    folds: one for each column after the time. A row is (time, value, ...), in order of time. A part's time is that of its last
    row; the first row stays, for sums.
    """
    if len(rows) <= most + 1:
        return list(rows)
    begin, width = rows[0][0], (rows[-1][0] - rows[0][0]) / most
    parts: Dict[int, List[Row]] = {}
    for row in rows[1:]:
        parts.setdefault(min(int((row[0] - begin) / width), most - 1) if width > 0 else 0, []).append(row)
    found = [rows[0]]
    for part in parts.values():
        columns = list(zip(*part))
        found.append((part[-1][0], *(fold(column) for fold, column in zip(folds, columns[1:]))))
    return found


def rates(rows: Iterable[Row]) -> List[Tuple[float, float]]:
    """Compute (time, growth a second since the row before) from rows (time, sum that grows, ...).

    A sum that fell counts as 0.
    """
    found: List[Tuple[float, float]] = []
    before: Row = ()
    for row in rows:
        if before and row[0] > before[0]:
            found.append((row[0], max(0.0, row[1] - before[1]) / (row[0] - before[0])))
        before = row
    return found
