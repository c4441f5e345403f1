"""The ledger is a second copy of what a stop needs of a job: its marker, its supervisor and guard, its first event.

Programs of a job work in its directory and can damage the records there. The ledger has one file per job, 0600, below ROOT_DIR
(JobPaths.ledger): {"format", "token", "mark", "leads", "header", "boot", "space", "supervisor": [pid, start], "guard", "gauge",
"ended"}, for ranks in containers also "container": {"runtime", "program"}. It is written when the job is placed and when it
starts, and removed with the job's directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping

from clustertool.errors import NotFound, PreflightError
from clustertool.model.job import formats
from clustertool.model.job.caretakers import CARETAKERS
from clustertool.model.paths import OURS, JobPaths, is_job_id
from clustertool.node.storage import files
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

Entry = Dict[str, Any]
_FOLDER = "jobs"
_END = ".json"


class Ledger:
    """The entry of one job, for those that place and supervise it. `spec` is the node's part of the plan."""

    def __init__(self, spec: Spec) -> None:
        self._paths = JobPaths.at(spec["job_dir"])
        self._entry: Entry = {
            formats.KEY: formats.FORMAT,
            "token": spec["token"],
            "mark": spec["mark"],
            "header": spec["header"],
            "leads": spec["node"] == spec["lead"]["node"],
        }
        if "container" in spec:
            self._entry["container"] = {name: spec["container"][name] for name in ("runtime", "program")}

    def place(self) -> None:
        """Write the entry when a job is placed, so that it survives a crash.

        Raises OSError if it cannot be written, and PreflightError if its folder is not this user's.
        """
        files.make_dir(self._paths.base, OURS, _FOLDER)
        self._write(durable=True)

    def describe_removal(self, job: int) -> str:
        """Describe what a program has removed of the job: its directory, or all its records with this entry; "" if neither.

        job: the descriptor of the directory. After an error of the disk also "".
        """
        with contextlib.suppress(OSError):
            if not _is_path_of(self._paths.dir, job):
                return "the directory of the job was removed" if _is_removed(job) else ""
            if not any(map(files.exists, (os.path.join(self._paths.ours, files.MARKER), self._paths.ledger))):
                return "the records of the job were removed"
        return ""

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Store an event of a supervisor, guard, gauge or the end in the entry, and write it; ignore other events.

        An error of the disk is ignored: events.jsonl has the event too.
        """
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

    def _write(self, durable: bool = False) -> None:
        """Replace the file of the entry. durable: it is on the disk when this returns."""
        files.replace(self._paths.ledger, json.dumps(self._entry).encode(), durable)


def _is_path_of(path: str, directory: int) -> bool:
    """Check whether a path leads to the open directory. Raises OSError if this cannot be known."""
    return files.exists(path) and os.path.samestat(os.lstat(path), os.fstat(directory))


def _is_removed(directory: int) -> bool:
    """Check whether an open directory was removed, and not only renamed. Raises OSError if this cannot be known."""
    try:
        return os.fstat(directory).st_nlink == 0
    except OSError as error:
        if error.errno != errno.ESTALE:  # the file server has no such directory any more
            raise
        return True


def read(paths: JobPaths) -> Entry:
    """Read the entry of a job, of whatever format; {} if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        entry = json.loads(files.read_file(paths.ledger))
        if isinstance(entry, dict) and isinstance(entry.get("header"), dict):
            return entry
    return {}


def process(entry: Entry, kind: str) -> "processes.Process | None":
    """Return a supervisor, guard or gauge as an entry names it, alive or not; None if it does not."""
    with contextlib.suppress(KeyError, ValueError, TypeError):
        pid, start = entry[kind]
        return processes.Process(int(pid), int(start))
    return None


def jobs(base: str) -> List[str]:
    """List the ids of the jobs that have an entry below `base`; [] if the folder cannot be read."""
    try:
        names = os.listdir(os.path.join(base, OURS, _FOLDER))
    except OSError:
        return []
    return [name[: -len(_END)] for name in names if name.endswith(_END)]


def find_jobs(base: str, job: str) -> Dict[str, bool]:
    """Map the id of each job below `base` to whether its directory has the tool's marker; False: it has only an entry.

    job: only this one; "" for all. {} if `base` does not exist. Raises PreflightError if it cannot be read.
    """
    try:
        found = os.listdir(base)
    except FileNotFoundError:
        return {}
    except OSError as error:  # the file server does not answer: an empty list of jobs would be wrong
        fix = "check ROOT_DIR on that node: jobs may run there"
        raise PreflightError(f"the jobs below {base} cannot be read: {error.strerror}", fix) from None
    named = {name[3:] for name in found if name.startswith("JOB") and job in ("", name[3:])}
    marked = {name for name in named if files.is_ours(os.path.join(base, f"JOB{name}"))}
    listed = {*marked, *(name for name in jobs(base) if job in ("", name))}
    return {name: name in marked for name in listed if is_job_id(name)}


def remove(paths: JobPaths) -> None:
    """Remove the entry of a job, and the kept names of its records."""
    remove_kept(paths)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.ledger)


def remove_kept(paths: JobPaths) -> None:
    """Remove the folder with the kept names of a job's records (node/supervisor/log_keeper.py); ignore errors."""
    with contextlib.suppress(OSError):
        for name in os.listdir(paths.kept):
            os.unlink(os.path.join(paths.kept, name))
        os.rmdir(paths.kept)


def remove_job(job_dir: str) -> int:
    """Remove a job's directory, then its entry. Returns the bytes freed.

    Raises NotFound if the directory has no marker, and PreflightError if it cannot be removed.
    """
    freed = 0
    try:
        freed = files.remove_tree(job_dir)
    except NotFound:
        if os.path.lexists(job_dir):  # else another node that shares ROOT_DIR has removed it
            raise
    remove(JobPaths.at(job_dir))
    return freed
