"""These functions decide which job has written a file, where several jobs have run in the same folder.

They compare the time at which the inode has changed (ctime): programs can set the other times of a file, but not this one.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence


class WriteSpan(NamedTuple):
    """The time in which a job could write, in ns by the clock of the folder's file system. end: None while it may run."""

    job: str
    start: int
    end: Optional[int]

    def has(self, time: int) -> bool:
        """Check whether the job could write at this time, in ns."""
        return self.start <= time and (self.end is None or time <= self.end)


class FileOrigin(NamedTuple):
    """Whose file it is. own: the job's. job: another one that changed it or, if it is the job's own, may have; "" for none.

    A file that is not the job's own and that no other job has changed since is older than the job.
    """

    own: bool
    job: str = ""


class SharedFile(NamedTuple):
    """A file that is not certain to be the job's alone. path: in the working directory. taken: it is fetched all the same."""

    path: str
    origin: FileOrigin
    taken: bool


def origin_of(changed: int, own: WriteSpan, others: Sequence[WriteSpan]) -> FileOrigin:
    """Decide whose file it is, by the time of its last change (ns). own, others: when the job and other jobs could write.

    It is the job's own if it was changed while the job could write, or later when no other job ran or had started: a user has
    moved it. Of several other jobs the newest one counts.
    """
    if changed < own.start:
        return FileOrigin(False)
    running = [other for other in others if other.has(changed)]
    if own.has(changed):
        return FileOrigin(True, max(running, key=_start).job if running else "")
    since = running or [other for other in others if own.start < other.start <= changed]
    return FileOrigin(False, max(since, key=_start).job) if since else FileOrigin(True)


def _start(span: WriteSpan) -> int:
    """Return the start of a span: the key by which max() finds the newest job."""
    return span.start
