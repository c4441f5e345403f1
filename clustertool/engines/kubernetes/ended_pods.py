"""Pods that have ended: a watch keeps the reason of the cluster, and their records are restored from their logs.

A pod that was preempted is soon gone, and its reason with it. The records of its node come from the last line of its log, into
a private folder of this machine, and the logs of ranks when they are wanted; where the log cannot be read, or has no such line,
the termination message has the verdict. An agent there answers as the one in the pod would have: state, report, logs of the
ranks. The log is input of others, since programs of the job write to it: it decides what is in a file, and never where one is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.errors import ClustertoolError, DataError, NotFound
from clustertool.model.config.hosts import Host
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.api_objects import Object
from clustertool.model.kubernetes.object_names import JobAbout, job_hash, job_label
from clustertool.model.kubernetes.pod_reasons import PodFault, PodView, end_of, view
from clustertool.model.kubernetes.pod_record import LEDGER, MOST_LINE, PodEnd, PodRecord, Stated
from clustertool.model.paths import OURS, JobPaths, node_of
from clustertool.model.roles import ROLES
from clustertool.model.wire.messages import CLEAN, LIST_JOBS, STATUS
from clustertool.ssh.parallel import each

_PAUSE = 5.0  # seconds after the server has refused a watch
_LOGS = 16  # that are read at a time
_OF_RECORDS = (LIST_JOBS.type, STATUS.type, CLEAN.type)  # requests that read no log of a rank
Place = tuple[str, int]  # a job, and one of its nodes
_MOST_FILES = 4096  # logs of one node
_OPEN = 64  # files at a time
_MOST_BYTES = 8 << 30  # of all logs of one node
_CUT = b"[clustertool: what follows was not restored: the log of the pod is too large]\n"


class PodWatch:
    """A watch of pods, in a thread, which keeps why the cluster has ended them, or why they cannot start.

    The thread ends with the process or soon after close().
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._closed = threading.Event()
        self._started = False
        # Pods that explain the end of a job, by its hash and their names.
        self._views: dict[str, dict[str, PodView]] = {}
        self._stuck: dict[str, dict[str, PodView]] = {}  # those that have not started because of their images

    def start(self, labels: Mapping[str, str]) -> None:
        """Start a thread that watches the pods with these labels; do nothing if it was started before."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, args=(labels,), name="pod watch", daemon=True).start()

    def close(self) -> None:
        """Let the thread end after the next change of a pod."""
        self._closed.set()

    def cause(self, job: str) -> tuple[str, int] | None:
        """Return (why the cluster has ended pods of a job, the exit code for that), by the first view of each that explains it.

        Without such a view, the same of a pod that cannot start because of its image; None without that, too.
        """
        found = end_of(list(self._views.get(job_hash(job), {}).values()))
        waiting = list(self._stuck.get(job_hash(job), {}).values())
        if found is not None or not waiting:
            return found
        return f"pod {waiting[0].name}: {waiting[0].reason}", waiting[0].exit_code

    def take(self, pod: Object) -> None:
        """Keep the first view of a pod that the cluster has ended, or the view of one that cannot start because of its image.

        Forget the latter when that pod can start.
        """
        found, of_job = view(pod), job_label(pod)
        if found.fault is PodFault.IMAGE:
            self._stuck.setdefault(of_job, {})[found.name] = found
        elif not found.deleted and found.fault is PodFault.NONE:
            self._stuck.get(of_job, {}).pop(found.name, None)
        if end_of([found]) is not None:
            self._views.setdefault(of_job, {}).setdefault(found.name, found)

    def _run(self, labels: Mapping[str, str]) -> None:
        """Watch the pods until close(), and keep their views; start again 5 s after a refusal of the server."""
        while not self._closed.is_set():
            with contextlib.suppress(ClustertoolError):
                for kind, found in self._api.watch("Pod", labels):
                    if self._closed.is_set():
                        return
                    for pod in found["items"] if kind == "LISTED" else [found]:
                        self.take(pod)
            self._closed.wait(_PAUSE)


class EndedPods:
    """The pods that have ended, and their restored records. May be used by several threads.

    places: which node of which job a pod is, set by the engine. records: what was restored. failed: why the log of a pod cannot
    be read.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self.records = RestoredRecords()
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}  # by pod
        self._wanted: set[str] = set()
        self._read: set[str] = set()  # pods whose records are here
        self._whole: set[str] = set()  # and their logs, too
        self._stated: dict[str, Stated] = {}  # by pod
        self.places: dict[str, Place] = {}
        self.failed: dict[str, ClustertoolError] = {}

    def add(self, pod: PodView, about: JobAbout) -> None:
        """Add an ended pod for restore_all(), with its termination message if that is of its job and node."""
        self._wanted.add(pod.name)
        self._stated[pod.name] = Stated(about)
        with contextlib.suppress(DataError):
            end = pod_record.decode_message(pod.message)
            if (end.job, end.node) == self.places[pod.name]:
                self._stated[pod.name] = Stated(about, end, pod.ended_at or about.created)

    def has(self, pod: str) -> bool:
        """Return whether the records of a pod were restored."""
        return pod in self._read

    def restore_all(self, check: Callable[[], None]) -> None:
        """Restore the records of the added pods that were not restored yet, 16 at a time. Errors are put into `failed`.

        A pod that is gone has no error. check: is called meanwhile, and raises what ends the wait.
        """
        wanted = sorted(self._wanted - self._read)
        read = each(wanted, self.restore, width=_LOGS, check=check)
        for number, error in read.failed.items():
            if not isinstance(error, NotFound):
                self.failed[wanted[number]] = error

    def unreadable(self) -> dict[str, Host]:
        """Map the pods whose records could not be restored to hosts."""
        return {pod: Host(0, pod, name=pod) for pod in self.failed}

    def restore(self, pod: str) -> int:
        """Restore the records of a pod's node, if that was not done before, and return the number of the node.

        The last line of the log has them. Without that (the pod was killed) the whole log is read, and events are made of the
        termination message; of this alone, if the log cannot be read. Without such a message, raises the error of reading the
        log.
        """
        job, node = self.places[pod]
        with self._lock_of(pod):
            if pod not in self._read:
                stated = self._stated.get(pod)
                try:
                    found = self.records.restore(job, node, self._api.log(pod, tail=1), logs=False)
                    if found.end is None:  # it was killed: its log has what its ranks have printed
                        self.records.restore(job, node, self._api.log(pod), stated=stated)
                        self._whole.add(pod)
                except ClustertoolError:
                    if stated is None or stated.end is None:
                        raise
                    self.records.restore(job, node, (), logs=False, stated=stated)
                self._read.add(pod)
                self.failed.pop(pod, None)
        return node

    def restore_needed_logs(self, base: str, kind: str, fields: Mapping[str, object]) -> None:
        """Restore the logs of a node's ranks before a request that reads logs, once; nothing for other requests or a gone pod.

        base: the node's directory of jobs. kind, fields: the type of the request, and its fields, with the job.
        """
        if kind in _OF_RECORDS:
            return
        place = str(fields.get("job")), node_of(base)
        for pod, of in list(self.places.items()):
            if of == place and pod in self._read:
                self._restore_logs(pod)

    def _restore_logs(self, pod: str) -> None:
        """Restore the logs of the ranks in a pod from its log, once; nothing if the pod is gone.

        Raises other errors of reading the log; a later call reads it again then.
        """
        with self._lock_of(pod):
            if pod not in self._whole:
                with contextlib.suppress(NotFound):
                    self.records.restore(*self.places[pod], self._api.log(pod))
                self._whole.add(pod)

    def _lock_of(self, pod: str) -> threading.Lock:
        """Return the lock of a pod."""
        with self._lock:
            return self._locks.setdefault(pod, threading.Lock())


