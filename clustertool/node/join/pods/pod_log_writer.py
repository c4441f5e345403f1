"""This module writes the lines of all ranks of a pod to its stdout as they grow. model/kubernetes/pod_record.py has their form.

The log of a pod is read by the container runtime, which may be slow or stand still, so a thread writes it. Its memory has a
limit: of each log one piece, and the part of a line.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Dict, Iterator

from clustertool.errors import ClustertoolError
from clustertool.model.kubernetes.pod_record import PIECE, PodLine, encode_line
from clustertool.model.paths import JobPaths
from clustertool.node.jobs.follow import Follower
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.stream_messages import LogFrame

_POLL = 0.2  # seconds
_STDOUT = 1


class PodLogWriter:
    """A thread that writes the logs of all ranks to stdout, from now on. `done`: all is written, or nothing more can be."""

    def __init__(self, paths: JobPaths) -> None:
        """Start the thread."""
        self._paths = paths
        self._last = threading.Event()
        self._parts: Dict[str, PodLine] = {}  # by log: the line that is not complete
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Let the thread end when all is written, since no log grows any more."""
        self._last.set()

    def _run(self) -> None:
        """Write the logs of all ranks to stdout until finish() was called and nothing is left; at last the incomplete lines.

        An error ends that, with a message on stderr.
        """
        try:
            record = Record.read(self._paths.base, self._paths.job)
            follower = Follower(record, {"job": self._paths.job, "logs": "all", "follow": True})
            while not follower.ended:
                last = self._last.is_set()
                if not self._write_pieces(follower):
                    if last:
                        break
                    self._last.wait(_POLL)
            for line in self._parts.values():
                write_line(encode_line(line._replace(goes_on=True)))
        except (OSError, ClustertoolError) as error:  # the records are damaged, or stdout is closed
            with contextlib.suppress(OSError):
                sys.stderr.write(f"clustertool join: the logs are not shown any more: {error}\n")

    def _write_pieces(self, follower: Follower) -> bool:
        """Write the new pieces of all logs to stdout. Returns False if there are none."""
        found = False
        for header, payload in follower.pieces():
            if header["type"] == "log":
                found = True
                data = b"".join(encode_line(line) for line in self._split_lines(header, payload))
                files.write_all(_STDOUT, data)
        return found

    def _split_lines(self, about: LogFrame, data: bytes) -> Iterator[PodLine]:
        """Yield the lines that this piece of a log completes, and keep the rest.

        A long line is split, and marked as continued.
        """
        blank = PodLine(about["role"], about["rank"], about["attempt"], b"")
        part = self._parts.pop(about["log"], blank).text
        *whole, rest = (part + data).split(b"\n")
        for text in whole:
            for at in range(0, max(1, len(text)), PIECE):
                yield blank._replace(text=text[at : at + PIECE], goes_on=at + PIECE < len(text))
        while len(rest) > PIECE:
            yield blank._replace(text=rest[:PIECE], goes_on=True)
            rest = rest[PIECE:]
        if rest:
            self._parts[about["log"]] = blank._replace(text=rest)


def write_line(line: bytes) -> None:
    """Write a line, which ends with its newline, to stdout, and ignore errors: stdout may be closed."""
    with contextlib.suppress(OSError):
        files.write_all(_STDOUT, line)
