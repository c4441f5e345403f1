"""What a node answers to questions about its jobs: their records, what is left of their processes, their logs."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from clustertool.errors import ClustertoolError, NotFound
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state import ranks_of
from clustertool.model.job.state_names import JobState, StopState
from clustertool.model.wire.frames import Header
from clustertool.node.jobs import ledger
from clustertool.node.jobs.clean import remove, unlink
from clustertool.node.jobs.follow import last_lines
from clustertool.node.jobs.job_report import report
from clustertool.node.jobs.rank_progress import progress
from clustertool.node.jobs.records import Record, find
from clustertool.node.jobs.stop_request import lives, stop, whisper
from clustertool.node.storage import files
from clustertool.node.system import mounts, processes
from clustertool.node.system.work_counter import step

_REPORT = "report it with the line above"
_RUNS = -1  # stands for the bytes of a job that is not removed because it runs


class Jobs:
    """Jobs below ROOT_DIR `root` of the node that conf.py calls `entry`. A question names one (job, exact) or means all."""

    def __init__(self, root: str, entry: str) -> None:
        self._root = root
        self._entry = entry

    def answer(self, header: Header) -> Dict[str, Any]:
        """`q`: which question."""
        return _ANSWERS[str(header["q"])](self, header)

    def records(self, header: Header) -> List[Record]:
        found = find(self._root, self._entry, os.uname().nodename, str(header.get("job", "")))
        if header.get("exact"):
            found = [record for record in found if record.job == header["job"]]
        return found

    def record(self, header: Header) -> Record:
        found = self.records({**header, "exact": True})
        if not found:
            raise NotFound(f"no job {header['job']} here", "inv jobs lists the jobs")
        if found[0].trouble:
            raise found[0].trouble
        return found[0]

    def stop(self, header: Header) -> Dict[str, Any]:
        """Each job's answer. One whose records cannot be used does not keep the others running."""
        arguments = str(header["by"]), int(header["code"]), float(header["grace"]), bool(header["force"])
        found: Dict[str, Any] = {}
        for record in self.records(header):
            try:
                found[record.job] = stop(record, *arguments)
            except Exception as error:  # noqa: BLE001 - one job's records must not hide another's
                found[record.job] = {"state": StopState.UNKNOWN, "survivors": [], "why": _bug(error)}
        return {"jobs": found}

    def attached(self, header: Header) -> Dict[str, Any]:
        """A laptop is there and follows: for --lease. Told to the supervisor, who may be gone."""
        whisper(self.record(header), {"m": "attached"})
        return {}

    def jobs(self, header: Header) -> Dict[str, Any]:
        """One line about each. A record that cannot be read is in state "unknown", with the reason."""
        found = []
        for record in self.records(header):
            try:
                found.append(record.summary())
            except Exception as error:  # noqa: BLE001 - one job's records must not hide another's
                found.append({**record.about(), "state": JobState.UNKNOWN, "code": None, "reason": _bug(error)})
        return {"jobs": found}

    def status(self, header: Header) -> Dict[str, Any]:
        """All events of a job on this node, and CPU and memory of its processes. A job that was only placed has one event."""
        record = self.record(header)
        events = record.events() or [record.first_event()]
        ranks = ranks_of(events)
        started = [processes.Process(rank.pid, rank.life.start) for rank in ranks if rank.pid]
        supervisor = record.process("supervisor")
        beat = None
        with contextlib.suppress(OSError):
            beat = max(0.0, round(time.time() - os.stat(record.paths.control).st_mtime, 1))
        return {
            "node": record.node,
            "dir": record.paths.dir,
            "heartbeat": beat,
            "events": events,
            "output": _output(record, ranks),
            "supervised": supervisor is not None and processes.alive(supervisor),
            "unknown": record.unknown(),
            "usage": {str(process.pid): _usage(process.pid) for process in started if processes.alive(process)},
        }

    def report(self, header: Header) -> Dict[str, Any]:
        """What status tells, and a summary of what the job used, did and said here."""
        status = self.status(header)
        record = self.record(header)
        return {**status, "now": time.time(), **report(record, ranks_of(status["events"]), int(header["points"]))}

    def tail(self, header: Header) -> Dict[str, Any]:
        """The last lines of one log, for a verdict."""
        job = files.open_job_dir(self.record(header).paths.dir)
        try:
            text = last_lines(job, str(header["log"]), int(header["lines"]))
        except OSError:
            text = b""
        finally:
            os.close(job)
        return {"text": text.decode("utf-8", "backslashreplace")}

    def files(self, header: Header) -> Dict[str, Any]:
        """Everything in a job's log/, restarts' folders included: names relative to log/, and sizes."""
        found: Dict[str, int] = {}
        record = self.record(header)
        for folder, _, names in os.walk(record.paths.of("log")):
            step()
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    found[os.path.relpath(path, record.paths.of("log"))] = os.lstat(path).st_size
        return {"files": found}

    def clean(self, header: Header) -> Dict[str, Any]:
        """Remove finished jobs: one, or all older than some seconds. Those of which something lives stay and are named.

        `kept`: {job: [what, fix]} for each that cannot be removed. It does not keep the others.
        """
        removed, running, freed = [], [], 0
        kept: Dict[str, List[str]] = {}
        for record in self.records(header):
            step()
            try:
                size = self._clean_one(record, header)
            except ClustertoolError as error:
                kept[record.job] = [error.what, error.fix]
                continue
            except Exception as error:  # noqa: BLE001 - one job's records must not keep the others
                kept[record.job] = [_bug(error), _REPORT]
                continue
            if size == _RUNS:
                running.append(record.job)
            elif size is not None:
                removed.append(record.job)
                freed += size
        return {"removed": removed, "running": running, "freed": freed, "kept": kept}

    def _clean_one(self, record: Record, header: Header) -> Optional[int]:
        """The bytes freed; None for a job that is too young, _RUNS for one that lives. Raises ClustertoolError."""
        if header.get("exact") and record.elsewhere() and not os.path.lexists(record.paths.dir):
            if not header.get(
                "dry"
            ):  # the user has removed its directory and names it: only the copy in the ledger is left
                ledger.remove(record.paths)
            return 0
        if lives(record):
            return _RUNS
        if float(header["now"]) - float(record.header.get("created", 0)) < float(header.get("older_than", 0)):
            return None  # by the laptop's clock, as `created` is
        mounts.require_none(record.paths.dir)  # before anything is changed
        if header.get("dry"):
            return 0
        unlink(record.paths.dir)
        return remove(record.paths.dir)


