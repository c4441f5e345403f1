"""Handlers of requests about a process that joins a job on this node: its code, its start, its reports, and its end.

The process is independent of this agent. Its reports are read as long as the agent lives; after that its records have the rest.

Its code is that of an agent, and the modules that make plans, which other nodes do not need. The laptop sends these modules to
a node that does not have them. They lie with a copy of the agent's own code in a directory of ~/.cache/clustertool, as the
agent's code does, and the process is a new Python that imports from there.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Dict, List, Mapping, NoReturn, Optional, Sequence, cast

import clustertool
from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import is_job_id
from clustertool.node.agent import detach
from clustertool.node.agent.install import install
from clustertool.node.devices import nvml
from clustertool.node.jobs import supervisor_client
from clustertool.node.jobs.queries import record_of
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system import processes, users

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, JoinAnswer, JoinReportLine, JoinReportsAnswer, LeaveAnswer
    from clustertool.model.wire.agent_requests import JoinCodeRequest, JoinReportsRequest, JoinRequest, LeaveRequest
    from clustertool.model.wire.supervisor_messages import SupervisorRequest
    from clustertool.node.agent.loop import Agent
    from clustertool.node.system.node_context import NodeContext

_LONGEST = 4 << 20  # bytes of one report
_MOST = 50  # reports in one answer
_SHOWN = 2000  # characters of what a process has written before it died
_END = 30.0  # seconds for a process that joins to take back what it has done
_PATIENCE = 10.0  # seconds for a supervisor to accept the request to release this node
_POLL = 0.02
_LEAVE_POLL = 0.1
_CODE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
sys.path.append(sys.argv[1])
from clustertool.node.join.main import start_detached
start_detached(*map(int, sys.argv[2:]))"""
_TEXTS = ("type", "what", "fix", "kind", "why", "node", "job_dir")
_FIELDS = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(("code", "present", "nnodes"), int)}


def join(agent: Agent, request: JoinRequest) -> JoinAnswer:
    """Start a process that joins a job on this node and becomes its supervisor, if none of this job runs here.

    Returns the state: "started"; "needs code": keep_code() comes first; "runs already"; "left": this node takes no part any
    more, and the request has no `again`. Raises UsageError for an invalid id.
    """
    job = request["job"]
    if not is_job_id(job):
        raise UsageError(f"{job!r:.100} is no id of a job", "")
    place = _code_at(agent, request["code"])
    if not place:
        return {"state": "needs code"}
    kept: List[int] = []
    with contextlib.suppress(NotFound):
        record = record_of(agent, job)
        if record.supervised():
            return {"state": "runs already"}
        if not request["again"] and _is_over(record):
            return {"state": "left"}
        lock = _lock_job(record.paths.dir)
        if lock is None:
            return {"state": "runs already"}
        kept.append(lock)
    nvml.end()  # with --devices auto, this agent has read the cards
    log, theirs = _open_memory_file(), _pipe_with(request["join"].encode())
    try:
        arguments = (place, theirs, agent.start.umask, kept)
        started = detach.begin("agent.members:become", arguments, log, (theirs, *kept))
    finally:
        for descriptor in (theirs, *kept):
            os.close(descriptor)
    _members[job] = _Member(started, log)
    return {"state": "started"}


def _is_over(record: Record) -> bool:
    """Check whether this node takes no part in the job any more: it was released, or the job has ended.

    A node that the others have lost may come back.
    """
    own = record.own()
    return _has_left(record) or (own.ended is not None and own.ended.state is not JobState.LOST)


