"""This module reads a rank's log: its last lines, the progress that the program printed there, and when its lines were written.

A log has no times itself. growth.jsonl is the supervisor's record of how logs have grown (model/job/usage.py). The time of a
byte is that of the first record in which the log is long enough to have it.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

from clustertool.model.job import progress as steps
from clustertool.model.paths import OURS
from clustertool.node.storage import files

PIECE = 256 << 10
_LATEST = 1e11  # seconds since the epoch; the laptop refuses a later time


class RankProgress(NamedTuple):
    """`output`: when the log was written last (or made, if it is empty), by this node's clock."""

    epoch: Optional[float]
    step: Optional[float]
    output: float


class RecordedSize(NamedTuple):
    """The size of a log in its last record before a time, and whether there are records at that time or later."""

    size: int
    later: bool


NO_RECORD = RecordedSize(0, False)


def end_of(job: int, log: str, most: int) -> Tuple[bytes, float]:
    """The last bytes of a log, and when it was written last. `job`: the descriptor of its directory. Raises OSError."""
    with files.closing(files.open_read(job, log)) as fd:
        about = os.fstat(fd)
        return os.pread(fd, most, max(0, about.st_size - most)), about.st_mtime


def progress(job: int, log: str, most: int) -> Optional[RankProgress]:
    """The newest one in the last `most` bytes of a log; None where there is no such log."""
    with contextlib.suppress(OSError):
        data, written = end_of(job, log, most)
        epoch, step = steps.find(data.decode("utf-8", "replace")) or (None, None)
        return RankProgress(epoch, step, round(written, 2))
    return None


def tail_offset(fd: int, lines: int) -> int:
    """Where the last `lines` lines begin, read backwards."""
    end = os.fstat(fd).st_size
    if lines <= 0:
        return end
    at, found = end, 0
    while at > 0:
        size = min(PIECE, at)
        at -= size
        block = os.pread(fd, size, at)
        if at + size == end and block.endswith(b"\n"):
            block = block[:-1]  # the newline that ends the last line
        before, *after = block.rsplit(b"\n", lines - found)
        found += len(after)
        if found == lines:
            return at + len(before) + 1
    return 0


def line_start(fd: int, at: int) -> int:
    """Where the line begins to which byte `at` belongs; `at` itself for a line that is longer than a piece."""
    start = max(0, at - PIECE)
    block = os.pread(fd, at - start, start)
    return start + block.rfind(b"\n") + 1 if start == 0 or b"\n" in block else at


def last_lines(job: int, name: str, lines: int, limit: int = 64 << 10) -> str:
    """The end of a log: at most `lines` lines and `limit` bytes. Raises OSError."""
    with files.closing(files.open_read(job, name)) as fd:
        start = max(tail_offset(fd, lines), os.fstat(fd).st_size - limit)
        return os.pread(fd, limit, start).decode("utf-8", "backslashreplace")


# -- when its lines were written


def growth(job: int) -> Iterator[Tuple[float, str, int]]:
    """(time by this node's clock, log, size), in order of time. `job`: the descriptor of the job's directory."""
    try:
        fd = files.open_read(job, f"{OURS}/growth.jsonl")
    except OSError:  # nothing has grown, or it cannot be known
        return
    with open(fd, "rb") as file:
        for line in file:
            # A line can be torn by a crash, or not ours.
            with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                t, name, size = json.loads(line)
                t, size = float(t), int(size)
                if 0 <= t < _LATEST and size >= 0:
                    yield t, str(name), size


def sizes_at(job: int, t: float) -> Dict[str, RecordedSize]:
    """The size that each log had at a time, as far as it is recorded."""
    found: Dict[str, RecordedSize] = {}
    for at, name, size in growth(job):
        before = found.get(name, NO_RECORD).size
        found[name] = RecordedSize(size, False) if at < t else RecordedSize(before, True)
    return found


def offset_at(fd: int, recorded: RecordedSize, t: float) -> int:
    """Where the first line of a log begins that was completed at time `t` or later. `recorded`: its size at `t`.

    A record follows what it records by up to 0.5 s, so it counts more than the time of the last write. Nothing that is later is
    left out: where the records are coarse, some older lines follow.
    """
    about = os.fstat(fd)
    if about.st_mtime < t and not recorded.later:
        return line_start(fd, about.st_size)
    return line_start(fd, recorded.size) if recorded.size <= about.st_size else 0  # else its program has truncated it
