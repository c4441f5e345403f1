"""The records of a node whose pod has ended are restored from the log of the pod in a private folder of this machine.

An agent there answers as the one in the pod would have: state, report, logs of the ranks. The log is input of others, since
programs of the job write to it: it decides what is in a file, and never where one is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from clustertool.errors import DataError
from clustertool.model.kubernetes import pod_log, pod_record
from clustertool.model.kubernetes.pod_record import LEDGER, MOST_LINE, PodEnd, PodRecord, Stated
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.roles import ROLES

_MOST_FILES = 4096  # logs of one node
_OPEN = 64  # files at a time
_MOST_BYTES = 8 << 30  # of all logs of one node
_CUT = b"[clustertool: what follows was not restored: the log of the pod is too large]\n"


class RestoredNode(NamedTuple):
    """root: the folder of the node.

    end: None where the pod has left no record, as after SIGKILL. cut: names of logs of which the API server does not have all
    any more: a kubelet keeps the newest part of a log.
    """

    root: Path
    end: PodEnd | None
    cut: tuple[str, ...] = ()


class RestoredRecords:
    """The folder is removed by close(). May be used by several threads, each for its own nodes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="clustertool-pods-")  # has mode 0700

    @property
    def root(self) -> Path:
        """ROOT_DIR for an agent that answers for all nodes: each has its folder there (paths.is_base)."""
        return Path(self._folder.name)

    def close(self) -> None:
        self._folder.cleanup()

    def restore(
        self, job: str, node: int, log: Iterable[bytes], logs: bool = True, stated: Stated | None = None
    ) -> RestoredNode:
        """Write the records of a node, and return what was found. Raises what reading the log raises, OSError.

        log: of its pod, or its end, in pieces. logs: restore those of the ranks, too. stated: makes events where the log has no
        record. A pod that had not joined leaves nothing.
        """
        root = self.root / f"node{node}"
        paths = JobPaths(str(root), job)
        last = b""
        of_ranks = _RankLogs(paths)
        if logs:  # of an attempt that has failed
            shutil.rmtree(paths.of("log"), ignore_errors=True)
        try:
            for line in lines(log):
                found = pod_log.read_line(line)
                if found is None:
                    last = line if line.startswith(b"{") else last
                elif logs:
                    of_ranks.add(found)
        finally:
            of_ranks.close()
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


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines without their newlines. What is longer than any line of a pod is left out; memory is bounded."""
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
    """Writes the lines of ranks to their files. By the names of the files: sizes, in bytes, and role, rank and attempt."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._open: dict[str, BinaryIO] = {}  # the last one used is the last
        self._left = _MOST_BYTES
        self.sizes: dict[str, int] = {}
        self.ranks: dict[str, tuple[str, int, int]] = {}

    def add(self, line: pod_log.PodLine) -> None:
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
        for file in self._open.values():
            file.close()

    def _file(self, name: str) -> BinaryIO:
        file = self._open.pop(name, None)
        if file is None:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
            path = Path(self._paths.of(name))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = path.open("ab")
        self._open[name] = file
        return file