def _lock_job(job_dir: str) -> Optional[int]:
    """Lock the job's directory, and return a descriptor, which the process that joins keeps as long as it lives.

    None if another process has locked it: two commands that start a lost node again at the same time start it once. Without
    locks in the file system, a descriptor.
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
    """Create a pipe, and return the end from which `data` is read. A thread writes it: a pipe has room for 64 KiB."""
    theirs, ours = os.pipe()

    def write() -> None:
        with contextlib.suppress(OSError), open(ours, "wb") as file:
            file.write(data)

    threading.Thread(target=write, daemon=True).start()
    return theirs


def _open_memory_file() -> int:
    """Open a file in memory, which no other process can open; /dev/null where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("clustertool-join")
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def become(report: int, place: str, join: int, umask: int, kept: Sequence[int]) -> NoReturn:
    """Replace this detached process by a new Python that joins a job.

    join: a descriptor of the join file. kept: other descriptors that the new Python gets.
    """
    for descriptor in (report, join, *kept):
        os.set_inheritable(descriptor, True)
    numbers = map(str, (report, join, umask, *kept))
    os.execv(sys.executable, [sys.executable, "-ESs", "-c", _CODE, place, *numbers])


def _code_at(agent: Agent, digest: str) -> str:
    """Return the directory of this code, and set its time, since it is in use; "" if it is not complete there."""
    place = _code_place(digest)
    if not agent.start.complete(place):
        return ""
    with contextlib.suppress(OSError):
        os.utime(place)  # it is in use
    return place


def keep_code(agent: Agent, request: JoinCodeRequest) -> Answer:
    """Install the sent modules, with the agent's own code, in ~/.cache/clustertool.

    Raises PreflightError for damaged modules, and if that folder cannot be written, or other users can write to it.
    """
    try:
        parts = zlib.decompress(base64.b64decode(request["data"])).decode().split("\0")
    except (ValueError, zlib.error):
        raise PreflightError("the code of an elastic job arrived damaged", "run it again") from None
    texts = {**_own_code(), **dict(zip(parts[::2], parts[1::2]))}
    data = "\0".join(text for name in sorted(texts) for text in (name, texts[name])).encode()
    wanted = _code_place(request["digest"])
    try:
        place, end = install(data, request["digest"], wanted, agent.start.safe, agent.start.complete)
    except (OSError, ValueError) as error:
        raise PreflightError(f"the code of an elastic job cannot be installed: {error}", "run it again") from None
    if place != wanted:
        end()
        what = f"{os.path.dirname(wanted)} cannot be written, and the code of an elastic job is kept there"
        raise PreflightError(what, "let this user write to ~/.cache, and no other one")
    return {}


def _code_place(digest: str) -> str:
    """Return the path of the directory for the code with this digest, for the Python that runs."""
    tag = f"{sys.implementation.cache_tag}-{sys.hexversion:x}"
    return os.path.join(users.home() or "/", ".cache", "clustertool", f"{digest}.{tag}")


def _own_code() -> Dict[str, str]:
    """Read the modules of the agent's own code: {"clustertool/errors.py": text, ...}."""
    top = os.path.dirname(os.path.abspath(clustertool.__file__))
    found: Dict[str, str] = {}
    for folder, _, names in os.walk(top):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, encoding="utf-8") as file:
                    found[os.path.relpath(path, os.path.dirname(top))] = file.read()
    return found


def reports(context: NodeContext, request: JoinReportsRequest) -> JoinReportsAnswer:
    """Return what the process that joins has reported since the last request, after at most `seconds` of waiting.

    {reports: 50 at most}. Raises NotFound if this agent has started none for the job; InternalError or NodeLost if the process
    has died and nothing is left to return.
    """
    member = _member(request["job"])
    found = member.take_reports(request["seconds"])
    if member.ended and not found:
        raise detach.death(member.pid, "the process that joins the job", member.output())
    return {"reports": found}


def end(context: NodeContext, request: JoinReportsRequest) -> Answer:
    """Send SIGTERM to the process that this agent has started for a job, and wait until it is gone.

    Raises NotFound if it has started none, and PreflightError if the process still lives after 30 s.
    """
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
    """Return the process that this agent has started for a job. Raises NotFound if it has started none."""
    member = _members.get(job)
    if member is None:
        raise NotFound(f"this command has started no process of job {job} here", "")
    return member


