"""The log keeper keeps what ranks print, whatever their programs do with files of the job's directory (decision 70).

.clustertool/log/workerlog.0      what the rank writes
.clustertool/log/workerlog.0.cut  what was there before the program truncated it (node/jobs/rank_log.py)
log/workerlog.0, log/train.log    copies for readers, until a program changes, replaces or removes them
ROOT_DIR/.clustertool/kept/JOB/   further names of the files of .clustertool, which a program may remove
"""

from __future__ import annotations

import contextlib
import os
from typing import Dict, Iterable, List

from clustertool.errors import PreflightError
from clustertool.model.paths import CUT, METRICS, OURS, JobPaths
from clustertool.node.jobs import ledger
from clustertool.node.jobs.rank_log import PIECE, TRUNCATED, RankLog
from clustertool.node.storage import files
from clustertool.node.storage.disk_worker import DiskWorker

_RECORDS = ("events.jsonl", "spec.json", "seen", "growth.jsonl", "usage.jsonl", "metrics.jsonl", "control")
_REPLACED = (f"{OURS}/growth.jsonl", f"{OURS}/usage.jsonl", METRICS)  # now and then by a shorter file
_PATIENCE = 10.0  # seconds that copies may take at the end
_END = 64  # bytes by which a copy is recognised


class ShownLog:
    """A copy of a log under a name that readers use. A file that was there before belongs to a program. Raises OSError."""

    def __init__(self, job: int, name: str) -> None:
        self._path = f"{files.path_of(job)}/{name}"
        self.fd = files.open_new(job, name)
        self.size, self._end, self._made = 0, b"", os.fstat(self.fd).st_mtime_ns

    def is_own(self) -> bool:
        """Check whether the file has the size, the end and the inode that this object gave it: no program has changed it."""
        with contextlib.suppress(OSError):
            about = os.fstat(self.fd)
            same = about.st_size == self.size and os.path.samestat(about, os.lstat(self._path))
            if same and self.size == 0:  # a program that truncates it changes its time only
                return about.st_mtime_ns == self._made
            return same and os.pread(self.fd, _END, self.size - len(self._end)) == self._end
        return False

    def grow(self, log: RankLog, size: int) -> None:
        """Append the bytes of `log` up to `size` that the copy lacks. If the disk is full, the next call continues."""
        with contextlib.suppress(OSError):
            while self.size < size:
                data = log.pread(min(PIECE, size - self.size), self.size)
                done = os.pwrite(self.fd, data, self.size)
                if not done:
                    return
                self.size, self._end = self.size + done, (self._end + data[:done])[-_END:]


class KeptLog:
    """The log `name` of a rank, its copies, and what it had before it was truncated."""

    def __init__(self, job: int, name: str, shown: Iterable[str]) -> None:
        """Open the log `name`, and create its copies `shown`, without those that exist already. Raises OSError for the log."""
        self.busy = False
        self._job, self._name = job, name
        self._log = RankLog(job, name)
        self._copies: List[ShownLog] = []
        for copy in shown:
            with contextlib.suppress(OSError):
                self._copies.append(ShownLog(job, copy))

    @property
    def base(self) -> int:
        """The number of bytes of the log that are not in its file any more."""
        return self._log.base

    def update(self) -> None:
        """Close copies that programs have changed, save what was truncated, and copy the log's new bytes. Ignores OSError."""
        self.busy = False
        with contextlib.suppress(OSError):
            for copy in [copy for copy in self._copies if not copy.is_own()]:
                self._copies.remove(copy)
                os.close(copy.fd)
            if self._log.truncated():
                self._save_truncated()
            size = self._log.size()
            for copy in self._copies:
                copy.grow(self._log, size)
            self._log.seek(size)

    def _save_truncated(self) -> None:
        """Append what the longest copy has to the .cut file, with a note about the first truncation. Raises OSError.

        The .cut file cannot be read meanwhile.
        """
        base = self._log.base
        with files.closing(files.open_append(self._job, JobPaths.written(self._name) + CUT)) as fd:
            os.fchmod(fd, 0o200)
            os.ftruncate(fd, base)  # an earlier call may have met a full disk
            best = max(self._copies, key=lambda copy: copy.size, default=None)
            at, data = base, b""
            while best is not None and at < best.size:
                data = os.pread(best.fd, min(PIECE, best.size - at), at)
                files.write_all(fd, data)
                at += len(data)
            if not base:
                files.write_all(fd, b"\n" * (data[-1:] not in (b"", b"\n")) + TRUNCATED)
            os.fchmod(fd, 0o600)
        self._log.refresh()

    def close(self) -> None:
        """Update the copies a last time, and close the log and its copies."""
        self.update()
        self._log.close()
        for copy in self._copies:
            os.close(copy.fd)


