"""The first process of a pod starts the joining process, passes on the signals of the kubelet, reaps orphans, and reports.

The kubelet ends a pod by SIGTERM to this process only, and keeps of a pod its log, its exit code and the termination message.
So this process writes the lines of all ranks to stdout while the job runs, and at the end a last line of JSON with the records
of this node (model/kubernetes/pod_record.py). It exits with the code of the joining process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import Callable, Dict, List, Optional

from clustertool.errors import ClustertoolError, Interrupted
from clustertool.model.job.outcome import exit_code
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.join_errors import state_of
from clustertool.model.joining.join_file import EngineSettings, JoinFile
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.pod_record import EVENTS, GROWTH, LEDGER, NUMBERS, SPEC, USAGE, Log, PodEnd
from clustertool.model.masking import HIDDEN
from clustertool.model.paths import CUT, LOG_NAMES, METRICS, OURS, RELEASED, JobPaths
from clustertool.model.quantities import human_seconds
from clustertool.node.container.rank_user import home_inside, rank_user
from clustertool.node.jobs import ledger
from clustertool.node.jobs.records import Record
from clustertool.node.join.pods.pod_log_writer import PodLogWriter, write_line
from clustertool.node.storage import files
from clustertool.node.storage.tree_copy import has_files
from clustertool.node.system import prctl, processes, users
from clustertool.node.system.child_signals import Signals

NAME = "ct-pod"
_TICK = 0.2
_LEFT = 20.0  # seconds for the guard of a supervisor that has died, and for what else is left
_DRAIN = 20.0  # seconds for the rest of the logs: a reader of stdout may be slow
_ASKED = 5.0  # both, in a pod that is to end
_ANSWER = 0.5  # seconds for the answer to a release
_LARGEST = 1 << 20  # bytes of a report
_MOST_RECORD = 4 << 20  # bytes of a file of records: its first line, and its end


class PodProcess:
    """The first process of a pod. run() returns the exit code of the joining process, which is its child.

    join: as the bundle has it. `body`: the joining process; it gets a descriptor for its reports, and returns its exit code.
    """

    def __init__(self, join: JoinFile, body: Callable[[int], int]) -> None:
        self._job, self._owner = join.identity.job_id, join.identity.owner
        self._root = join.own.root_dir or join.cluster.root_dir
        self._settings: EngineSettings = join.of_engine
        self._body = body
        self._end = PodEnd(self._job, -1, JobState.LOST.value, "", 0)
        self._errors: List[str] = []
        self._reported = False  # how the job has ended
        self._paths: Optional[JobPaths] = None  # once the job is placed here
        self._lines: Optional[PodLogWriter] = None
        self._child = 0
        self._status: Optional[int] = None  # of the joining process
        self._asked = False  # the kubelet ends this pod
        self._rest = b""

    def run(self) -> int:
        """Start the joining process, pass signals on until it and orphans have ended, write the last line.

        It waits for orphans for at most 20 s. Returns the exit code of the joining process.
        """
        processes.set_name(NAME)
        prctl.become_subreaper()  # where this is not the first process of its namespace
        signals = Signals()
        inlet, outlet = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            self._become_joining(signals, inlet, outlet)
        os.close(outlet)
        os.set_blocking(inlet, False)
        while self._status is None:
            self._turn(signals, inlet)
        self._read_reports(inlet)
        self._wait_until(signals, lambda: not processes.children(os.getpid()), _LEFT)
        code = os.WEXITSTATUS(self._status) if os.WIFEXITED(self._status) else exit_code(0, os.WTERMSIG(self._status))
        self._finish(signals, code)
        return code

    def _become_joining(self, signals: Signals, inlet: int, outlet: int) -> None:
        """Run the joining process in the child, with the user and HOME set, and exit with its code."""
        code = 70
        try:
            signals.close()
            os.close(inlet)
            processes.set_name("ct-join")
            self._name_user()
            code = self._body(outlet)
        finally:
            processes.leave(code)

    def _name_user(self) -> None:
        """Set USER and LOGNAME, where they are missing, and a HOME that the user of this pod can write.

        A uid without a name gets the name of the job's user: a pod cannot add to the /etc/passwd of its image.
        """
        os.environ.setdefault("HOME", "/")
        name = users.name_of(os.getuid())
        for variable in ("USER", "LOGNAME"):
            os.environ.setdefault(variable, self._owner if name.isdecimal() and self._owner else name)
        with contextlib.suppress(OSError, ClustertoolError):  # placing the job reports what is wrong with ROOT_DIR
            os.environ["HOME"] = home_inside(rank_user(self._root))

    def _turn(self, signals: Signals, inlet: int) -> None:
        """Wait up to 0.2 s, pass signals on to the joining process, read its reports, and reap processes that have ended."""
        select.select([signals.wake, inlet], [], [], _TICK)
        for request in signals.turn():
            self._asked = True
            self._signal(signal.SIGINT if request.code == Interrupted.code else signal.SIGTERM)
        for number in signals.for_ranks:
            self._signal(number)
        if not self._read_reports(inlet):
            time.sleep(_TICK)  # it has closed its reports, and ends
        self._reap()

    def _signal(self, number: int) -> None:
        """Send a signal to the joining process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _reap(self) -> None:
        """Reap all children and orphans that have ended, and keep the exit status of the joining process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = status

    def _wait_until(self, signals: Signals, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until done() is true, for at most `seconds`, or 5 s in a pod that is to end. Returns whether it is true.

        Signals are noted, and processes reaped meanwhile.
        """
        began = time.monotonic()
        while not done():
            if time.monotonic() - began > (min(seconds, _ASKED) if self._asked else seconds):
                return False
            select.select([signals.wake], [], [], _TICK)
            self._asked = bool(signals.turn()) or self._asked
            self._reap()
        return True

    # -- what the joining process reports --

    def _read_reports(self, inlet: int) -> bool:
        """Read and note the reports that have come. Returns False if the joining process has closed them."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(inlet, 1 << 16)
                if not data:
                    return False
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._rest = self._rest[-_LARGEST:]
                for line in lines:
                    self._note_report(json.loads(line))
        return True

    def _note_report(self, report: Dict[str, object]) -> None:
        """Note what a report says: the place of the job, whose logs are written from now on, an error, or the outcome."""
        if report["type"] == "planned":
            self._paths = JobPaths.at(str(report["job_dir"]))
            self._end = self._end._replace(node=int(str(report["node"])))
            self._lines = PodLogWriter(self._paths)
        elif report["type"] == "error":
            self._errors.append(": ".join(filter(None, (str(report["node"]), str(report["what"])))))
        elif report["type"] == "ended":
            outcome = report["outcome"]
            assert isinstance(outcome, dict)
            failed = tuple(f"{role} {rank}" for role, rank in outcome["culprits"])
            self._reported = True
            state, reason = str(outcome["state"]), str(outcome["reason"])
            self._end = self._end._replace(state=state, reason=reason, failed=failed)

    # -- the end --

    def _finish(self, signals: Signals, code: int) -> None:
        """Write the termination message, wait for the rest of the logs and for a fetch of the output, and write the last line.

        Without a reader of stdout it does not wait for a fetch, and writes no last line.
        """
        end = self._end = self._verdict(code)
        leave_message(pod_record.encode_message(end))
        if self._lines is not None:
            lines = self._lines
            lines.finish()
            if not self._wait_until(signals, lambda: lines.done, _DRAIN):
                return  # stdout is not read, so a last line would not be read either
        self._wait_for_fetch(signals)
        paths = self._paths
        sizes = sizes_of_logs(paths) if paths else ()
        write_line(pod_record.encode(end, read_records(paths) if paths else {}, sizes))

    def _verdict(self, code: int) -> PodEnd:
        """Build the end of this node: from reported errors and the exit code, else the reported outcome, else LOST."""
        if self._errors:
            return self._end._replace(state=state_of(code).value, reason="; ".join(self._errors), code=code)
        if not self._reported:
            what = f"the process of this node ended with exit code {code} without a result"
            return self._end._replace(state=JobState.LOST.value, reason=what, code=code)
        return self._end._replace(code=code)

    def _wait_for_fetch(self, signals: Signals) -> None:
        """Wait on node 0, if it has output, until the job is released after a fetch, for at most the engine's `keep` seconds.

        The log shows the wait and its end. In a pod that is to end it does not wait.
        """
        paths, seconds = self._paths, self._settings.keep
        if paths is None or self._end.node != 0 or seconds <= 0 or self._asked:
            return
        if not has_files(Record.read(paths.base, paths.job).output):
            return
        released = paths.of(OURS, RELEASED)
        began = time.monotonic()
        _write_note(f"waiting up to {human_seconds(seconds)} for a fetch of the output; resources stay reserved")
        self._wait_until(signals, lambda: self._asked or os.path.exists(released), seconds)
        how = "released" if os.path.exists(released) else "ended by Kubernetes" if self._asked else "not fetched"
        _write_note(f"{how} after {human_seconds(time.monotonic() - began)}")
        if how == "released":  # the end of the pod kills the agent, which still answers
            self._wait_until(signals, lambda: self._asked, _ANSWER)


def _write_note(text: str) -> None:
    """Write a line about this process to stdout, unless that is closed."""
    write_line(f"clustertool join: {text}\n".encode())


def read_records(paths: JobPaths) -> Dict[str, bytes]:
    """Read the records that exist, {name: content}, and mask the token of the job in them: nodes of it may still listen."""
    found: Dict[str, bytes] = {}
    places = {EVENTS: paths.events, LEDGER: paths.ledger, SPEC: paths.spec, GROWTH: paths.growth, USAGE: paths.usage}
    places[NUMBERS] = paths.of(METRICS)
    for name, path in places.items():
        with contextlib.suppress(OSError):
            found[name] = _read_newest(path)
    token = str(ledger.read(paths).get("token") or "").encode()
    return {name: data.replace(token, HIDDEN.encode()) for name, data in found.items()} if token else found


def _read_newest(path: str) -> bytes:
    """Read a file; of one with more than 4 MiB the first line, and the newest lines. Raises OSError."""
    with open(files.open_file(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= _MOST_RECORD:
            return file.read(_MOST_RECORD)
        first = file.readline(_MOST_RECORD)
        file.seek(size - _MOST_RECORD + len(first))
        file.readline(_MOST_RECORD)
        return first + file.read(_MOST_RECORD)


def sizes_of_logs(paths: JobPaths) -> List[Log]:
    """List (name in the job's directory, bytes) of the logs of the ranks.

    What was cut from a log (CUT) counts for it. Links are left out.
    """
    found: Dict[str, int] = {}
    with contextlib.suppress(OSError), files.closing(files.open_job_dir(paths.dir)) as job:
        top = os.path.join(files.path_of(job), paths.written("log"))
        for folder, _, names in os.walk(top):
            place = os.path.relpath(folder, os.path.dirname(top))
            for name in sorted(names):
                path = os.path.join(folder, name)
                if name.partition(".")[0] in LOG_NAMES and not os.path.islink(path):
                    log = f"{place}/{name[: -len(CUT)] if name.endswith(CUT) else name}"
                    found[log] = found.get(log, 0) + os.lstat(path).st_size
    return list(found.items())


def leave_message(data: bytes, path: str = "/dev/termination-log") -> None:
    """Write the termination message of the container, if its runtime has made the file for it. Errors are ignored."""
    with contextlib.suppress(OSError), files.closing(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)) as fd:
        files.write_all(fd, data)