class RestoredNode(NamedTuple):
    """What was restored of a node. root: the folder of the node.

    end: None where the pod has left no record, as after SIGKILL. cut: names of logs of which the API server does not have all
    any more: a kubelet keeps the newest part of a log.
    """

    root: Path
    end: PodEnd | None
    cut: tuple[str, ...] = ()


class RestoredRecords:
    """The private folder with the restored records of nodes, which close() removes.

    May be used by several threads, each for its own nodes.
    """

    def __init__(self) -> None:
        """Make the folder, which only this user can read."""
        self._folder = tempfile.TemporaryDirectory(prefix="clustertool-pods-")  # has mode 0700

    @property
    def root(self) -> Path:
        """ROOT_DIR for an agent that answers for all nodes: each has its folder there (paths.is_base)."""
        return Path(self._folder.name)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def restore(
        self, job: str, node: int, log: Iterable[bytes], logs: bool = True, stated: Stated | None = None
    ) -> RestoredNode:
        """Write the records of a node from the log of its pod, and return what was found.

        Raises the errors of reading the log, and OSError if a file cannot be written. log: the log or its end, in pieces. logs:
        also write the logs of the ranks, and replace those there. stated: events are made of it if the log has no record. A pod
        that had not joined leaves nothing.
        """
        root = self.root / f"node{node}"
        paths = JobPaths(str(root), job)
        last = b""
        if logs:  # of an attempt that has failed
            shutil.rmtree(paths.of("log"), ignore_errors=True)
        with contextlib.closing(_RankLogs(paths)) as of_ranks:
            for line in split_lines(log):
                found = pod_record.decode_line(line)
                if found is None:
                    last = line if line.startswith(b"{") else last
                elif logs:
                    of_ranks.add(found)
        try:
            record: PodRecord | None = pod_record.decode(last)
        except DataError:
            record = None
        if record is not None and record.end.node < 0:
            return RestoredNode(root, record.end)
        for folder in (os.path.dirname(paths.ledger), paths.ours):
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(paths.of(OURS, "marker")).touch()
        if record is None or (record.end.job, record.end.node) != (job, node):
            if stated is not None:
                Path(paths.events).write_bytes(pod_record.stated_events(job, node, stated, of_ranks.ranks))
            return RestoredNode(root, None)
        for name, data in record.files.items():
            Path(paths.ledger if name == LEDGER else paths.of(OURS, name)).write_bytes(data)
        cut = tuple(name for name, size in record.logs if logs and of_ranks.sizes.get(name, 0) < size)
        return RestoredNode(root, record.end, cut)


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a log without their newlines. A line longer than MOST_LINE is left out, so that memory is bounded."""
    rest, skips = b"", False
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if not skips:
                yield line
            skips = False
        if len(rest) > MOST_LINE:
            rest, skips = b"", True
    if rest and not skips:
        yield rest


class _RankLogs:
    """The log files of the ranks of a node. sizes, ranks: bytes, and (role, rank, attempt), by the names of the files."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._open: dict[str, BinaryIO] = {}  # the last one used is the last
        self._left = _MOST_BYTES
        self.sizes: dict[str, int] = {}
        self.ranks: dict[str, tuple[str, int, int]] = {}

    def add(self, line: pod_record.PodLine) -> None:
        """Append a line to the file of its rank; drop it if the role is not known, or a limit of files or bytes is reached.

        In place of the line that exceeds the bytes, write a note.
        """
        if line.role not in ROLES or self._left <= 0:
            return
        name = self._paths.log(line.role, line.rank, line.attempt)
        if name not in self.sizes and len(self.sizes) >= _MOST_FILES:
            return
        self.ranks[name] = line.role, line.rank, line.attempt
        content = line.content
        self._left -= len(content)
        self._file(name).write(content if self._left > 0 else _CUT)
        self.sizes[name] = self.sizes.get(name, 0) + len(content)

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()

    def _file(self, name: str) -> BinaryIO:
        """Return the open file of a log; open it, and close another one if too many are open."""
        file = self._open.pop(name, None)
        if file is None:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
            path = Path(self._paths.of(name))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = path.open("ab")
        self._open[name] = file
        return file