class LogKeeper:
    """The keeper of a job's logs and records on this node. A thread does the work: only open() and the last calls wait."""

    def __init__(self, job: int, paths: JobPaths) -> None:
        self._job, self._paths = job, paths
        self._worker = DiskWorker()
        self._logs: Dict[str, KeptLog] = {}
        self._records = {f"{OURS}/{name}": 0 for name in _RECORDS}  # and logs: the inode of the further name
        self._missing = False

    def open(self, name: str, *more: str) -> int:
        """Create a log, its copies for readers as `name` and `more`, and kept names of its files. Return its descriptor.

        Raises OSError if the log cannot be opened; a copy that cannot is left out.
        """
        written = JobPaths.written(name)
        fd = files.open_append(self._job, written)
        self._records.update({written: 0, written + CUT: 0})
        for record in [record for record, known in self._records.items() if not known]:
            self._add_kept_name(record)  # before the program runs
        with contextlib.suppress(OSError):  # readers have the log
            self._logs[name] = KeptLog(self._job, name, (name, *more))
        return fd

    def close_log(self, name: str) -> None:
        """Forget a log, since another attempt begins; update and close it in the thread, or here if that cannot start."""
        log = self._logs.pop(name, None)
        if log is not None and not self._worker.put(log.close):
            log.close()

    def base(self, name: str) -> int:
        """Return how many bytes of this log are not in its file any more, since it was truncated."""
        log = self._logs.get(name)
        return log.base if log is not None else 0

    def changed(self, name: str) -> bool:
        """Have the thread copy the log's new bytes. Return False if the change has to be reported again: the thread is busy.

        True also for a log that is not kept.
        """
        log = self._logs.get(name)
        if log is None or log.busy:
            return log is None
        log.busy = True
        if self._worker.put(log.update):
            return True
        log.busy = False
        return False

    def check(self) -> None:
        """Have the thread put back the records that a program has removed, unless its queue is long."""
        if self._worker.waiting < len(self._logs) + 1:
            self._worker.put(self._restore_removed)

    def finish(self) -> None:
        """Update and close all logs, and wait up to 10 s for the thread to end: no program runs any more."""
        for log in self._logs.values():
            if not self._worker.put(log.close):
                log.close()
        self._worker.end(_PATIENCE)

    def end(self) -> None:
        """Put back removed files at once, except the control socket, and remove the kept names."""
        self._records.pop(f"{OURS}/control")
        self._missing = True
        self._restore_removed()
        ledger.remove_kept(self._paths)

    def _restore_removed(self) -> None:
        """Link the files that are missing at two calls in turn to their names again, if the ledger has the job."""
        lost = [name for name in list(self._records) if not self._add_kept_name(name) and self._records[name]]
        # At two calls: the program does not remove them just now. Without the entry of the ledger the job ends.
        if lost and self._missing and os.path.exists(self._paths.ledger):
            for name in reversed(lost):  # the events last: readers begin with them
                with contextlib.suppress(OSError):
                    os.makedirs(os.path.dirname(self._path(name)), mode=0o700, exist_ok=True)
                    os.link(self._kept_path(name), self._path(name))
            files.mark_again(self._paths.dir)
        self._missing = bool(lost)

    def _add_kept_name(self, name: str) -> bool:
        """Link a file to its name in the kept folder, if it has none, or if a record was replaced by a newer file.

        Returns whether the file exists under its own name.
        """
        with contextlib.suppress(OSError, PreflightError):
            found = os.lstat(self._path(name)).st_ino
            replaced = name in _REPLACED and found != self._records[name]
            if replaced or not self._records[name]:
                if not os.path.isdir(self._paths.kept):
                    files.make_dir(self._paths.base, OURS, "kept", self._paths.job)
                part = self._kept_path(name) + ".part"
                os.link(self._path(name), part, follow_symlinks=False)
                os.rename(part, self._kept_path(name))
                self._records[name] = found
            return True
        return False

    def _path(self, name: str) -> str:
        """Return the path of a file of the job by the descriptor of the job's directory."""
        return f"{files.path_of(self._job)}/{name}"

    def _kept_path(self, name: str) -> str:
        """Return the path of a file's further name in the kept folder."""
        return os.path.join(self._paths.kept, name.replace("/", "+"))
