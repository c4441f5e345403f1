"""What a node's disk says of its jobs: the events files are the truth, and reading many of them is cheap."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Dict, Iterator, List, Optional, Tuple

from clustertool.node import files, processes
from clustertool.plan.paths import OURS, JobPaths

_TAIL = 4096


class Record:
    """One job directory on this node. `header` is its first event."""

    def __init__(self, base: str, job: str, header: Dict[str, Any]) -> None:
        self.paths = JobPaths(base, job)
        self.job = job
        self.header = header

    @property
    def node(self) -> int:
        return int(self.header.get("node", 0))

    def events(self) -> List[Dict[str, Any]]:
        with contextlib.suppress(OSError):
            with open(self.paths.events, "rb") as file:
                return list(_parse(file.read()))
        return []

    def last(self) -> Dict[str, Any]:
        """The job's last word if it was said, else the newest whole event; from the file's tail."""
        with contextlib.suppress(OSError):
            with open(self.paths.events, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                found = list(_parse(file.read()))
                ended = [event for event in found if event["e"] == "ended"]
                return (ended or found or [{}])[-1]
        return {}

    def process(self, kind: str) -> Optional[processes.Process]:
        """The newest supervisor, guard or gauge, alive or not; None where another boot recorded it."""
        boot, found = "", None
        for event in self.events():
            if event["e"] == "supervisor":
                boot = str(event["boot"])
            if event["e"] == kind:
                found = processes.Process(int(event["pid"]), int(event["start"]))
        return found if boot == processes.boot_id() else None

    def summary(self) -> Dict[str, Any]:
        """For `inv jobs`: one line about this job as this node knows it."""
        last = self.last()
        state, code, reason = "running", None, ""
        if last.get("e") == "ended":
            state, code, reason = str(last["state"]), int(last["code"]), str(last["reason"])
        else:
            supervisor = self.process("supervisor")
            if supervisor is None or not processes.alive(supervisor):
                state = "lost"
        keep = ("id", "node", "owner", "created", "mode", "command", "nodes")
        return {**{k: self.header.get(k) for k in keep}, "state": state, "code": code, "reason": reason, "dir": self.paths.dir}


def _parse(data: bytes) -> Iterator[Dict[str, Any]]:
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "e" in event:
                yield event


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
    return sorted(own, key=lambda record: float(record.header.get("created", 0)), reverse=True)


def _bases(root: str) -> Iterator[Tuple[str, bool]]:
    yield root, False
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name.startswith("node") and name[4:].isdigit():
                yield os.path.join(root, name), True


def _records(base: str, job: str) -> Iterator[Record]:
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in names:
        if name.startswith("JOB" + job) and files.is_ours(os.path.join(base, name)):
            yield Record(base, name[3:], _header(os.path.join(base, name)))


def _header(path: str) -> Dict[str, Any]:
    """The first event, or what little the place itself tells when the job never started."""
    with contextlib.suppress(OSError):
        with open(os.path.join(path, OURS, "events.jsonl"), "rb") as file:
            for event in _parse(file.readline()):
                return event
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(path, OURS, "spec.json"), "rb") as file:
            header = json.load(file)["header"]
            return dict(header)
    return {"id": os.path.basename(path)[3:], "created": os.stat(path).st_mtime}
