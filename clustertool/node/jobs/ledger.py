"""The ledger is a second copy of what a stop needs of a job: its marker, its supervisor and guard, its first event.

Programs of a job work in its directory and can damage the records there. The ledger has one file per job, 0600, below ROOT_DIR
(JobPaths.ledger): {"format", "token", "mark", "leads", "header", "boot", "space", "supervisor": [pid, start], "guard", "gauge",
"ended"}. It is written when the job is placed and when it starts, and removed with the job's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping

from clustertool.model.job import formats
from clustertool.model.paths import OURS, JobPaths
from clustertool.node.storage import files
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

Entry = Dict[str, Any]
CARETAKERS = ("supervisor", "guard", "gauge")
_FOLDER = "jobs"
_END = ".json"


class Ledger:
    """The entry of one job, for those that place and supervise it. `spec` is the node's part of the plan."""

    def __init__(self, spec: Spec) -> None:
        self._paths = JobPaths(os.path.dirname(str(spec["job_dir"])), str(spec["job"]))
        self._entry: Entry = {
            formats.KEY: formats.FORMAT,
            "token": spec["token"],
            "mark": spec["mark"],
            "header": spec["header"],
            "leads": spec["node"] == spec["lead"]["node"],
        }

    def place(self) -> None:
        """Write the entry, so that it survives a crash. Raises OSError, PreflightError."""
        files.make_dir(self._paths.base, OURS, _FOLDER)
        self._write(sync=True)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Store an event of a supervisor, a guard or the end. If the disk is full it is lost: events.jsonl has it too."""
        if kind in CARETAKERS:
            self._entry[kind] = [fields["pid"], fields["start"]]
        elif kind == "ended":
            self._entry[kind] = dict(fields)
        else:
            return
        if kind == "supervisor":
            self._entry.update(boot=fields["boot"], space=fields["space"])
        with contextlib.suppress(OSError):
            self._write()

    def _write(self, sync: bool = False) -> None:
        """Whole or not at all."""
        part = f"{self._paths.ledger}.{os.urandom(4).hex()}.part"
        fd = files.make_new(part)
        try:
            files.write_all(fd, json.dumps(self._entry).encode())
            if sync:
                os.fsync(fd)
            os.rename(part, self._paths.ledger)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(fd)


def read(paths: JobPaths) -> Entry:
    """The entry of a job, of whatever format; {} where there is none, or a damaged one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(files.open_file(paths.ledger), "rb") as file:
            entry = json.loads(file.read())
        if isinstance(entry, dict) and isinstance(entry.get("header"), dict):
            return entry
    return {}


def process(entry: Entry, kind: str) -> "processes.Process | None":
    """A caretaker as its entry names it, alive or not."""
    with contextlib.suppress(KeyError, ValueError, TypeError):
        pid, start = entry[kind]
        return processes.Process(int(pid), int(start))
    return None


def jobs(base: str) -> List[str]:
    """Names of the jobs that have an entry below `base`."""
    try:
        names = os.listdir(os.path.join(base, OURS, _FOLDER))
    except OSError:
        return []
    return [name[: -len(_END)] for name in names if name.endswith(_END)]


def remove(paths: JobPaths) -> None:
    """With the job's directory, after it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.ledger)
