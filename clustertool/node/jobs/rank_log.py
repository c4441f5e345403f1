"""This module reads a rank's log: its last lines, the progress that the program printed there, and when its lines were written.

A log has no times itself. growth.jsonl is the supervisor's record of how logs have grown (model/job/usage.py). The time of a
byte is that of the first record in which the log is long enough to have it.

A program can truncate its log: the shell does it for `> /dev/stderr`, and Python for open("/dev/stdout", "w"). What the log had
before is then in a second file (node/supervisor/log_keeper.py). Offsets and sizes count the bytes of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

from clustertool.model.job.progress import NOTHING, Metrics, find_metrics
from clustertool.model.paths import CUT, METRICS, OURS, JobPaths
from clustertool.model.shape import read
from clustertool.node.storage import files
from clustertool.node.system import mounts

PIECE = 256 << 10
TRUNCATED = (  # is in the log where that has happened first
    b"clustertool: the program has truncated this log here, as `> /dev/stderr` and open('/dev/stdout', 'w') do: "
    b"lines before may be missing\n"
)
_END = 64  # bytes before a position by which a truncated log is recognised
_PATIENCE = 2.0  # seconds until the second file has what was before
_LATEST = 1e11  # seconds since the epoch; the laptop refuses a later time


class RankProgress(NamedTuple):
    """The newest epoch and step in a log, None if it has none, and all numbers in its end.

    output: when the log was written last (or made, if it is empty), by this node's clock.
    """

    epoch: Optional[float]
    step: Optional[float]
    output: float
    numbers: Metrics = NOTHING


class RecordedSize(NamedTuple):
    """The size of a log in its last record before a time, and whether there are records at that time or later."""

    size: int
    later: bool


NO_RECORD = RecordedSize(0, False)


class RankLog:
    """A log that is open for reading, with the second file, which has what the program has truncated.

    base: how many of its bytes are in the second file. at: the position of read().
    """

    def __init__(self, job: int, name: str, shown: bool = False) -> None:
        """Open a log. job: the descriptor of the job's directory. name: JobPaths.log.

        shown: prefer the file of this name, which may be that of a program. Raises OSError.
        """
        self._job, self._saved = job, "" if shown else JobPaths.written(name) + CUT
        self._fd, self._cut = _open_file(job, name, shown), -1
        self.base = self.at = 0
        self._end, self._mtime, self._until = b"", 0, 0.0
        self.refresh()

    def size(self) -> int:
        """Return the number of bytes in both files."""
        return self.base + os.fstat(self._fd).st_size

    def mtime(self) -> float:
        """Return when the log was written last, by this node's clock."""
        return os.fstat(self._fd).st_mtime

    def pread(self, count: int, at: int) -> bytes:
        """Read up to `count` bytes from offset `at` of the log; they may come from both files."""
        data = os.pread(self._cut, min(count, self.base - at), at) if at < self.base else b""
        return data + os.pread(self._fd, count - len(data), max(0, at - self.base))

    def refresh(self) -> None:
        """Update `base` from the size of the second file, if there is one and it is complete.

        While that file is written, it has no permission to be read.
        """
        with contextlib.suppress(OSError):
            if self._cut < 0 and self._saved:
                self._cut = files.open_read(self._job, self._saved)
            about = os.fstat(self._cut)
            self.base = about.st_size if about.st_mode & stat.S_IRUSR else self.base

    def read(self, most: int) -> bytes:
        """Return up to `most` bytes from `at`, and move `at` on; b"" at the end, and for up to 2 s after a truncation.

        If the second file appears only now, returns its last 256 KiB at most, instead.
        """
        before, truncated = self.base, self.truncated()
        self.refresh()
        if truncated:
            self._until = self._until or time.monotonic() + _PATIENCE
            if self.base > before:  # what was read may be more than what was saved
                self.at = min(self.at, self.base - (0 if before else len(TRUNCATED)))
            elif time.monotonic() > self._until:
                self.at = self.base
            else:
                return b""
        elif self.at > before < self.base:  # what was there before this object had opened the file comes late
            data = os.pread(self._cut, PIECE, max(before, self.base - PIECE))
            self.seek(self.at + self.base - before)
            return data
        self._until = 0.0
        data = self.pread(most, self.at)
        self.seek(self.at + len(data))
        return data

    def seek(self, at: int) -> None:
        """Set the position of read(), and remember the bytes before it, by which a truncated file is recognised."""
        about, place = os.fstat(self._fd), max(0, at - self.base)
        self.at, self._end = at, os.pread(self._fd, min(place, _END), max(0, place - _END))
        self._mtime = about.st_mtime_ns if about.st_size == place else 0

    def truncated(self) -> bool:
        """Check whether the file has lost or changed what is before the position of read().

        A file that has the same size was written again if its time has changed. File servers change that time later.
        """
        about, place = os.fstat(self._fd), max(0, self.at - self.base)
        if about.st_size < place or os.pread(self._fd, len(self._end), max(0, place - _END)) != self._end:
            return True
        again = about.st_size == place > 0 and self._mtime not in (0, about.st_mtime_ns)
        return again and mounts.device_name(about.st_dev) not in mounts.network_mounts()

    def close(self) -> None:
        """Close both files."""
        for fd in (self._fd, self._cut):
            if fd >= 0:
                os.close(fd)


