"""Pods that have ended: their records are read from the last line of their logs, and the logs of ranks when they are wanted.

Where the log cannot be read, or has no such line, the termination message has the verdict.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from clustertool.engines.kubernetes.restored_records import RestoredRecords
from clustertool.errors import ClustertoolError, DataError, NotFound
from clustertool.model.config.hosts import Host
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.object_names import JobAbout
from clustertool.model.kubernetes.pod_reasons import PodView
from clustertool.model.kubernetes.pod_record import Stated
from clustertool.model.paths import node_of
from clustertool.model.wire.messages import CLEAN, LIST_JOBS, STATUS
from clustertool.ssh.parallel import each

_LOGS = 16  # that are read at a time
_OF_RECORDS = (LIST_JOBS.type, STATUS.type, CLEAN.type)  # requests that read no log of a rank
Place = tuple[str, int]  # a job, and one of its nodes


class LogReader(Protocol):
    """Of ClusterApi, what is used here."""

    def log(self, pod: str, *, tail: int | None = None) -> Iterator[bytes]: ...


class EndedPods:
    """places: which node of which job a pod is. failed: why the log of a pod cannot be read. May be used by several threads."""

    def __init__(self, api: LogReader) -> None:
        self._api = api
        self._records = RestoredRecords()
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}  # by pod
        self._wanted: set[str] = set()
        self._read: set[str] = set()  # pods whose records are here
        self._whole: set[str] = set()  # and their logs, too
        self._stated: dict[str, Stated] = {}  # by pod
        self.places: dict[str, Place] = {}
        self.failed: dict[str, ClustertoolError] = {}

    @property
    def root(self) -> Path:
        return self._records.root

    def close(self) -> None:
        self._records.close()

    def place(self, pod: str, job: str, node: int) -> None:
        self.places[pod] = job, node

    def add(self, pod: PodView, about: JobAbout) -> None:
        """Add a pod that has ended, for read()."""
        self._wanted.add(pod.name)
        self._stated[pod.name] = Stated(about)
        with contextlib.suppress(DataError):
            end = pod_record.read_message(pod.message)
            if (end.job, end.node) == self.places[pod.name]:
                self._stated[pod.name] = Stated(about, end, pod.ended_at or about.created)

    def has(self, pod: str) -> bool:
        return pod in self._read

    def read(self, check: Callable[[], None]) -> None:
        """Restore the records of those that are not there. A pod that is gone has none."""
        wanted = sorted(self._wanted - self._read)
        read = each(wanted, self.restore, width=_LOGS, check=check)
        for number, error in read.failed.items():
            if not isinstance(error, NotFound):
                self.failed[wanted[number]] = error

    def unreadable(self) -> dict[str, Host]:
        """Return the pods of which read() has failed, as hosts."""
        return {pod: Host(0, pod, name=pod) for pod in self.failed}

    def restore(self, pod: str) -> int:
        """Restore the records of a pod's node, and return its number. Raises what reading its log raises."""
        job, node = self.places[pod]
        with self._lock_of(pod):
            if pod not in self._read:
                stated = self._stated.get(pod)
                try:
                    found = self._records.restore(job, node, self._api.log(pod, tail=1), logs=False)
                    if found.end is None:  # it was killed: its log has what its ranks have printed
                        self._records.restore(job, node, self._api.log(pod), stated=stated)
                        self._whole.add(pod)
                except ClustertoolError:
                    if stated is None or stated.end is None:
                        raise
                    self._records.restore(job, node, (), logs=False, stated=stated)
                self._read.add(pod)
                self.failed.pop(pod, None)
        return node

    def need(self, base: str, kind: str, fields: Mapping[str, object]) -> None:
        """Restore the logs that a request reads, unless the pod is gone. base: of the node that it is about. kind: its type."""
        if kind in _OF_RECORDS:
            return
        place = str(fields.get("job")), node_of(base)
        for pod, of in list(self.places.items()):
            if of == place and pod in self._read:
                self._restore_logs(pod)

    def _restore_logs(self, pod: str) -> None:
        with self._lock_of(pod):
            if pod in self._whole:
                return
            self._whole.add(pod)
            try:
                self._records.restore(*self.places[pod], self._api.log(pod))
            except NotFound:
                return

    def _lock_of(self, pod: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(pod, threading.Lock())
