"""This module copies the logs of a job to a folder of this machine, while they grow on the nodes.

    FOLDER/JOB<id>/workerlog.0      the bytes of the log
    FOLDER/workerlog.0              a link to it, made with its first byte

So what FOLDER shows is always of the newest job (node/storage/shown_logs.py). A mark in it keeps it out of workspaces.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from clustertool.errors import DataError
from clustertool.model.paths import LOGS_MARK, folder_of
from clustertool.node.storage import files, shown_logs


def prepare(folder: Path) -> None:
    """Make the folder, mark it as one of logs, and remove its links to logs of earlier jobs.

    A link in its place that clusterrun has made, for a job on this machine, is removed. Raises DataError if one of these fails.
    """
    try:
        if shown_logs.is_of_job(str(folder)):  # made by clusterrun for a job on this machine
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOGS_MARK).touch()
        shown_logs.clear(str(folder))
    except OSError as error:
        fix = "name a folder of yours: --log-dir DIR"
        raise DataError(f"logs cannot be written to {folder}: {error.strerror}", fix) from None


class LocalLogs:
    """The copy of a job's logs in `folder`, to which write() adds pieces. `failure`: why a piece was not written, "" at first.

    The parameter folder: that of --log-dir, which shows the logs by links (`shown`); None: ./JOB<id>/log, without links.
    """

    def __init__(self, job: str, folder: Path | None) -> None:
        self.shown = folder
        self.folder = folder / folder_of(job) if folder is not None else Path(folder_of(job)) / "log"
        self.failure = ""
        self.written: set[str] = set()  # names of logs

    def write(self, log: str, offset: int, data: bytes) -> None:
        """Write bytes of a log (JobPaths.log) at this offset; the first ones replace a file, and make the link in `shown`.

        An error is not raised, but described in `failure`.
        """
        name, first = log.partition("/")[2], log not in self.written
        path = self.folder / name
        try:
            if first:
                path.parent.mkdir(parents=True, exist_ok=True)
                if self.shown is None:
                    (self.folder.parent / LOGS_MARK).touch()
            fresh = os.O_TRUNC if first else 0  # an earlier job may have had this id
            with files.closing(os.open(path, os.O_WRONLY | os.O_CREAT | fresh, 0o644)) as fd:
                while data:
                    done = os.pwrite(fd, data, offset)
                    data, offset = data[done:], offset + done
            if first and self.shown is not None:
                top = name.partition("/")[0]
                with contextlib.suppress(FileExistsError):
                    (self.shown / top).symlink_to(os.path.join(self.folder.name, top))
            self.written.add(log)
        except OSError as error:
            self.failure = f"{path}: {error.strerror}"
