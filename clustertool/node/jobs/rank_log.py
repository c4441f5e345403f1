"""This module reads the end of a rank's log: its last lines, and the progress that the program printed there."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple, Optional, Tuple

from clustertool.model.job import progress as steps
from clustertool.node.storage import files

PIECE = 256 << 10


class RankProgress(NamedTuple):
    """`output`: when the log was written last (or made, if it is empty), by this node's clock."""

    epoch: Optional[float]
    step: Optional[float]
    output: float


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
