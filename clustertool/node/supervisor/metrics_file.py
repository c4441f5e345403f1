"""This module writes METRICS_FILE, a text file that node_exporter reads (--collector.textfile.directory).

The supervisor of the coordinator's node writes it every 5 s while the job runs, and removes it at the end: the numbers of an
ended job are no present ones. A slow disk delays only the thread that writes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Mapping

from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import Metrics, prometheus_text
from clustertool.node.storage import files
from clustertool.node.storage.disk_worker import DiskWorker

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec
    from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink

_EVERY = 5.0  # seconds
_FAREWELL = 0.5


class MetricsFile:
    """The file of one job. Call turn() often, and close() once. Without METRICS_FILE both do nothing."""

    def __init__(self, spec: Spec) -> None:
        self._job, self._path = spec["job"], os.path.expanduser(spec.get("metrics_file", ""))
        self._writes = spec["node"] == spec["lead"]["node"]
        self._at = 0.0
        self._failed = False
        self._worker = DiskWorker()

    def turn(self, link: CoordinatorLink, own: Mapping[Key, Metrics]) -> None:
        """Give the numbers of this node's ranks to the link, for the coordinator; does not wait.

        On the coordinator's node, have the thread write those of all ranks if that is due and it is idle.
        """
        if not self._path:
            return
        link.metrics = own
        if self._writes and time.monotonic() >= self._at and not self._worker.waiting:
            self._at = time.monotonic() + _EVERY
            self._worker.put(self._write, {**link.other_metrics, **own})

    def close(self) -> None:
        """Have the thread remove the file, and end; wait up to 0.5 s for that."""
        self._worker.end(_FAREWELL, self._remove)

    def _write(self, numbers: Mapping[Key, Metrics]) -> None:
        """Write a new file, and rename it, so that nothing reads half of it; the first error goes to supervisor.err."""
        try:
            # node_exporter has another user.
            files.replace(self._path, prometheus_text(self._job, numbers).encode(), durable=False, mode=0o644)
        except OSError as error:
            if not self._failed:
                print(f"METRICS_FILE {self._path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            self._failed = True

    def _remove(self) -> None:
        """Remove the file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