def _bug(error: Exception) -> str:
    """What went wrong, in one line that says where."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"a bug of clustertool on this node, {os.path.basename(where.filename)}:{where.lineno}: {error!r}"


def _output(record: Record, ranks: Sequence[ProcessStatus]) -> List[List[Any]]:
    """[role, rank, epoch, step, time of the last output] of each rank that was started, of its last attempt."""
    try:
        job = files.open_job_dir(record.paths.dir)
    except NotFound:  # a program has removed it
        return []
    try:
        logs = {rank.key: record.paths.log(*rank.key, rank.attempt) for rank in ranks if rank.pid}
        found = [(key, progress(job, log)) for key, log in logs.items()]
    finally:
        os.close(job)
    return [[*key, now.epoch, now.step, now.output] for key, now in found if now is not None]


def _usage(pid: int) -> Tuple[float, int]:
    """(CPU seconds, resident bytes) of a process."""
    found = processes.stat(pid)
    if found is None:
        return 0.0, 0
    return found.ticks / os.sysconf("SC_CLK_TCK"), found.rss * os.sysconf("SC_PAGE_SIZE")


_ANSWERS: Dict[str, Callable[[Jobs, Header], Dict[str, Any]]] = {
    "stop": Jobs.stop,
    "attached": Jobs.attached,
    "jobs": Jobs.jobs,
    "status": Jobs.status,
    "report": Jobs.report,
    "tail": Jobs.tail,
    "files": Jobs.files,
    "clean": Jobs.clean,
}
