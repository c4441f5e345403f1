"""A job of a cluster is an object. Each method opens connections of its own and closes them, as a command does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal

from clustertool.actions import find_jobs, load_config
from clustertool.actions.build_report import build_report
from clustertool.actions.conf_file import Selection
from clustertool.actions.fetch_output import fetch_output, require_inside
from clustertool.actions.follow_job import BEAT, Inbox, JobFollower, NodeQueues
from clustertool.actions.read_logs import last_lines, locate_logs, read_existing_lines, require_attempt
from clustertool.actions.read_status import as_dict, error_of, read, unrecorded_dict
from clustertool.actions.stop_jobs import failures, stop_how, stop_now
from clustertool.actions.wait_in_queue import until_started
from clustertool.api.plain_text import plain, plain_errors
from clustertool.api.results import LogLine, Status, status_of
from clustertool.api.silent_caller import Listener, SilentCaller, listener
from clustertool.engines.job_request import Shown
from clustertool.errors import ClustertoolError, JobFailed, UsageError, raise_all
from clustertool.fleet import this_user
from clustertool.fleet.fleet import LAG, Fleet
from clustertool.model.config.cluster import Cluster as ClusterConfig
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import OUTCOMES, RankState
from clustertool.model.job.stop_result import read_result
from clustertool.model.masking import Hide
from clustertool.model.paths import folder_of
from clustertool.model.quantities import count, human_seconds
from clustertool.model.roles import ROLES, find_role
from clustertool.model.wire.agent_requests import FollowRequest
from clustertool.model.wire.messages import STATUS
from clustertool.show.job_text import shared_files, stop_text
from clustertool.show.report_html import page, tag
from clustertool.watch import news
from clustertool.watch.job_view import LogLines
from clustertool.watch.sanitize import harmless

_SAMPLE = 2.0  # seconds between two requests for the steps of ranks
_DONE = (RankState.DONE, RankState.FAILED, RankState.STOPPED)
_STYLE = "width: 100%; height: 40em; border: 1px solid #8884; resize: vertical"


class StillRunning(ClustertoolError, TimeoutError, code=124):
    """The error of Job.wait(timeout): the job has not ended in this time. It goes on."""


class Job:
    """A job on a cluster. `id` is the name of its directory without JOB.

    The object has no connection and no state: it can be used from several threads, pickled, and made again by
    Cluster.job(id) in another program. In a notebook it is shown as its report.
    """

    def __init__(self, config: ClusterConfig, id: str) -> None:
        self._config = config
        self.id = id

    @classmethod
    @plain_errors()
    def find(cls, id: str = "") -> Job:
        """Ask the nodes and return the job with this id, name or unique beginning of an id; with "" the newest one.

        Its hosts are those of the nearest conf.py, or those that this machine stored when it started the job: if there is no
        conf.py, or if `id` is the complete id of a job on other hosts. Raises UsageError if several match; for none NotFound,
        or the errors of nodes that did not answer; ConfigError if no hosts are known, or conf.py cannot be read.
        """
        caller = SilentCaller()
        config = load_config.cluster(caller, Selection(job=id), start_local=False)
        with caller.opened(config) as engine:
            return cls(config, find_jobs.ask_and_choose(engine, id)["id"])

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self._config.where or 'the embedded local cluster'!r})"

    @plain_errors()
    def status(self) -> Status:
        """Ask the nodes, and the engine if it knows more, and return the state of the job.

        Nodes that do not answer are in Status.unreachable. Raises NotFound, or what all nodes raise if none answers.
        """
        with SilentCaller().opened(self._config) as engine:
            fleet = engine.fleet
            listed = find_jobs.attach_to(engine, self.id, exact=True, queued=True)
            answers = fleet.ask_all(STATUS({"job": self.id})) if find_jobs.has_records(listed) else {}
            find_jobs.record_unknown_end(fleet, listed, answers)
            engine_knows = find_jobs.engine_proof(fleet, listed)
            unreachable = {fleet.name(node): plain(error.what) for node, error in sorted(fleet.failed.items())}
            found = as_dict(answers, engine_knows) if find_jobs.has_records(listed) else unrecorded_dict(listed)
            found.update(waits=[plain(text) for text in found["waits"]], advice=plain(found["advice"]))
            return status_of(found, read(answers, engine_knows).outcome, unreachable)

    @plain_errors()
    def logs(
        self,
        rank: int | Iterable[int] | Literal["all"] = 0,
        *,
        role: str = "trainer",
        host: str = "",
        follow: bool = False,
        tail: int | None = None,
        since: float | None = None,
        attempt: int | None = None,
    ) -> Iterator[LogLine]:
        """Yield the lines that processes have printed, those of several ranks in the order of their time.

        rank: within `role` (trainer, pserver, heter); "all" for all of the role. host: only ranks on this node. follow: go on
        until the job is over. tail: only so many last lines of each rank. since: only lines that were written at this time or
        later, in seconds since the epoch. attempt: only those after the K-th restart.

        The iterator opens connections with the first line and closes them with the last one, or when it is closed. Raises
        UsageError for a wrong rank or role, at once; NotFound for a job, rank, host or attempt that does not exist; and after
        the lines the errors of nodes that did not answer.
        """
        kind = _read_role(role)
        asked: Shown = "all"
        if not isinstance(rank, str):
            asked = [(kind, int(one)) for one in ([rank] if isinstance(rank, int) else rank)]
        elif rank != "all":
            raise UsageError(f"rank {rank!r} is not valid", 'a number, several numbers, or "all"')
        request: FollowRequest = {"job": self.id, "follow": follow, "tail": tail, "attempt": attempt, "by_time": True}
        if since is not None:
            request["since"] = since
        return self._log_lines_of(request, asked, kind, host)

    def _log_lines_of(self, request: FollowRequest, asked: Shown, role: str, host: str) -> Iterator[LogLine]:
        """Open connections, request logs as logs() describes, and yield their lines; at the end raise the errors of nodes."""
        caller, inbox = SilentCaller(), Inbox()
        lanes = NodeQueues(caller.check)
        sink = inbox.put if request["follow"] else lanes.put
        with plain_errors(), closing(inbox), closing(lanes), caller.opened(self._config, sink) as engine:
            fleet = engine.fleet
            found = find_jobs.attach_to(engine, self.id, exact=True)
            if request["follow"]:
                find_jobs.require_known(found)
            status = read(fleet.ask_all(STATUS({"job": self.id})))
            require_attempt(status, request["attempt"])
            places, missing = locate_logs(fleet, status, asked, role, host, request["attempt"])
            request["logs"] = list(places)
            hide = load_config.mask_known_secrets(fleet.cluster)
            if request["follow"]:
                follower = JobFollower(fleet, inbox, self.id)
                follower.start(request)
                for item in follower.items(caller.check):
                    if isinstance(item, LogLines):
                        yield from _log_lines(item, follower.watch.status.name(item.node), hide)
                    else:
                        caller.log(item)
                missing = [*missing, *follower.refusals()]
            else:
                for name, lines in read_existing_lines(fleet, lanes, request, sorted(set(places.values()))):
                    yield from _log_lines(lines, name, hide)
            named = {error.node for error in missing}
            raise_all([*missing, *(error for error in fleet.silent.values() if error.node not in named)])

    @plain_errors()
    def wait(self, timeout: float | None = None, *, check: bool = True, progress: Listener | None = None) -> Outcome:
        """Wait until the job is over, and return its outcome. The job counts as followed in this time (--lease).

        timeout: seconds after which StillRunning (a TimeoutError) is raised, if the job has not ended then; the job goes on.
        progress: is called with Progress values; without it, a notebook shows a bar.

        check: raise what ended the job: JobFailed (`code` is the exit code, `lines` are the last ones of the first failed
        process), NodeLost, TimedOut, Survivors; Terminated or Interrupted for a job that was stopped. With check=False only a
        job whose outcome is not known raises NodeLost.
        """
        end = None if timeout is None else time.monotonic() + timeout
        caller, inbox = SilentCaller(listener(progress)), Inbox()

        def in_time() -> None:
            if end is not None and time.monotonic() > end:
                what = f"job {self.id} has not ended within {timeout:g} s"
                raise StillRunning(what, "wait again, or end it with stop()")

        with closing(inbox), caller.opened(self._config, inbox.put) as engine:
            found = find_jobs.attach_to(engine, self.id, exact=True, queued=True)
            if find_jobs.is_waiting(engine, found):
                for known in until_started(engine, self.id, in_time):
                    caller.progress("queued", text=f"job {self.id}: {find_jobs.state_text(known)}")
                found = find_jobs.attach_to(engine, self.id, exact=True)
            fleet = engine.fleet
            find_jobs.require_known(found)
            if found["state"] in OUTCOMES:
                end = None  # to read how it has ended takes a moment
            follower = JobFollower(fleet, inbox, self.id)
            follower.start({"logs": []})
            status, shown_at, beat_at = follower.watch.status, 0.0, 0.0

            def report(status: JobStatus) -> bool:
                nonlocal shown_at, beat_at
                if time.monotonic() - beat_at >= BEAT:
                    follower.report_attached()
                    beat_at = time.monotonic()
                if caller.listens and time.monotonic() - shown_at >= _SAMPLE:
                    # It waits for nodes: the job is followed between two of them.
                    _report_progress(caller, fleet, follower)
                    shown_at = time.monotonic()
                return False

            for item in follower.items(in_time, report):
                caller.log(item)
            raise_all(follower.refusals())
            error, outcome = error_of(status), status.outcome
            if error is not None and (check or outcome is None):
                caller.progress("ended", text=f"job {self.id}: {error.what}")
                raise _explain(error, status, fleet)
            assert outcome is not None  # else there is an error
            caller.progress("ended", text=f"job {self.id}: {outcome.state}, {outcome.reason}")
            return outcome

    @plain_errors()
    def stop(self, *, grace: float | None = None, force: bool = False) -> Mapping[str, str]:
        """Stop the job on all nodes, and return {name of a node: its result, as text}. A job that has ended does not change.

        grace: seconds between TERM and KILL (default: GRACE of conf.py). force: KILL at once. Raises Survivors if a process is
        alive after that, and Unreachable for nodes that did not answer.
        """
        how = stop_how("Job.stop()", self._config.grace if grace is None else grace, force)
        with SilentCaller().opened(self._config, lag=LAG) as engine:
            fleet = engine.fleet
            answers = stop_now(engine, self.id, how)
            raise_all(failures({self.id: answers}, fleet.silent))
            return {name: stop_text(read_result(one, self.id)) for name, one in answers.items()}

    @plain_errors()
    def fetch(
        self, to: str | os.PathLike[str] = "", *, rank: int | Literal["all"] = 0, role: str = "trainer", path: str = ""
    ) -> Path:
        """Copy the output of the job to this machine.

        Return the folder, or with a number as `rank` the file if `path` names one. to: the folder, which is made (default:
        JOB<id> in the current one). rank: a number, of the rank whose node is read; "all" copies each rank into a folder of its
        own: to/rank0, to/rank1 and so on. path: a folder or a file of the job instead of its output. A warning is logged for a
        rank without files, and for each file that is left out because another job in the same folder has written it. Raises
        UsageError for a wrong rank, role or path, NotFound for one that the job does not have, Unreachable for a node that does
        not answer, and DispatchError for a copy that has failed.
        """
        require_inside(path)
        kind = _read_role(role)
        if rank != "all" and (not isinstance(rank, int) or rank < 0):
            raise UsageError(f"rank {rank!r} is not valid", 'a number, or "all"')
        caller, folder = SilentCaller(), this_user.expand_home(str(to or folder_of(self.id)))
        with caller.opened(self._config) as engine:
            fleet = engine.fleet
            find_jobs.attach_to(engine, self.id, exact=True)
            found = fetch_output(fleet, caller.check, self.id, folder, str(rank), kind, path)
            folder.mkdir(parents=True, exist_ok=True)
            for number, done in found.items():
                for text in shared_files(done.shared):
                    caller.warn(f"{kind} {number}: {text}")
                if not done.files and not (done.place.is_dir() and any(done.place.iterdir())):
                    caller.warn(f"{kind} {number}: there are no files in {path or 'output'} on {done.node}")
            raise_all(list((fleet.failed if rank == "all" else fleet.silent).values()))
        return folder if rank == "all" else found[rank].place

    @plain_errors()
    def report(self) -> str:
        """Ask the nodes for the job's records, and return its report: one HTML page without scripts that needs no other file.

        Raises NotFound before the start.
        """
        caller = SilentCaller()
        with caller.opened(self._config) as engine:
            fleet = engine.fleet
            return page(build_report(fleet, find_jobs.attach_to(engine, self.id, exact=True), caller), time.time())

    def _repr_html_(self) -> str:
        """Return the report for a notebook, in a frame that runs nothing and cannot reach the page around it.

        If it cannot be built: the error as text.
        """
        try:
            text = self.report()
        except ClustertoolError as error:
            return tag("pre", f"{self!r}\n{error}")
        return tag("iframe", srcdoc=text, sandbox="", style=_STYLE, title=f"report of job {self.id}")


def _read_role(text: str) -> str:
    """Convert a parameter to the name of a role. Raises UsageError if it is not known."""
    found = find_role(text)
    if not found:
        raise UsageError(f"role {text!r} is not known", f"one of {', '.join(ROLES)}")
    return found


def _log_lines(item: LogLines, host: str, hide: Hide) -> Iterator[LogLine]:
    """Yield the lines of a rank as LogLine, with secrets masked and control characters escaped."""
    for line in item.lines:
        yield LogLine(item.role, item.rank, host, harmless(hide(line)), item.t)


def _report_progress(caller: SilentCaller, fleet: Fleet, follower: JobFollower) -> None:
    """Ask the nodes for the ranks' steps, for at most 2 s, and report how many trainers are done, their steps and the duration.

    The report is a Progress for the caller's listener.
    """
    status = follower.watch.status
    job, trainers = status.job, status.of("trainer")
    done = sum(process.state in _DONE for process in trainers)
    parts = [f"{done} of {count(len(trainers), 'trainer')} done"] if trainers else ["connected"]
    asked = [node for node in fleet.agents if node not in follower.watch.closed]
    answers = fleet.ask(dict.fromkeys(asked, STATUS({"job": job})), timeout=_SAMPLE).ok
    steps = [process.step for process in read(answers).of("trainer") if process.step is not None]
    if steps:
        parts.append(f"step {min(steps):.0f}" + (f" to {max(steps):.0f}" if max(steps) > min(steps) else ""))
    if status.started:
        parts.append(human_seconds(max(0.0, time.time() - status.started)))
    caller.progress("running", done, len(trainers), f"job {job}: {', '.join(parts)}")


def _explain(error: ClustertoolError, status: JobStatus, fleet: Fleet) -> ClustertoolError:
    """Add the node to an error, and to a JobFailed the last lines of the log of the process that failed first; return it."""
    outcome = status.outcome
    first = news.first_culprit(status, outcome) if outcome else None
    if isinstance(error, JobFailed) and first is not None:
        error.node = status.name(first.node)
        role = "" if first.role == "trainer" else f", role={first.role!r}"
        error.fix = error.fix or f"read its log: job.logs({first.rank}{role})"
        error.lines = tuple(last_lines(fleet, status.job, first, load_config.mask_known_secrets(fleet.cluster)))
        if error.lines and hasattr(error, "add_note"):  # Python 3.11: shown with the traceback
            error.add_note("\n".join(["the last lines of its log:", *error.lines]))
    elif outcome is not None and outcome.node >= 0:
        error.node = status.name(outcome.node)
    return error