class _Member:
    """A process that joins, as this agent has started it. log: what it writes to stderr until it is placed."""

    def __init__(self, started: detach.Detached, log: int) -> None:
        self.process = processes.identify(started.pid)
        self.pid, self._report, self._log = started.pid, started.report, log
        self._data = b""
        self.ended = False

    def take_reports(self, seconds: float) -> List[JoinReportLine]:
        """Return up to 50 new reports, after at most `seconds` of waiting for one.

        Sets `ended` when no more will come; those that have come are still returned by later calls. [] if none came.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._data and not self.ended:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._report], [], [], left)[0]:
                return []
            data = os.read(self._report, 1 << 16)
            self._data += data
            self.ended = not data or len(self._data) > _LONGEST
        lines = self._data.split(b"\n")
        found = [_parse_report(line) for line in lines[:-1][:_MOST]]
        self._data = b"\n".join(lines[_MOST:]) if len(lines) > _MOST else lines[-1]
        return [one for one in found if one is not None]

    def output(self) -> str:
        """Return the last 2000 characters that it has written to stderr."""
        size = os.lseek(self._log, 0, os.SEEK_END)
        return os.pread(self._log, _SHOWN, max(0, size - _SHOWN)).decode(errors="replace").strip()


_members: Dict[str, _Member] = {}  # of this agent, by job


def _parse_report(text: bytes) -> Optional[JoinReportLine]:
    """Parse a report, and return the fields that the laptop reads; None for a line that is no report."""
    with contextlib.suppress(ValueError):
        found: Mapping[str, object] = json.loads(text)
        known = {name: found[name] for name, kind in _FIELDS.items() if type(found.get(name)) is kind}
        if "type" in known:
            return cast("JoinReportLine", known)
    return None


def leave(context: NodeContext, request: LeaveRequest) -> LeaveAnswer:
    """Request this node's release from its supervisor, and wait for its end, at most `seconds`; answer whether it has left.

    Raises NotFound if the job does not run here, PreflightError if its supervisor does not answer, and UsageError if this node
    may not leave the job, or with a `code` coordinates it.
    """
    record, until = record_of(context, request["job"]), time.monotonic() + request["seconds"]
    key = record.key()
    if "code" in request and key is not None and key.coordinates:
        raise UsageError(f"this node coordinates job {record.job}", "stop the job")
    _release(record, request["by"], request.get("code", 0), until)
    while time.monotonic() < until:
        if not record.supervised():
            return {"left": _has_left(record)}
        time.sleep(_LEAVE_POLL)
    return {"left": False}


def _release(record: Record, by: str, code: int, until: float) -> None:
    """Send the supervisor the request to leave, again and again until it accepts.

    A coordinator between two epochs refuses it, so the next epoch is waited for until `until`. Raises NotFound after that, and
    if no supervisor lives; PreflightError if it does not answer for 10 s; UsageError if this node may not leave.
    """
    command = cast("SupervisorRequest", {"type": "leave", "by": by, "code": code})
    answered_at = time.monotonic()
    while True:
        if not record.supervised():
            fix = f"{PROGRAM} status --job {record.job} shows its nodes"
            raise NotFound(f"job {record.job} does not run here", fix)
        try:
            if supervisor_client.ask(record.paths, command, _PATIENCE) is not None:
                return
            if time.monotonic() - answered_at > _PATIENCE:  # it takes less where a supervisor follows the member
                what = f"the supervisor of job {record.job} does not answer"
                raise PreflightError(what, f"try again, or end the job: {PROGRAM} stop --job {record.job}")
        except NotFound:
            answered_at = time.monotonic()
            if answered_at > until:
                raise
        time.sleep(_LEAVE_POLL)


def _has_left(record: Record) -> bool:
    """Check whether the node was released, and has not joined again: `left` is later than the last event `supervisor`."""
    kinds = [event.get("type") for event in record.events() if event.get("type") in ("left", "supervisor")]
    return kinds[-1:] == ["left"]
