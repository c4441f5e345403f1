"""A follower reads one job's events and requested logs as they grow, and returns them in pieces of limited size."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional, Sequence, Tuple

from clustertool.errors import NotFound
from clustertool.model.paths import OURS
from clustertool.model.wire import record_lines
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import FollowRequest
    from clustertool.model.wire.event_types import Event
    from clustertool.model.wire.stream_messages import EndFrame, EventsFrame, LogFrame, StreamFrame

PIECE = 256 << 10
_CHECK_EVERY = 0.5
_PIECES = 8  # pieces handed on in one turn


class _Log:
    def __init__(self, fd: int, name: str, key: Tuple[str, int], attempt: int, offset: int) -> None:
        self.fd, self.name, self.key, self.attempt, self.offset = fd, name, key, attempt, offset


class Follower:
    """pieces() yields (header, payload) frames that are there now; `ended` once the job is over and all was read.

    request: logs "all" or [[role, rank], ...]; file: instead of logs, one file in log/; offsets {log name: bytes to skip};
    tail: lines from the end or null; follow: false reads what is there and ends; by_time: what is there comes in the order
    in which it was written, each piece with its time `t`.
    """

    def __init__(self, record: Record, request: FollowRequest) -> None:
        self._record = record
        self._job = files.open_job_dir(record.paths.dir)
        try:
            self._events = files.open_read(self._job, f"{OURS}/events.jsonl")
        except FileNotFoundError:
            os.close(self._job)
            raise NotFound(f"job {record.job} was never started here", "inv jobs lists the jobs") from None
        self._wanted = request.get("logs", [])
        self._offsets: Dict[str, int] = dict(request.get("offsets", {}))
        self._tail: Optional[int] = request.get("tail")
        self._follow = bool(request.get("follow", True))
        self._attempt: Optional[int] = request.get("attempt")
        self._events_at = 0
        self._rest = b""
        self._logs: Dict[str, _Log] = {}
        self._ordered: Optional[Iterator[Tuple[StreamFrame, bytes]]] = None
        self._by_time = bool(request.get("by_time"))
        self._over = self._gone = False
        self._check_at = 0.0
        self.ended = False
        self._skip(int(request.get("events_at", 0)))
        if request.get("file"):
            self._wanted = []
            self._open_file(str(request["file"]))

    def _skip(self, events_at: int) -> None:
        """The reader has had these events; we need them to know the logs."""
        for event in _events(os.pread(self._events, events_at, 0).split(b"\n")):
            self._open_logs(event)
        self._events_at = events_at

    def pieces(self) -> Iterator[Tuple[StreamFrame, bytes]]:
        last = not self._follow or self._orphaned()  # tested before the last read, which contains everything before
        yield from self._read_events()
        if self._by_time:
            self._ordered = self._ordered or self._in_order()
            found = list(itertools.islice(self._ordered, _PIECES))
            self._by_time = bool(found)  # what came after the last record of growth is read as ever
            yield from found
            return
        over = self._over or last
        idle = True
        for log in list(self._logs.values()):
            for piece in self._read_log(log):
                idle = False
                yield piece
        if over and idle:
            self.ended = True
            end: EndFrame = {"type": "end", "orphan": not self._over}
            yield end, b""

    def _read_events(self) -> Iterator[Tuple[StreamFrame, bytes]]:
        while True:
            data = os.pread(self._events, PIECE, self._events_at)
            if not data:
                return
            self._events_at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            events = _events(lines)
            for event in events:
                self._open_logs(event)
            at = self._events_at - len(self._rest)
            frame: EventsFrame = {"type": "events", "node": self._record.node, "events": events, "at": at}
            yield frame, b""

    def _open_logs(self, event: Event) -> None:
        if event["type"] == "ended":
            self._over = True
        if event["type"] in ("started", "exited"):  # a command that could not start has a log too
            key, attempt = (str(event["role"]), int(event["rank"])), int(event.get("attempt", 0))
            name = self._record.paths.log(*key, attempt)
            wanted = self._wanted == "all" or any(tuple(one) == key for one in self._wanted)
            if wanted and name not in self._logs and self._attempt in (None, attempt):
                self._open(name, key, attempt)

    def _open(self, name: str, key: Tuple[str, int], attempt: int) -> None:
        with contextlib.suppress(OSError):
            fd = files.open_read(self._job, name)
            offset = self._offsets.get(name, 0)
            if self._tail is not None and name not in self._offsets:
                offset = tail_offset(fd, self._tail)
            self._logs[name] = _Log(fd, name, key, attempt, offset)

    def _open_file(self, name: str) -> None:
        """A file that a program left in log/. Raises NotFound."""
        inside = name and not name.startswith("/") and ".." not in name.split("/")
        if inside:
            self._open(f"log/{name}", ("file", 0), 0)
        if not self._logs:
            self.close()
            raise NotFound(f"there is no log/{name} here", "inv logs --files lists what there is")

    def _read_log(self, log: _Log, most: int = PIECE) -> Iterator[Tuple[LogFrame, bytes]]:
        data = os.pread(log.fd, min(PIECE, most), log.offset)
        if data:
            header: LogFrame = {
                "type": "log",
                "node": self._record.node,
                "role": log.key[0],
                "rank": log.key[1],
                "attempt": log.attempt,
                "log": log.name,
                "off": log.offset,
            }
            log.offset += len(data)
            yield header, data

    def _in_order(self) -> Iterator[Tuple[StreamFrame, bytes]]:
        """Logs as they grew, by the supervisor's record of (time, log, size); times are the laptop's that started the job."""
        skew = float(self._record.header.get("skew", 0))
        try:
            fd = files.open_read(self._job, f"{OURS}/growth.jsonl")
        except OSError:  # nothing has grown, or it cannot be known
            return
        with open(fd, "rb") as growth:
            for line in growth:
                with contextlib.suppress(ValueError):
                    t, name, size = json.loads(line)
                    log = self._logs.get(name)
                    while log is not None and log.offset < size:
                        for header, data in self._read_log(log, size - log.offset):
                            yield {**header, "t": t - skew}, data

    def _orphaned(self) -> bool:
        """Supervisor and guard have ended without a last event: nothing more will come."""
        now = time.monotonic()
        if not self._gone and now >= self._check_at:
            self._check_at = now + _CHECK_EVERY
            caretakers = (self._record.process("supervisor"), self._record.process("guard"))
            self._gone = not any(process and processes.alive(process) for process in caretakers)
        return self._gone

    def close(self) -> None:
        for fd in [self._events, self._job, *(log.fd for log in self._logs.values())]:
            os.close(fd)


def _events(lines: Sequence[bytes]) -> List[Event]:
    return [event for event in map(record_lines.read_event, lines) if event is not None]


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
        while True:
            cut = block.rfind(b"\n")
            if cut < 0:
                break
            found += 1
            if found == lines:
                return at + cut + 1
            block = block[:cut]
    return 0


def last_lines(job: int, name: str, lines: int, limit: int = 64 << 10) -> bytes:
    """The end of a log: at most `lines` lines and `limit` bytes."""
    fd = files.open_read(job, name)
    try:
        start = max(tail_offset(fd, lines), os.fstat(fd).st_size - limit)
        return os.pread(fd, limit, start)
    finally:
        os.close(fd)
