"""This module reads the records of a node's jobs from disk. The events files decide. Reading many records is fast."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, cast

from clustertool.errors import PreflightError
from clustertool.model.job import formats
from clustertool.model.job.node_status import NodePart, NodeRecord, record_of
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import OURS, JobPaths, is_job_id
from clustertool.model.wire import record_lines
from clustertool.node.jobs import ledger
from clustertool.node.storage import files
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import JobSummary
    from clustertool.model.wire.event_types import Event, JobHeader

_TAIL = 4096
_TEXTS = ("entry", "hostname", "name", "owner", "mode", "command")
_LATEST = 1e11  # seconds since the epoch; a time that is later was not written by us
_DAMAGED = "its records are damaged, so it is not known what runs"


class Key(NamedTuple):
    """By `mark` the job's processes are known in /proc; `leads`: its supervisor waits for other nodes."""

    mark: str
    leads: bool


class Record:
    """One job on this node. `header` is its first event; `trouble` is why its records cannot be used, or ""."""

    def __init__(self, base: str, job: str, header: JobHeader, trouble: Optional[PreflightError] = None) -> None:
        self.paths = JobPaths(base, job)
        self.job = job
        self.header = header
        self.trouble = trouble
        self._entry: Optional[ledger.Entry] = None

    @property
    def node(self) -> int:
        return self.header.get("node", 0)

    @property
    def entry(self) -> ledger.Entry:
        """What the ledger has of it; {} if nothing that can be used."""
        if self._entry is None:
            self._entry = ledger.read(self.paths)
            try:
                formats.require_known(self._entry, self.paths.ledger)
            except PreflightError as error:
                self.trouble, self._entry = self.trouble or error, {}
        return self._entry

    def events(self) -> List[Event]:
        """All of them; where a program has emptied or removed the file, what the ledger has of them comes first."""
        found: List[Event] = []
        with contextlib.suppress(OSError):
            with open(files.open_file(self.paths.events), "rb") as file:
                found = _parse(file.read())
        return found if any(event["type"] == "job" for event in found) else [*self._restored(), *found]

    def first_event(self) -> Event:
        return {**self.header, "t": self.header.get("created", 0.0), "type": "job"}

    def _restored(self) -> Iterator[Event]:
        entry = self.entry
        if "supervisor" in entry:
            t = self.header.get("created", 0.0)
            yield {**self.header, "t": t, "type": "job", "restored": True}
            for kind in ledger.CARETAKERS:
                process = ledger.process(entry, kind)
                if process:
                    about = {"t": t, "type": kind, "pid": process.pid, "start": process.start}
                    if kind == "supervisor":
                        about.update(boot=entry.get("boot", ""), space=entry.get("space", ""))
                    yield cast("Event", about)
            if isinstance(entry.get("ended"), dict):
                yield cast("Event", {**entry["ended"], "t": t, "type": "ended"})

    def own(self) -> NodeRecord:
        """What its events say of its supervisor and of its end."""
        return record_of(self.events())

    def last(self) -> NodeRecord:
        """The same of the file's tail, which is cheap to read, if the job has ended; else of all events."""
        with contextlib.suppress(OSError):
            with open(files.open_file(self.paths.events), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                found = record_of(_parse(file.read()))
                if found.ended is not None:
                    return found
        return self.own()

    def process(self, kind: str, own: Optional[NodeRecord] = None) -> Optional[processes.Process]:
        """The newest supervisor, guard or gauge, alive or not; None where another boot recorded it."""
        own = self.own() if own is None else own
        found = own.caretakers.get(kind)
        return processes.Process(*found) if found and _here(own.boot, own.space) else None

    def key(self) -> Optional[Key]:
        """The mark of its processes; None if neither the ledger nor spec.json has it."""
        with contextlib.suppress(KeyError):
            return Key(str(self.entry["mark"]), bool(self.entry["leads"]))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            with open(files.open_file(self.paths.spec), "rb") as file:
                spec = json.loads(file.read())
            return Key(str(spec["mark"]), spec["node"] == spec["lead"]["node"])
        return None

    def blank(self) -> bool:
        """Its directory was made and marked, and nothing else: it was placed by half, and cannot have started."""
        with contextlib.suppress(OSError):
            return not self.entry and os.listdir(self.paths.ours) == [files.MARKER]
        return False

    def other_machine(self) -> str:
        """The name of the other machine that it runs or ran on; "" if that was this one, or is unknown.

        A machine that was rebooted since then has its old name, or the same boot and process space.
        """
        name = str(self.header.get("hostname") or "")
        if name in ("", os.uname().nodename):
            return ""
        own = self.own()
        return "" if own.boot and _here(own.boot, own.space) else name

    def over(self) -> bool:
        """Whether its own records prove that nothing of it lives on the node that it was on."""
        return self.own().clean

    def unknown(self) -> str:
        """Why it is not known from here whether it runs; "" if it can be known."""
        if not self.trouble and self.over():
            return ""
        name = self.other_machine()
        if self.trouble:
            return self.trouble.what
        if name:
            return f"it runs (or ran) on {name}: ask there"
        return _DAMAGED if self.key() is None and not self.blank() and not self._rebooted() else ""

    def require_here(self) -> None:
        """Raise PreflightError for a job whose records grow on another machine."""
        why = self.unknown()
        if why:
            raise PreflightError(f"job {self.job}: {why}", "name that machine in HOSTS")

    def _rebooted(self) -> bool:
        """Nothing lives of a job that was started before this machine was."""
        own = self.own()
        return bool(own.boot) and not _here(own.boot, own.space)

    def summary(self) -> JobSummary:
        """For `inv jobs`: one line about this job as this node knows it."""
        return self._summary(self._part())

    def unreadable(self, reason: str) -> JobSummary:
        """The same of a job whose state cannot be read, and why."""
        return self._summary(NodePart(self.node, JobState.UNKNOWN, reason=reason))

    def _summary(self, part: NodePart) -> JobSummary:
        header = self.header
        return {
            "id": self.job,
            "node": self.node,
            "owner": header.get("owner"),
            "created": header.get("created"),
            "mode": header.get("mode"),
            "command": header.get("command"),
            "nodes": header.get("nodes"),
            "dir": self.paths.dir,
            "state": part.state,
            "code": part.code,
            "reason": part.reason,
            "start": part.start,
            "final": part.final,
        }

    def _part(self) -> NodePart:
        if self.trouble:
            return NodePart(self.node, JobState.UNKNOWN, reason=self.trouble.what)
        own = self.last()
        if own.ended is not None:
            if abs(own.ended.code) >= 1 << 31:
                raise ValueError(f"exit code {own.ended.code}")
            return own.part(self.node, False)._replace(reason=own.ended.reason[:_TAIL])
        supervisor = self.process("supervisor", own)
        alive = supervisor is not None and processes.alive(supervisor)
        return own.part(self.node, alive, "" if alive else self.unknown())


def _here(boot: str, space: str) -> bool:
    return boot == processes.boot_id() and space in ("", processes.space())


def _parse(data: bytes) -> List[Event]:
    events = (record_lines.read_event(line) for line in data.split(b"\n"))
    return [event for event in events if event is not None]


def find(root: str, entry: str, hostname: str, job: str = "") -> List[Record]:
    """Records of this node below ROOT_DIR, newest first; `entry` is how conf.py names this node, user@host:port.

    Other nodes may see the same ROOT_DIR: a node's own record is the one made for its entry, or else for its host name.
    Prefixes of job ids match.
    """
    own: List[Record] = []
    by_name: Dict[str, List[Record]] = {}
    for base, shared in _bases(root):
        for record in _records(base, job):
            if record.header.get("entry") == entry or not (shared or record.header.get("hostname")):
                own.append(record)
            elif record.header.get("hostname") == hostname:
                by_name.setdefault(record.job, []).append(record)
    have = {record.job for record in own}
    for name, records in by_name.items():
        if name not in have:
            own += records[:1]
    return sorted(own, key=lambda record: float(record.header["created"]), reverse=True)


def _bases(root: str) -> Iterator[Tuple[str, bool]]:
    yield root, False
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name.startswith("node") and name[4:].isdigit():
                yield os.path.join(root, name), True


def _records(base: str, job: str) -> Iterator[Record]:
    try:
        names = os.listdir(base)
    except FileNotFoundError:
        return
    except OSError as error:  # the file server does not answer: an empty list of jobs would be wrong
        fix = "check ROOT_DIR on that node: jobs may run there"
        raise PreflightError(f"the jobs below {base} cannot be read: {error.strerror}", fix) from None
    marked = {name[3:] for name in names if name.startswith("JOB" + job) and files.is_ours(os.path.join(base, name))}
    for name in filter(is_job_id, {*marked, *(name for name in ledger.jobs(base) if name.startswith(job))}):
        record = _record(base, name)
        if name in marked:
            yield record
        elif not _stale(record):
            files.mark_again(record.paths.dir)  # a program of the job has removed the tool's folder
            yield record


def _stale(record: Record) -> bool:
    """An entry of the ledger whose job directory was removed by hand, and without a living supervisor or guard. It is
    removed."""
    if os.path.lexists(record.paths.dir) or record.trouble or record.other_machine():
        return False
    known = [record.process(kind) for kind in ("supervisor", "guard")]
    key = record.key()
    if any(process and processes.alive(process) for process in known) or (key and processes.marked(key.mark)):
        return False
    with contextlib.suppress(OSError):
        ledger.remove(record.paths)
    return True


def _record(base: str, name: str) -> Record:
    """Its header is the first event, or the content of spec.json, the ledger, or else the directory itself."""
    paths = JobPaths(base, name)
    trouble = None
    header = _first_event(paths) or _planned(paths) or dict(ledger.read(paths).get("header", {}))
    try:
        formats.require_known(header, paths.events)
    except PreflightError as error:
        trouble = error
    return Record(base, name, _checked(header, paths), trouble)


def _first_event(paths: JobPaths) -> Mapping[str, object]:
    with contextlib.suppress(OSError):
        with open(files.open_file(paths.events), "rb") as file:
            for event in _parse(file.readline()):
                return cast("Mapping[str, object]", event) if event["type"] == "job" else {}
    return {}


def _planned(paths: JobPaths) -> Mapping[str, object]:
    """What will be the first event."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        with open(files.open_file(paths.spec), "rb") as file:
            return dict(json.loads(file.read())["header"])
    return {}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _TAIL


def _checked(found: Mapping[str, object], paths: JobPaths) -> JobHeader:
    """The same with its own name, and without what has not the type that it must have: the job's programs may have written it.

    A wrong value would make the node's whole answer invalid, and so hide its other jobs.
    """
    header = {key: value for key, value in found.items() if key not in _TEXTS or _is_text(value)}
    names = header.get("nodes")
    if not isinstance(names, list) or not all(_is_text(name) for name in names):
        header.pop("nodes", None)
    made = header.get("created")
    if isinstance(made, bool) or not isinstance(made, (int, float)) or not 0 <= made < _LATEST:
        made = 0.0
        for path in (paths.ledger, paths.dir):
            with contextlib.suppress(OSError):
                made = os.lstat(path).st_mtime
    node = header.get("node")
    number = node if type(node) is int and 0 <= node < 1e5 else 0
    return cast("JobHeader", {**header, "id": paths.job, "created": made, "node": number})


def record_loss(job: int, why: str) -> None:
    """Does not wait for the disk: the processes of the dead supervisor are still to be ended."""
    _append(job, "supervisor-lost", {"why": why}, durable=False)


def record_clean(job: int, survivors: List[str]) -> None:
    """The last event: it is on the disk when this returns."""
    _append(job, "clean", {"survivors": survivors}, durable=True)


def _append(job: int, type: str, fields: Mapping[str, object], durable: bool) -> None:
    with contextlib.suppress(OSError):
        journal = files.Journal(files.open_append(job, f"{OURS}/events.jsonl"))
        journal.write(record_lines.written_event(type, round(time.time(), 3), fields))
        journal.close(durable)