def _open_file(job: int, name: str, shown: bool) -> int:
    """Open the file of a log for reading, and return its descriptor. Raises OSError.

    It is the file to which the rank writes; in a job of an earlier version that may have the name for readers. shown: try the
    name for readers first.
    """
    places = [name, JobPaths.written(name)] if shown else [JobPaths.written(name), name]
    if not shown and os.path.isdir(f"{files.path_of(job)}/{OURS}/log"):
        places.pop()
    with contextlib.suppress(FileNotFoundError):
        return files.open_read(job, places[0])
    return files.open_read(job, places[-1])


def end_of(job: int, log: str, most: int) -> Tuple[bytes, float]:
    """Read the last `most` bytes of a log, and when it was written last. Raises OSError.

    job: the descriptor of the job's directory.
    """
    with contextlib.closing(RankLog(job, log)) as found:
        return found.pread(most, max(0, found.size() - most)), found.mtime()


def progress(job: int, log: str, most: int) -> Optional[RankProgress]:
    """Read the newest numbers in the last `most` bytes of a log, and when it was written; None if it cannot be read."""
    with contextlib.suppress(OSError):
        data, written = end_of(job, log, most)
        found = find_metrics(data.decode("utf-8", "replace"))
        return RankProgress(found.epoch, found.step, round(written, 2), found)
    return None


def tail_offset(log: RankLog, lines: int, end: int) -> int:
    """Return the offset at which the last `lines` lines before offset `end` begin; 0 if there are fewer, `end` for 0 lines."""
    if lines <= 0:
        return end
    at, found = end, 0
    while at > 0:
        size = min(PIECE, at)
        at -= size
        block = log.pread(size, at)
        if at + size == end and block.endswith(b"\n"):
            block = block[:-1]  # the newline that ends the last line
        before, *after = block.rsplit(b"\n", lines - found)
        found += len(after)
        if found == lines:
            return at + len(before) + 1
    return 0


def line_start(log: RankLog, at: int) -> int:
    """Return the offset at which the line of byte `at` begins; `at` itself for a line that is longer than a piece."""
    start = max(0, at - PIECE)
    block = log.pread(at - start, start)
    return start + block.rfind(b"\n") + 1 if start == 0 or b"\n" in block else at


def last_lines(job: int, name: str, lines: int, limit: int = 64 << 10) -> str:
    """Read the end of a log: at most `lines` lines and `limit` bytes. Raises OSError."""
    with contextlib.closing(RankLog(job, name)) as log:
        end = log.size()
        start = max(tail_offset(log, lines, end), end - limit)
        return log.pread(end - start, start).decode("utf-8", "backslashreplace")


# -- when its lines were written


def growth(job: int) -> Iterator[Tuple[float, str, int]]:
    """Yield the records of growth: (time by this node's clock, log, size), in order of time. Skips damaged lines.

    job: the descriptor of the job's directory.
    """
    for t, name, size in _records_of_logs(job, f"{OURS}/growth.jsonl"):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if int(size) >= 0:
                yield t, name, int(size)


def metrics(job: int, most: int = -1) -> Iterator[Tuple[float, str, Metrics]]:
    """Yield the recorded numbers of ranks: (time by this node's clock, log, numbers), in order of time for each log.

    most: only records in so many bytes at the end of the file, -1: all.
    """
    for t, name, row in _records_of_logs(job, METRICS, most):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            yield t, name, read(Metrics, row)


def _records_of_logs(job: int, name: str, most: int = -1) -> Iterator[Tuple[float, str, Any]]:
    """Yield (time, log, value) of the lines of a file of records; skip damaged lines. most: see metrics()."""
    try:
        fd = files.open_read(job, name)
    except OSError:  # there is no record, or it cannot be known
        return
    with open(fd, "rb") as file:
        if 0 <= most < os.fstat(fd).st_size:
            file.seek(-most, os.SEEK_END)
            file.readline()
        for line in file:
            # A line can be torn by a crash, or not ours.
            with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                t, log, value = json.loads(line)
                if 0 <= float(t) < _LATEST:
                    yield float(t), str(log), value


def sizes_at(job: int, t: float) -> Dict[str, RecordedSize]:
    """Map each log to its size in the last record before `t` (0 without one), and whether it has a record at `t` or later."""
    found: Dict[str, RecordedSize] = {}
    for at, name, size in growth(job):
        before = found.get(name, NO_RECORD).size
        found[name] = RecordedSize(size, False) if at < t else RecordedSize(before, True)
    return found


def offset_at(log: RankLog, recorded: RecordedSize, t: float) -> int:
    """Return the offset of the first line of a log that was completed at time `t` or later. recorded: its size at `t`.

    A record follows what it records by up to 0.5 s, so it counts more than the time of the last write. Nothing that is later is
    left out: where the records are coarse, some older lines follow.
    """
    if log.mtime() < t and not recorded.later:
        return line_start(log, log.size())
    return line_start(log, recorded.size) if recorded.size <= log.size() else 0  # else its program has truncated it
