"""A follower reads one job's events and requested logs as they grow, and returns them in pieces of limited size."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Dict, Iterator, Optional, Tuple

from clustertool.errors import NotFound
from clustertool.model.hints import PROGRAM
from clustertool.model.job.node_status import NodeRecord
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.wire.record_lines import read_events
from clustertool.node.jobs import rank_log
from clustertool.node.jobs.rank_log import PIECE, RankLog, RecordedSize, tail_offset
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import FollowRequest
    from clustertool.model.wire.event_types import Event
    from clustertool.model.wire.stream_messages import EndFrame, EventsFrame, LogFrame, StreamFrame

_CHECK_EVERY = 0.5
_RESTORE, _POLL = 3.0, 0.05  # seconds
_REFRESH = 3.0  # the same for the record of another node, in a file system of the network
_MOST = 1 << 20  # bytes of events in one frame; less than its limit (model/wire/answers.py)
_PIECES = 8  # pieces handed on in one turn


class Follower:
    """A reader of one job's events and logs: pieces() yields the frames that are there now, `ended` is set after the last one.

    request: logs "all", a role or [[role, rank], ...]; file: instead of logs, one file in log/; offsets {log name: bytes to
    skip}; tail: lines from the end or null; since: only lines that were written at this time or later; follow: false reads what
    is there and ends; by_time: what is there comes in the order in which it was written. Each piece has then the time `t` at
    which it was written at the latest: see rank_log.py. What is not recorded yet has the time of the last write to the log.
    """

    def __init__(self, record: Record, request: FollowRequest) -> None:
        """Open the events, and the file of the request or the logs that the first `events_at` bytes of the events name.

        These events are read, not sent; pieces() opens the logs of later ones. Raises NotFound if the job has no directory
        here, was never started here, or has no such file.
        """
        self._record = record
        self._job = files.open_job_dir(record.paths.dir)
        self._events = self._open_events(time.monotonic() + _RESTORE)
        self._request = request
        self._rest = b""
        self._own = NodeRecord()  # of the events that were read
        self._skew = record.skew
        self._logs: Dict[str, Tuple[RankLog, LogFrame]] = {}  # the log, and the header of the next piece
        self._lost: Dict[str, LogFrame] = {}  # logs of ranks that were started, and are not there
        self._sizes: Dict[str, int] = {}  # without `follow`: a log that grows faster than it is read has an end, too
        self._ordered: Optional[Iterator[Tuple[StreamFrame, bytes]]] = None
        self._timed = self._by_time = bool(request.get("by_time"))
        self._since: Optional[float] = None  # by this node's clock
        self._before: Dict[str, RecordedSize] = {}  # of the logs then
        if request.get("since") is not None:
            # As times of lines are shown: the time that the request has taken to this node counts for nothing.
            self._since = request["since"] + self._skew
            self._before = rank_log.sizes_at(self._job, self._since)
        self._gone = False
        self._check_at = 0.0
        self.ended = False
        self._events_at = request.get("events_at", 0)
        for event in read_events(os.pread(self._events, self._events_at, 0).split(b"\n")):
            self._take_event(event)  # the reader has had these events; we need them to know the logs
        if request.get("file"):
            self._open_file(request["file"])

    def _open_events(self, until: float) -> int:
        """Open the file of events and return its descriptor. If a program has removed it, wait 3 s until it is put back.

        Raises NotFound after that, and at once for a job that was never started here.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):
                return files.open_read(self._job, f"{OURS}/events.jsonl")
            if not os.path.isdir(self._record.paths.kept) or time.monotonic() > until:
                os.close(self._job)
                fix = f"{PROGRAM} jobs lists the jobs"
                raise NotFound(f"job {self._record.job} was never started here", fix)
            time.sleep(_POLL)

    def pieces(self) -> Iterator[Tuple[StreamFrame, bytes]]:
        """Yield (frame, bytes) of new events and of the next piece of each log; at the end a frame "end", and set `ended`.

        With by_time, up to eight pieces in the order in which they were written, as far as that is recorded.
        """
        # Tested before the last read, which contains everything before.
        last = not self._request.get("follow", True) or self._orphaned()
        yield from self._read_events()
        yield from self._find_lost(last or self._own.ended is not None)
        if self._by_time:
            self._ordered = self._ordered or self._read_in_order()
            found = list(itertools.islice(self._ordered, _PIECES))
            self._by_time = bool(found)  # what came after the last record of growth is read as ever
            yield from found
            return
        over = self._own.ended is not None or last
        idle = True
        for log in list(self._logs.values()):
            for piece in self._read_log(*log):
                idle = False
                yield piece
        if over and idle and not (self._record.here or self._gone):
            self._refresh()
            self._gone = True  # there is one more turn
        elif over and idle:
            self.ended = True
            end: EndFrame = {"type": "end", "orphan": self._own.ended is None}
            yield end, b""

    def _find_lost(self, over: bool) -> Iterator[Tuple[StreamFrame, bytes]]:
        """Open logs that the supervisor has put back. If the job is over, yield a line for each one that stays removed."""
        for name, header in list(self._lost.items()):
            with contextlib.suppress(OSError):
                self._open_log(name, (header["role"], header["rank"]), header["attempt"])
            if over and name not in self._logs and name not in self._request.get("offsets", {}):
                yield header, f"clustertool: {name} was removed, and all that it had\n".encode()
            if over or name in self._logs:
                del self._lost[name]

    def _read_events(self) -> Iterator[Tuple[StreamFrame, bytes]]:
        """Yield frames of the events that are new, and open the logs of requested ranks that these events name.

        Events of a piece whose frame would be too large are dropped.
        """
        while True:
            data = os.pread(self._events, PIECE, self._events_at)
            if not data:
                return
            self._events_at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            events = read_events(lines)
            if len(self._rest) > _MOST or (sum(map(len, lines)) > PIECE and len(json.dumps(events)) > _MOST):
                events, self._rest = [], b""  # no supervisor writes such a line, and it would end the connection
            for event in events:
                self._take_event(event)
            at = self._events_at - len(self._rest)
            frame: EventsFrame = {"type": "events", "node": self._record.node, "events": events, "at": at}
            yield frame, b""

    def _take_event(self, event: Event) -> None:
        """Add an event to the record of the node; if it is of the start or exit of a requested rank, open the rank's log.

        A log that is not there is kept as lost.
        """
        self._own.take(event)
        if event["type"] in ("started", "exited"):  # a command that could not start has a log too
            key, attempt = (str(event["role"]), int(event["rank"])), int(event.get("attempt", 0))
            name = self._record.paths.log(*key, attempt)
            logs = [] if self._request.get("file") else self._request.get("logs", [])
            wanted = logs in ("all", key[0]) or any(tuple(one) == key for one in logs)
            if wanted and name not in self._logs and self._request.get("attempt") in (None, attempt):
                with contextlib.suppress(OSError):
                    try:
                        self._open_log(name, key, attempt)
                    except FileNotFoundError:
                        if event["type"] == "started":
                            self._lost[name] = self._log_header(name, key, attempt, 0)

    def _open_log(self, name: str, key: Tuple[str, int], attempt: int) -> None:
        """Open a log, seek to where the request begins, and add it to those that are read. Raises OSError.

        That is the request's offset for this log, else the later one of its tail and its time; the start if it has none of
        them.
        """
        offset, tail = self._request.get("offsets", {}).get(name), self._request.get("tail")
        log = RankLog(self._job, name, shown=key[0] == "file")
        size = log.size()  # once: a log that grows meanwhile would have more lines than `tail`
        if offset is None:
            offset = 0 if tail is None else tail_offset(log, tail, size)
            if self._since is not None:
                before = self._before.get(name, rank_log.NO_RECORD)
                offset = max(offset, rank_log.offset_at(log, before, self._since))
        log.seek(min(offset, size))
        self._logs[name] = log, self._log_header(name, key, attempt, offset)
        if not self._request.get("follow", True):
            self._sizes[name] = size

    def _log_header(self, name: str, key: Tuple[str, int], attempt: int, offset: int) -> LogFrame:
        """Build the header of a log's next piece, which begins at `offset`."""
        return {
            "type": "log",
            "node": self._record.node,
            "role": key[0],
            "rank": key[1],
            "attempt": attempt,
            "log": name,
            "off": offset,
        }

    def _open_file(self, name: str) -> None:
        """Open a file in log/ that a program has written. Raises NotFound, also for a name that leads out of log/."""
        if name and not name.startswith("/") and ".." not in name.split("/"):
            with contextlib.suppress(OSError):
                self._open_log(f"log/{name}", ("file", 0), 0)
        if not self._logs:
            self.close()
            fix = f"{PROGRAM} logs --job {self._record.job} --files lists what there is"
            raise NotFound(f"there is no log/{name} here", fix)

    def _read_log(self, log: RankLog, about: LogFrame, most: int = PIECE) -> Iterator[Tuple[LogFrame, bytes]]:
        """Yield the next piece of a log, if there is one, of at most `most` bytes, and move the offset in `about` on."""
        left = self._sizes.get(about["log"], sys.maxsize) - about["off"]
        data = log.read(max(0, min(PIECE, most, left)))
        if data:
            header: LogFrame = {**about}
            about["off"] += len(data)
            if self._timed:
                header["t"] = log.mtime() - self._skew
            yield header, data

    def _read_in_order(self) -> Iterator[Tuple[StreamFrame, bytes]]:
        """Yield pieces of the logs in the order in which they were written, as far as growth is recorded (time, log, size).

        Their times are those of the laptop that started the job.
        """
        for t, name, size in rank_log.growth(self._job):
            log = self._logs.get(name)
            at = -1  # a program that truncates its own log makes it shorter than the record says
            while log is not None and at < log[1]["off"] < size:
                at = log[1]["off"]
                for header, data in self._read_log(*log, size - log[1]["off"]):
                    yield {**header, "t": t - self._skew}, data

    def _orphaned(self) -> bool:
        """Check whether no event can follow: supervisor and guard have ended (Record.is_abandoned()). Once True, it stays True.

        Tests that each 0.5 s, or 3 s for the record of another node, whose files it refreshes; meanwhile returns the last
        result.
        """
        now = time.monotonic()
        if not self._gone and now >= self._check_at:
            self._check_at = now + (_CHECK_EVERY if self._record.here else _REFRESH)
            if not self._record.here:
                self._refresh()
            self._gone = self._record.is_abandoned(self._own)
        return self._gone

    def _refresh(self) -> None:
        """Open and close the files, so that a client of NFS asks its server for their sizes.

        It may take a file to be as short as it was a minute ago.
        """
        for name in (f"{OURS}/events.jsonl", *map(JobPaths.written, self._logs)):
            with contextlib.suppress(OSError):
                os.close(files.open_read(self._job, name))

    def close(self) -> None:
        """Close the logs, the events and the job's directory."""
        for log, _ in self._logs.values():
            log.close()
        for fd in (self._events, self._job):
            os.close(fd)
