"""Handlers of requests about a process that joins a job on this node: start it, wait for its reports, end it.

The process is independent of this agent. Its reports are read as long as the agent lives; after that its records have the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, cast

from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import is_job_id
from clustertool.node.agent import detach, join_code
from clustertool.node.agent.leave_request import has_left
from clustertool.node.devices import nvml
from clustertool.node.jobs.queries import record_of
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, JoinAnswer, JoinReportLine, JoinReportsAnswer
    from clustertool.model.wire.agent_requests import JoinReportsRequest, JoinRequest
    from clustertool.node.agent.loop import Agent
    from clustertool.node.system.node_context import NodeContext

_LONGEST = 4 << 20  # bytes of one report
_MOST = 50  # reports in one answer
_SHOWN = 2000  # characters of what a process has written before it died
_END = 30.0  # seconds for a process that joins to take back what it has done
_POLL = 0.02
_FIELDS = {
    "type": str,
    "what": str,
    "fix": str,
    "kind": str,
    "why": str,
    "node": str,
    "job_dir": str,
    "code": int,
    "present": int,
    "nnodes": int,
}


class _Member:
    """A process that joins, as this agent has started it. log: what it writes to stderr until it is placed."""

    def __init__(self, started: detach.Detached, log: int) -> None:
        self.process = processes.identify(started.pid)
        self.pid, self._report, self._log = started.pid, started.report, log
        self._data = b""
        self.ended = False

    def reports(self, seconds: float) -> List[JoinReportLine]:
        """Return new reports, waited for until there is one. Raises InternalError where it has died without one."""
        until = time.monotonic() + seconds
        while b"\n" not in self._data and not self.ended:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._report], [], [], left)[0]:
                return []
            data = os.read(self._report, 1 << 16)
            self._data += data
            self.ended = not data or len(self._data) > _LONGEST
        lines = self._data.split(b"\n")
        found = [_line(line) for line in lines[:-1][:_MOST]]
        self._data = b"\n".join(lines[_MOST:]) if len(lines) > _MOST else lines[-1]
        return [one for one in found if one is not None]

    def output(self) -> str:
        """Read the end of what it has written to stderr."""
        size = os.lseek(self._log, 0, os.SEEK_END)
        return os.pread(self._log, _SHOWN, max(0, size - _SHOWN)).decode(errors="replace").strip()


_members: Dict[str, _Member] = {}  # of this agent, by job


def join(agent: Agent, request: JoinRequest) -> JoinAnswer:
    """Start a process that joins a job on this node, and becomes its supervisor, if none of this job runs here.

    Raises UsageError.
    """
    job = request["job"]
    if not is_job_id(job):
        raise UsageError(f"{job!r:.100} is no id of a job", "")
    place = join_code.place_of(agent, request["code"])
    if not place:
        return {"state": "needs code"}
    kept: List[int] = []
    with contextlib.suppress(NotFound):
        record = record_of(agent, job)
        if record.supervised():
            return {"state": "runs already"}
        if not request["again"] and _is_over(record):
            return {"state": "left"}
        lock = _lock(record.paths.dir)
        if lock is None:
            return {"state": "runs already"}
        kept.append(lock)
    nvml.end()  # with --devices auto, this agent has read the cards
    log, theirs = _memory(), _pipe_with(request["join"].encode())
    try:
        arguments = (place, theirs, agent.start.umask, kept)
        started = detach.begin("agent.join_code:become", arguments, log, (theirs, *kept))
    finally:
        for descriptor in (theirs, *kept):
            os.close(descriptor)
    _members[job] = _Member(started, log)
    return {"state": "started"}


def reports(context: NodeContext, request: JoinReportsRequest) -> JoinReportsAnswer:
    """Return what the process of a job has reported since the last request, waited for `seconds`.

    Raises NotFound, InternalError, NodeLost.
    """
    member = _member(request["job"])
    found = member.reports(request["seconds"])
    if member.ended and not found:
        raise detach.death(member.pid, "the process that joins the job", member.output())
    return {"reports": found}


def end(context: NodeContext, request: JoinReportsRequest) -> Answer:
    """End the process that this agent has started. Returns when it is gone. Raises NotFound, PreflightError."""
    process = _member(request["job"]).process
    if process is None:
        return {}
    processes.signal_one(process, signal.SIGTERM)
    until = time.monotonic() + _END
    while processes.alive(process):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
        if time.monotonic() > until:
            what = f"process {processes.describe(process)} joins the job and does not end"
            raise PreflightError(what, f"{PROGRAM} stop --job {request['job']} --force")
        time.sleep(_POLL)
    return {}


def _member(job: str) -> _Member:
    member = _members.get(job)
    if member is None:
        raise NotFound(f"this command has started no process of job {job} here", "")
    return member


def _is_over(record: Record) -> bool:
    """Check whether this node takes no part in the job any more: it was released, or the job has ended.

    A node that the others have lost may come back.
    """
    own = record.own()
    return has_left(record) or (own.ended is not None and own.ended.state is not JobState.LOST)


def _lock(job_dir: str) -> Optional[int]:
    """Lock the job's directory by a descriptor, which the process holds as long as it lives. None if another one has it.

    So two commands that start a lost node again at the same time start it once.
    """
    descriptor = files.open_job_dir(job_dir)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            return None  # other errors: a file system without locks
    return descriptor


def _pipe_with(data: bytes) -> int:
    """Create a pipe from which `data` is read. A thread writes it: a pipe has room for 64 KiB."""
    theirs, ours = os.pipe()

    def write() -> None:
        with contextlib.suppress(OSError), open(ours, "wb") as file:
            file.write(data)

    threading.Thread(target=write, daemon=True).start()
    return theirs


def _memory() -> int:
    """Create a file that no other process can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("clustertool-join")
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _line(text: bytes) -> Optional[JoinReportLine]:
    """Parse one report to the fields that the laptop reads. None for what is none."""
    with contextlib.suppress(ValueError):
        found: Mapping[str, object] = json.loads(text)
        known = {name: found[name] for name, kind in _FIELDS.items() if type(found.get(name)) is kind}
        if "type" in known:
            return cast("JoinReportLine", known)
    return None
