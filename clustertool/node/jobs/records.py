"""This module reads the records of a node's jobs from disk, and those of other nodes on a shared directory.

The events files decide. Reading many records is fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, Container, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, cast

from clustertool.errors import NotFound, PreflightError
from clustertool.model.job import formats
from clustertool.model.job.caretakers import CaretakerRecord
from clustertool.model.job.job_names import can_mean
from clustertool.model.job.node_status import NodePart, NodeRecord, record_of
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import OURS, JobPaths, is_base, node_of
from clustertool.model.wire.record_lines import known_skew, read_events, written_event
from clustertool.node.jobs import ledger
from clustertool.node.jobs.job_processes import JobProcesses, recorded_here
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import BasesAnswer, JobSummary
    from clustertool.model.wire.agent_requests import NoFields
    from clustertool.model.wire.event_types import JobHeader
    from clustertool.model.wire.spec_types import RuntimeSpec

_TAIL = 4096
_TEXTS = ("entry", "hostname", "name", "owner", "mode", "command", "asked", "job_name", "workspace")
_LATEST = 1e11  # seconds since the epoch; a time that is later was not written by us
_DAMAGED = "its records are damaged, so it is not known what runs"


# By `mark` the job's processes are known in /proc; `coordinates`: its supervisor waits for other nodes.
Key = NamedTuple("Key", [("mark", str), ("coordinates", bool)])
_RECENT = 60.0  # seconds; a client of NFS may have attributes of a file that are as old as this
_PROOF = "ask the engine whether the job has ended"


class Record(JobProcesses):
    """One job on this node. `header` is its first event; `trouble` is why its records cannot be used, or None.

    here: its processes are, or were, processes of this machine. See SharedRecord for others.
    """

    here = True

    @classmethod
    def read(cls, base: str, job: str) -> Record:
        """Read the header of a job, and build its record. An unknown format becomes the record's `trouble`.

        The header is the first event, else that of spec.json, else of the ledger, else {}. For an elastic job that of the
        ledger comes first: a later epoch may have other nodes.
        """
        paths = JobPaths(base, job)
        trouble = None
        header: Mapping[str, object] = _first_event(paths) or _planned_header(paths)
        header = header or ledger.read(paths).get("header", {})
        if "lead" in header:  # of an elastic job: a later epoch may have other nodes
            header = ledger.read(paths).get("header") or header
        try:
            formats.require_known(header, paths.events)
        except PreflightError as error:
            trouble = error
        return cls(base, job, _checked_header(header, paths), trouble)

    @property
    def node(self) -> int:
        """The index of this node in the job; 0 if it is not known."""
        return self.header.get("node", 0)

    @property
    def asked(self) -> str:
        """The id of --job-id, "" if the tool has made the id."""
        return self.header.get("asked", "")

    @property
    def name(self) -> str:
        """The job's name, "" if it has none."""
        return self.header.get("job_name", "")

    @property
    def output(self) -> str:
        """The path of the folder of its output; below the job's directory, whatever the header has."""
        name = self.header.get("output", "")
        parts = name.split("/") if isinstance(name, str) else [""]
        inside = not any(part in ("", ".", "..") or "\0" in part for part in parts)
        return self.paths.of(name if inside else "output")

    def called(self, text: str) -> bool:
        """Check whether a user who writes `text` can mean this job, by its id, --job-id or name."""
        return can_mean(text, self.job, self.asked, self.name)

    def own(self) -> NodeRecord:
        """Read all events, and fold them to the record of this node."""
        return record_of(self.events())

    def size(self) -> int:
        """Return the size of the file of events in bytes, 0 without one: if it is the same, no event was added."""
        with contextlib.suppress(OSError):
            return os.stat(self.paths.events).st_size
        return 0

    def last(self) -> NodeRecord:
        """Fold only the last 4096 bytes of the events, which is cheap, if the end of the job is in them; else all events."""
        with contextlib.suppress(OSError), open(files.open_file(self.paths.events), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            found = record_of(read_events(file.read().split(b"\n")))
            if found.ended is not None:
                return found
        return self.own()

    def supervised(self, own: Optional[NodeRecord] = None) -> bool:
        """Check whether its supervisor lives. own: the record that own() has read, if any."""
        return self.caretakers(own, ("supervisor",)) != []

    def heartbeat(self) -> Optional[float]:
        """Return the seconds since its supervisor's last heartbeat; None if there was none."""
        with contextlib.suppress(OSError):
            return round(max(0.0, time.time() - os.stat(self.paths.control).st_mtime), 1)
        return None

    def key(self) -> Optional[Key]:
        """Read the mark of its processes, and whether its node coordinates; None if neither ledger nor spec.json has it."""
        with contextlib.suppress(KeyError):
            return Key(str(self.entry["mark"]), bool(self.entry["leads"]))
        with contextlib.suppress(KeyError, TypeError):
            spec = _read_spec(self.paths)
            return Key(str(spec["mark"]), spec["node"] == spec["lead"]["node"])
        return None

    def container(self) -> Optional[RuntimeSpec]:
        """Read the runtime and its program of the job's containers; None if its ranks ran in none, or this is damaged."""
        found = self.entry.get("container") or _read_spec(self.paths).get("container") or {}
        with contextlib.suppress(KeyError, TypeError):
            runtime, program = str(found["runtime"]), str(found["program"])
            return {"runtime": runtime, "program": program} if program.startswith("/") else None
        return None

    def blank(self) -> bool:
        """Check whether its directory has only the marker: the job was half placed, and cannot have started."""
        with contextlib.suppress(OSError):
            return not self.entry and os.listdir(self.paths.ours) == [files.MARKER]
        return False

    def other_machine(self) -> str:
        """Return the name of the other machine that it runs or ran on; "" if that was this one, or is unknown.

        This machine is known by its name or, if that has changed, by the boot and process space of the record.
        """
        name = str(self.header.get("hostname") or "")
        if name in ("", os.uname().nodename):
            return ""
        own = self.own()
        return "" if own.boot and recorded_here(own.boot, own.space) else name

    def unknown(self) -> str:
        """Describe why it cannot be known from here whether the job runs; "" if it can, and after the event "clean".

        Reasons: trouble with the records, another machine, or damaged records without a mark.
        """
        if not self.trouble and self.own().clean:
            return ""
        name = self.other_machine()
        if self.trouble:
            return self.trouble.what
        if name:
            return f"it runs (or ran) on {name}: ask there"
        return _DAMAGED if self.key() is None and not self.blank() and not self._rebooted() else ""

    def is_abandoned(self, own: NodeRecord) -> bool:
        """Check whether supervisor and guard have ended, so that no event will follow.

        own: the fold of the events that the caller has read: a program may have removed the file since.
        """
        return not (self.caretakers(own) or self.caretakers())

    def require_followed(self) -> None:
        """Raise PreflightError for a job of which it cannot be known whether it runs: see unknown()."""
        why = self.unknown()
        if why:
            raise PreflightError(f"job {self.job}: {why}", "name that machine in HOSTS")

    def _rebooted(self) -> bool:
        """Check whether the job was started in another boot or process space, so that nothing of it lives here."""
        own = self.own()
        return bool(own.boot) and not recorded_here(own.boot, own.space)

    def summary(self, part: NodePart) -> JobSummary:
        """Build the fields of this job for the list of jobs, from its header and `part`."""
        header = self.header
        return {
            "id": self.job,
            "asked": self.asked,
            "name": self.name,
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
            "started": self._by_laptop(header.get("t")),  # of the first event: the supervisor wrote it when it started
            "ended": self._by_laptop(part.ended),
            "elastic": "lead" in header,
        }

    def _by_laptop(self, t: object) -> Optional[float]:
        """Convert a recorded time to the laptop's clock; None for what is no time: the job's programs may have written it."""
        if not isinstance(t, (int, float)):
            return None
        return t - self.skew if abs(self.skew) < t < _LATEST else None

    @property
    def skew(self) -> float:
        """Seconds by which this node's clock was ahead of the laptop's; 0 if that is not known."""
        return known_skew(self.header)

    def part(self) -> NodePart:
        """Compute the state of the node's part of the job, UNKNOWN if its records cannot be used.

        Raises ValueError for an exit code out of range.
        """
        if self.trouble:
            return NodePart(self.node, JobState.UNKNOWN, reason=self.trouble.what)
        own = self.last()
        if own.ended is not None:
            if abs(own.ended.code) >= 1 << 31:
                raise ValueError(f"exit code {own.ended.code}")
            return own.part_of(self.node, False)._replace(reason=own.ended.reason[:_TAIL])
        alive = self.supervised(own)
        return own.part_of(self.node, alive, "" if alive else self.unknown())


def find(root: str, entry: str, hostname: str, job: str = "", exact: bool = False) -> List[Record]:
    """Find the records of this node below ROOT_DIR, newest first. entry: how conf.py names this node, user@host:port.

    Other nodes may see the same ROOT_DIR: a node's own record is the one made for its entry, or else for its host name, or in
    ROOT_DIR itself for none. root: ROOT_DIR. hostname: of this node. job: what a user calls the jobs (see can_mean()), "" for
    all; exact: an id. Removes stale entries of the ledger, and restores markers.
    """
    own: List[Record] = []
    by_name: Dict[str, Record] = {}
    for base, shared in bases(root):
        for record in _read_records(base, job if exact else ""):
            if not exact and not record.called(job):
                continue
            if record.header.get("entry") == entry or not (shared or record.header.get("hostname")):
                own.append(record)
            elif record.header.get("hostname") == hostname:
                by_name.setdefault(record.job, record)
    have = {record.job for record in own}
    own += [record for name, record in by_name.items() if name not in have]
    return sorted(own, key=lambda record: float(record.header["created"]), reverse=True)


def bases(root: str) -> Iterator[Tuple[str, bool]]:
    """Yield ROOT_DIR and False, then the folder of each node that shares it and True: the folders with records of jobs."""
    yield root, False
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name.startswith("node") and name[4:].isdigit():
                yield os.path.join(root, name), True


def _read_records(base: str, job: str) -> Iterator[Record]:
    """Yield the record of a job below a base, or of all for "".

    Removes stale entries of the ledger. If a program has removed the tool's folder of a job, restores its marker.
    """
    for name, marked in ledger.find_jobs(base, job).items():
        record = Record.read(base, name)
        if marked:
            yield record
        elif not _remove_stale(record):
            files.mark_again(record.paths.dir)  # a program of the job has removed the tool's folder
            yield record


def _remove_stale(record: Record) -> bool:
    """Remove the ledger's entry of a job whose directory was removed by hand, and of which nothing lives.

    Returns whether the entry is stale.
    """
    if os.path.lexists(record.paths.dir) or record.trouble or record.other_machine():
        return False
    key = record.key()
    if record.caretakers() or (key and processes.find_marked(key.mark)):
        return False
    with contextlib.suppress(OSError):
        ledger.remove(record.paths)
    return True


def _first_event(paths: JobPaths) -> Mapping[str, object]:
    """Read the first event of a job, if it is of type "job"; else {}."""
    with contextlib.suppress(OSError), open(files.open_file(paths.events), "rb") as file:
        for event in read_events([file.readline()]):
            return cast("Mapping[str, object]", event) if event["type"] == "job" else {}
    return {}


def _read_spec(paths: JobPaths) -> Mapping[str, Any]:
    """Read spec.json; {} if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(files.read_file(paths.spec))
        return found if isinstance(found, dict) else {}
    return {}


def _planned_header(paths: JobPaths) -> Mapping[str, object]:
    """Read the header in spec.json, which becomes the first event; {} if there is none."""
    header = _read_spec(paths).get("header")
    return header if isinstance(header, dict) else {}


def _is_text(value: object) -> bool:
    """Check whether a value is a text of at most 4096 characters."""
    return isinstance(value, str) and len(value) <= _TAIL


def _checked_header(found: Mapping[str, object], paths: JobPaths) -> JobHeader:
    """Copy a header without fields of a wrong type, and set id, time of creation and node.

    Without a valid time it is that of the directory, else of the ledger's entry, else 0; without a valid node 0. The job's
    programs may have written it, and a wrong value would make the node's whole answer invalid, and so hide its other jobs.
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


def record_loss(job: int, why: str, make: bool = True) -> None:
    """Append the event that the supervisor was lost, and why, without waiting for the disk. make: see record_clean().

    The processes of the dead supervisor are still to be ended.
    """
    append_event(job, "supervisor-lost", {"why": why}, make, durable=False)


def record_clean(job: int, survivors: List[str], make: bool = True) -> None:
    """Append the last event, "clean", with the survivors: it is on the disk when this returns. Ignores OSError.

    make: create the file of the events if it is missing. A guard does not: its supervisor made the file, so where it is
    missing, the job that never started is being removed at this moment, and a new file would keep its directory.
    """
    append_event(job, "clean", {"survivors": survivors}, make, durable=True)


def append_event(job: int, type: str, fields: Mapping[str, object], make: bool, durable: bool) -> None:
    """Append an event to the file of events. Ignores OSError.

    make: see record_clean(). durable: it is on the disk before this returns.
    """
    with contextlib.suppress(OSError):
        journal = files.Journal(files.open_append(job, f"{OURS}/events.jsonl", make))
        journal.write(written_event(type, round(time.time(), 3), fields))
        journal.close(durable)


class SharedRecord(Record):
    """The record of a job on another node, on a shared directory, for an engine without an agent on each node.

    A base is the folder of a node in a shared ROOT_DIR, by its name: node0, node1, ... (model/paths.base). "" is ROOT_DIR
    itself, where the nodes that do not share it, or the only node of a job, have their jobs. Whatever host name a record below
    a base has, its processes are not of this machine. So no pid in it is used, and nothing is signalled. Only files show
    whether its supervisor lives: the outcome, the guard's last event, or a recent heartbeat. If none of these is there, that
    is not known, and the engine has to be asked.
    """

    here = False

    def process(self, kind: str, own: Optional[CaretakerRecord] = None) -> Optional[Process]:
        """Return None: a process of this machine with the same pid is another one."""
        return None

    def supervised(self, own: Optional[NodeRecord] = None) -> bool:
        """Check whether its supervisor had a heartbeat in the last 60 s, and has not recorded its end."""
        own = self.own() if own is None else own
        beat = self.heartbeat()
        return beat is not None and beat < _RECENT and own.ended is None and not own.clean

    def other_machine(self) -> str:
        """Return "": whatever host name the record has, its state is read from the shared files."""
        return ""

    def unknown(self) -> str:
        """Describe why it cannot be known whether it runs: trouble with the records, or no recent heartbeat; else "".

        "" also for a job that has ended or was never started.
        """
        own = self.own()
        if self.trouble:
            return self.trouble.what
        if own.clean or own.ended is not None or self.supervised(own) or not (own.caretakers or own.entered):
            return ""
        beat = self.heartbeat()
        since = "" if beat is None else f" for {beat:.0f} s"
        return f"its supervisor on {self.header.get('hostname') or 'its node'} has given no sign of life{since}"

    def is_abandoned(self, own: NodeRecord) -> bool:
        """Check whether the event "clean" is recorded: the supervisor has ended or was lost, and its processes were ended."""
        return own.clean

    def require_followed(self) -> None:
        """Accept every record: the engine knows when a job has ended."""


def list_bases(node: NodeContext, request: NoFields) -> BasesAnswer:
    """List "" and the folders of nodes below ROOT_DIR, in the order of the nodes; only "" if it does not exist.

    Raises PreflightError if ROOT_DIR cannot be read.
    """
    try:
        found = os.listdir(node.root)
    except FileNotFoundError:
        found = []
    except OSError as error:
        fix = "check ROOT_DIR on that machine: jobs may run"
        raise PreflightError(f"the jobs below {node.root} cannot be read: {error.strerror}", fix) from None
    bases = (name for name in found if is_base(name) and _is_folder(os.path.join(node.root, name)))
    return {"bases": ["", *sorted(bases, key=lambda name: (len(name), name))]}


def find_shared(root: str, base: str, job: str, exact: bool) -> List[Record]:
    """Find the records below a base, newest first, with the node's number of the base's name. job, exact: see find().

    Writes nothing. Raises NotFound if there is no such folder of this user, and PreflightError if it cannot be read.
    """
    records = _records_of_base(_base_path(root, base), job if exact else "")
    found = [record for record in records if exact or record.called(job)]
    number = node_of(base)
    for record in found:
        if number is not None:
            record.header["node"] = number
    return sorted(found, key=lambda record: float(record.header["created"]), reverse=True)


def _base_path(root: str, base: str) -> str:
    """Return the path of a base, by its name, "" for `root`. Raises NotFound for another name or a folder of another user."""
    path = os.path.join(root, base) if base else root
    if not is_base(base) or (base and not _is_folder(path)):
        raise NotFound(f"{base!r} is no folder of a node below {root}", "check ROOT_DIR")
    return path


def _is_folder(path: str) -> bool:
    """Check whether a path is a directory of this user."""
    with contextlib.suppress(OSError):
        return files.is_own_dir(path)
    return False


def _records_of_base(folder: str, job: str) -> Iterator[Record]:
    """Yield the record of a job below a base, or of all for ""; one whose records are a link gets `trouble`."""
    for name in ledger.find_jobs(folder, job):
        record = SharedRecord.read(folder, name)
        if os.path.islink(record.paths.ours):  # to the records of another job, or to what is no record
            what = f"{record.paths.ours} is a link"
            record.trouble = PreflightError(what, "remove the directory of this job by hand")
        yield record


def require_ended(record: Record, ended: Container[str]) -> None:
    """Raise PreflightError unless the engine has proved that a job has ended, its records are usable and no supervisor lives.

    ended: the jobs that the engine has proved to have ended.
    """
    if record.trouble:
        raise record.trouble
    if record.job not in ended:
        raise PreflightError("it is not proved that it has ended", _PROOF)
    if record.supervised():
        what = f"its supervisor gave a sign of life {record.heartbeat() or 0.0:.0f} s ago"
        raise PreflightError(what, f"try again in {_RECENT:.0f} s")
