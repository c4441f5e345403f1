"""A session shows a followed job to the user until its end: keys and signals, lines and news, copies of logs, the verdict.

Logs are copied to a folder of this machine with --log-dir and --fetch-logs. The verdict names failed ranks, the last lines
of each different error, stopped ranks and the exit code. What was printed while the job ran is not printed again.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertool.actions.follow_job import BEAT, Inbox, JobFollower
from clustertool.actions.read_logs import last_lines, read_remaining_logs
from clustertool.actions.read_status import error_of
from clustertool.engines.base import Engine
from clustertool.engines.job_request import Shown
from clustertool.errors import (
    ClustertoolError,
    Interrupted,
    JobFailed,
    NodeLost,
    NotFound,
    Survivors,
    Terminated,
    UsageError,
    raise_all,
)
from clustertool.fleet import this_user
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer import local_logs
from clustertool.fleet.transfer.local_logs import LocalLogs
from clustertool.model.finding import pip_name
from clustertool.model.hints import PROGRAM
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Key
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState, NodeState, StopState
from clustertool.model.job.stop_result import StopResult, last_result, read_result
from clustertool.model.masking import Hide
from clustertool.model.paths import ENDPOINTS, JobPaths, endpoints_log
from clustertool.model.quantities import count
from clustertool.model.wire.agent_answers import StopAnswer
from clustertool.model.wire.agent_requests import FollowWanted, StopHow
from clustertool.show.error_text import reason
from clustertool.show.job_text import abort_line, brief, news_text, remains_text, show_results, stop_text, victims_line
from clustertool.show.terminal import RankLines, ReaderGone, prefix
from clustertool.verbs import signals
from clustertool.verbs.verb import Call
from clustertool.watch import news
from clustertool.watch.job_view import Item, JobView, LogLines, LogPiece
from clustertool.watch.news import PhaseNews

_LONGEST_LINE = 4096  # bytes: no line of a terminal is longer
_LOCAL_MODES = 3  # the place of the local modes in what tcgetattr() returns
_CTRL_D = b"\x04"
_FIRST = ("trainer", 0)
_NO_MODULE = re.compile(r"No module named '?(\w+)'?$")  # of a name with a dot the package is there
_MOST_ERRORS = 3  # different errors with their last lines


# -- keys and signals --------------------------------------------------------------------------------------------------


class DetachKey:
    """The key Ctrl+D at the terminal, by which the user leaves a followed job alone.

    Call discard_input(), then pressed() several times a second. Other input is not used. The terminal stays in its line mode,
    where Ctrl+D makes an end of file. So no mode has to be restored, however the program ends, and a question for a password is
    asked as ever: the same thread reads the answer and the key.
    """

    def __init__(self) -> None:
        terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
        self._fd = sys.stdin.fileno() if terminal else -1

    @property
    def readable(self) -> bool:
        """Whether stdin is a terminal that this program may read: a read in the background would stop it (SIGTTIN)."""
        try:
            return self._fd >= 0 and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # stdin is a terminal, but not the one that controls this program
            return False

    def discard_input(self) -> None:
        """Discard what was typed at the terminal and not read, if this program may read it."""
        if self.readable:
            termios.tcflush(self._fd, termios.TCIFLUSH)

    def pressed(self) -> bool:
        """Read what was typed since the last call, and check whether Ctrl+D is in it; then discard what follows. Never waits.

        Other input is discarded. False if stdin is no readable terminal.
        """
        try:
            while self.readable and select.select([self._fd], [], [], 0)[0]:
                lines = bool(termios.tcgetattr(self._fd)[_LOCAL_MODES] & termios.ICANON)
                typed = os.read(self._fd, _LONGEST_LINE)
                # A line without its newline was ended by Ctrl+D. Without line mode, another program's doing, it is a character.
                if not typed.endswith(b"\n") if lines else _CTRL_D in typed:
                    self.discard_input()  # a second Ctrl+D, while this program ends, would end the shell
                    return True
        except (OSError, termios.error):  # the terminal is gone, which SIGHUP reports
            return False
        return False


@dataclass(frozen=True)
class Ending:
    """How an interrupt ends a job.

    stop: stops it, and returns what the nodes have answered, by their names. patience: seconds to wait for the rest of these
    answers when the records of all nodes have the end. where: on which nodes.
    """

    stop: Callable[[str, StopHow], Mapping[str, StopAnswer | ClustertoolError]]
    patience: float = 5.0
    where: str = "all nodes"


def choose_ending(engine: Engine) -> Ending:
    """Return the ending that calls Engine.cancel(), with a patience of 5 s if agents stop jobs (live_channels), else 40 s."""
    return Ending(engine.cancel, 5.0 if engine.capabilities.live_channels else 40.0)


class JobStopper:
    """The signals of the user while a job is followed: the first one stops the job on all nodes, the next one kills it."""

    def __init__(self, call: Call, follower: JobFollower, job: str, how: Ending | None) -> None:
        self._call, self._follower, self._job, self._how = call, follower, job, how
        self._thread: threading.Thread | None = None
        self._answers: dict[str, StopAnswer | ClustertoolError] = {}
        self._errors: list[ClustertoolError] = []  # why the job was not ended
        self._requests = 0  # signals until now
        self._done = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether a signal of the user has begun a stop."""
        return self._thread is not None

    def start(self, grace: float) -> None:
        """Start the thread that handles signals of the user, and store the job's id for messages about signals.

        grace: of a stop, in seconds.
        """
        signals.count.job = self._job
        threading.Thread(target=self._listen, args=(grace,), daemon=True).start()

    def _listen(self, grace: float) -> None:
        """Handle signals of the user, pass on those for ranks, and report each second that the job is followed, until close().

        It runs in a thread, since the loop of the session may be blocked by a node or by a reader of our stdout.
        """
        beat_at = 0.0
        while not self._done.wait(0.05):
            self._handle_signals(grace)
            while signals.count.for_ranks:
                self._follower.signal_ranks(signals.count.for_ranks.pop(0))
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT
                self._follower.report_attached()

    def _handle_signals(self, grace: float) -> None:
        """Stop the job, in a thread and with a note, if another SIGINT or SIGTERM has come: first with grace, then by KILL."""
        asked = signals.count.ints + signals.count.terms
        if asked <= self._requests:
            return
        self._requests = asked
        force = asked > 1
        by, code = ("SIGTERM", 143) if signals.count.terms and not signals.count.ints else ("Ctrl+C", 130)
        how: StopHow = {"by": by, "code": code, "grace": grace, "force": force}
        self._thread = threading.Thread(target=self._stop, args=(how,), daemon=True)
        self._thread.start()
        where = self._how.where if self._how is not None else ""
        gently = f"stopping the job on {where} (grace {grace:g} s; Ctrl+C again kills at once)"
        self._call.terminal.note(f"{by}: {'killing everything now' if force else gently}")

    def _stop(self, how: StopHow) -> None:
        """Stop the job, and store the nodes' answers, or the error, which is also a warning."""
        assert self._how is not None
        try:
            self._answers.update(self._how.stop(self._job, how))
            self._errors.clear()
        except ClustertoolError as error:
            self._errors.append(error)
            self._call.terminal.warn(error.what + f" ({error.fix})" * bool(error.fix))

    def close(self) -> None:
        """End the handling of signals: the job is over."""
        self._done.set()

    def show_results(self, watch: JobView) -> None:
        """Wait for a stop that has begun, up to its patience, and print the result on each node. Do nothing without a stop.

        Nodes that are not followed are left out. Raises Survivors if processes are left on a node, or Engine.cancel() has
        raised it.
        """
        if self._thread is None or self._how is None:
            return
        fleet = self._follower.fleet
        self._thread.join(self._how.patience)
        away = {node for node, error in fleet.failed.items() if isinstance(error, NotFound)}  # nothing to stop here
        results = {fleet.name(node): self._stop_result(watch, node) for node in sorted(watch.nodes - away)}
        show_results(results, self._call.note)
        left = [f"{n}: {stop_text(one)}" for n, one in results.items() if one.state is StopState.SURVIVORS]
        if left:
            raise Survivors("; ".join(left), f"{PROGRAM} stop --job {watch.status.job} --force tries again")
        raise_all([error for error in self._errors if isinstance(error, Survivors)])

    def _stop_result(self, watch: JobView, node: int) -> StopResult:
        """Return the result of the stop: by the node's last event if it has ended, else by its answer.

        The coordinator's stop may have been faster, or the connection broken at our request.
        """
        known = watch.status.nodes.get(node)
        if known is not None and known.state is NodeState.ENDED:
            return last_result(tuple(known.survivors))
        return read_result(self._answers.get(self._follower.fleet.name(node)), self._job)


# -- the session -------------------------------------------------------------------------------------------------------


class FollowSession:
    """A session that shows a followed job: keys and signals, lines and news, a copy of logs.

    run() returns when the job is over or the user has left it (`detached`). ends: how an interrupt stops the job; Ctrl+D leaves
    it alone (run, attach). None: an interrupt only leaves (logs -f: raises Interrupted), and news of the job that are no
    warnings are not shown. copy: gets the logs that are shown, and rank 0's. revive: see JobFollower.
    """

    def __init__(
        self,
        call: Call,
        fleet: Fleet,
        inbox: Inbox,
        job: str,
        lines: RankLines,
        ends: Ending | None,
        copy: LocalLogs | None = None,
        revive: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.lines, self.copy = lines, copy
        self._lacks_endpoints = copy is not None
        self._hidden: list[tuple[str, int]] = []  # ranks whose logs are copied and not shown
        self.call, self.fleet, self.inbox = call, fleet, inbox
        self._job, self._stops = job, ends is not None
        patient, pieces = ends is not None, copy is not None
        self._follower = JobFollower(fleet, inbox, job, patient=patient, pieces=pieces, revive=revive)
        self.stopper = JobStopper(call, self._follower, job, ends)
        self._key = DetachKey()
        self.detached = False
        self.left: Mapping[str, list[Key]] = {}  # ranks that may still run after the end, by the name of their node

    @property
    def watch(self) -> JobView:
        return self._follower.watch

    @property
    def again(self) -> str:
        """The command that follows the job again, with the folder for its logs if they were copied."""
        folder = self.copy.shown if self.copy is not None else None
        copied = f" --log-dir {shlex.quote(str(folder))}" if folder is not None else ""
        return f"{PROGRAM} attach --job {self._job}{copied}"

    def start(self, request: FollowWanted, grace: float = 0.0) -> None:
        """Request events and logs of the job from every node; with `ends`, handle signals from now on.

        grace: of a stop, in seconds. The log of rank 0 is requested for the copy, too, if it is not shown.
        """
        if self._stops:
            self.stopper.start(grace)
        shown = request.get("logs", [])
        if self.copy is not None and not isinstance(shown, str) and _FIRST not in shown:
            self._hidden = [_FIRST]
            request = {**request, "logs": [*shown, _FIRST]}
        self._follower.start(request)

    def run(self, until: Callable[[JobStatus], bool] | None = None) -> None:
        """Follow and show the job until it is over, `until` is true, or the user has left by Ctrl+D or by closing the terminal.

        At the end it stops what is left on lost nodes and shows the results. Raises what a signal or a node's invalid frames
        cause, and ReaderGone if the output is closed.
        """

        def done(status: JobStatus) -> bool:
            self.detached = bool(signals.count.hups) or (
                self._stops and not self.stopper.stopping and self._key.pressed()
            )
            return self.detached or (until is not None and until(status))

        self._key.discard_input()
        if self._stops and self._key.readable and until is None:
            self.call.terminal.note("Ctrl+C stops the job; Ctrl+D detaches: the job goes on")
        try:
            # With `ends`, signals are handled by JobStopper.
            for item in self._follower.items((lambda: None) if self._stops else signals.check, done):
                self._show_item(item)
        except ReaderGone:
            if self._stops:
                self.call.terminal.note(f"the output is closed; the job goes on: {self.again}")
            raise
        if self._follower.over:
            self.stopper.close()
            self._warn_of_away_nodes()
            self._stop_remains()
            self.stopper.show_results(self.watch)
            raise_all(self._follower.refusals())

    def report_detached(self) -> None:
        """Print that the user has left the job and how to come back, and give the JSON answer."""
        self.call.terminal.note(f"detached; the job goes on: {self.again}")
        self.call.answer({"job": self._job, "exit": {"code": 0, "source": "tool", "reason": "detached"}})

    def copy_piece(self, piece: LogPiece) -> None:
        """Write a piece of a log to the copy on this machine, if any. The first error is a warning, and ends the copying."""
        if self.copy is not None and not self.copy.failure:
            self.copy.write(piece.log, piece.offset, piece.data)
            if self.copy.failure:
                self.call.terminal.warn(f"logs are not copied any more: {self.copy.failure}")

    def _copy_endpoints(self) -> None:
        """Write endpoints.log to the copy once the endpoints of all trainers are known."""
        endpoints = [process.endpoint for process in self.watch.status.of("trainer")]
        if endpoints and all(endpoints):
            self._lacks_endpoints = False
            self.copy_piece(LogPiece(ENDPOINTS, 0, endpoints_log(endpoints).encode()))

    def _warn_of_away_nodes(self) -> None:
        """Warn of nodes whose last output was not shown, since they did not come back before the end."""
        later = f"{PROGRAM} logs --job {self._job} has it when the node answers"
        shown = f"what was printed there last is not shown; {later}"
        for node in self._follower.missed:
            self.call.terminal.warn(f"{self.watch.status.name(node)} did not come back: {shown}")

    def _stop_remains(self) -> None:
        """Stop ranks that may live on lost nodes, whose supervisor and guard were killed, and print the results.

        Sets `left` to the ranks that may still run. Does nothing without `ends`.
        """
        if self._stops:
            results, self.left = self._follower.end_remains()
            for name, result in results.items():
                if result.state is not StopState.ENDED_ALREADY:
                    self.call.terminal.note(f"{name}, which was lost: {stop_text(result)}")

    def _show_item(self, item: Item) -> None:
        """Write a piece of a log to the copy, print the lines of a rank, or print news: phases as notes, others as warnings.

        Lines of ranks that are only copied are not printed, and without `ends` no phases. Also copies the endpoints once they
        are known.
        """
        if self._lacks_endpoints:
            self._copy_endpoints()
        if isinstance(item, LogPiece):
            self.copy_piece(item)
        elif isinstance(item, LogLines) and (item.role, item.rank) in self._hidden:
            return
        elif isinstance(item, LogLines):
            self.lines.show(item.role, item.rank, self.watch.status.name(item.node), item.lines, item.t)
        elif not isinstance(item, PhaseNews):
            self.call.terminal.warn(news_text(item))
        elif self._stops and not (self.call.terse and item.at_once):
            self.call.terminal.note(news_text(item))


# -- the logs ----------------------------------------------------------------------------------------------------------


def logs_to_show(call: Call) -> Shown:
    """Return which logs the options select: "all", "trainer" for all trainers, or a list of (role, rank), by default rank 0.

    Raises UsageError if --rank is no list of numbers.
    """
    if call.given.all_ranks:
        return "all"
    text = call.given.rank or "0"
    if text == "all":
        return "trainer"
    ranks = [item for item in text.split(",") if item]
    if not ranks or not all(item.isdecimal() for item in ranks):
        raise UsageError(f"--rank {text!r} is not valid", "a rank, several (--rank 3,4), or all")
    return [("trainer", int(item)) for item in ranks]


def prepare_log_folder(call: Call) -> None:
    """Prepare the folder of --log-dir, if it is given, for the logs of another job. Raises DataError if it cannot be used."""
    if call.given.log_dir:
        local_logs.prepare(_log_folder(call))


def copy_of_logs(call: Call, job: str) -> LocalLogs | None:
    """Create the copy of a job's logs on this machine; None without --log-dir and --fetch-logs."""
    if not (call.given.log_dir or call.given.fetch_logs):
        return None
    return LocalLogs(job, _log_folder(call) if call.given.log_dir else None)


def _log_folder(call: Call) -> Path:
    """Return the path of --log-dir."""
    return this_user.expand_home(call.given.log_dir)


def finish_log_copy(follow: FollowSession) -> None:
    """Copy the rest of all logs with --fetch-logs after the end of the job, and print where the copies are.

    Errors are warnings, since the exit code is that of the job. A further signal, also SIGHUP, ends it. Does nothing without a
    copy.
    """
    if follow.copy is None:
        return
    call, job, before = follow.call, follow.watch.status.job, signals.count.total
    signals.count.job = ""  # it is over
    later = f"{PROGRAM} fetch --job {job} --rank all --path log"

    def check() -> None:
        if signals.count.total > before:  # the signal that stopped the job does not end this
            signals.check()

    if call.given.fetch_logs:
        try:
            for piece in read_remaining_logs(follow.fleet, follow.inbox, job, follow.watch, check):
                follow.copy_piece(piece)
                if follow.copy.failure:  # which is reported
                    break
        except ClustertoolError as error:
            call.terminal.warn(f"not all logs were copied: {error.what}; later: {later}")
    more = "" if call.given.fetch_logs else f" (--fetch-logs writes those of all ranks there; now: {later})"
    logs = follow.copy.written - {ENDPOINTS}
    call.terminal.note(f"logs on this machine: {count(len(logs), 'file')} in {follow.copy.folder}{more}")


# -- the verdict -------------------------------------------------------------------------------------------------------


def show_verdict(follow: FollowSession, hide: Hide) -> ClustertoolError | None:
    """Print how the job ended, and return its error, None for success.

    What may still run on lost nodes becomes part of the error, or without one a warning.
    """
    error = _show_failures(follow, hide)
    if not follow.left:
        return error
    text = remains_text(follow.watch.status.job, follow.left)
    if error is None:
        follow.call.terminal.warn(text)
    else:
        error.brief = f"{error.brief or reason(error)}; {text}"
        error.what = f"{error.what}; {text}"
    return error


def _show_failures(follow: FollowSession, hide: Hide) -> ClustertoolError | None:
    """Print what failed, with the last lines of up to three different errors, and which ranks were stopped for that.

    Returns the error of the job, None for success. It gets a fix if a Python module is missing, and is marked as printed if its
    reason is on the screen.
    """
    terminal, watch = follow.call.terminal, follow.watch
    status, outcome = watch.status, watch.status.outcome
    error = error_of(status)
    if outcome is None:
        return error
    printed = watch.printed(outcome)
    if outcome.state is JobState.FAILED:
        terminal.note(abort_line(status, outcome))
        if not printed:
            terminal.error(outcome.reason)
        for alike in news.failed_by_themselves(status, outcome)[:_MOST_ERRORS]:
            lines = _show_last_lines(follow, hide, alike)
            if error is not None and not error.fix:
                error.fix = _missing_module(lines, status.name(alike[0].node), follow.fleet.cluster.job_python)
    victims = victims_line(outcome)
    if victims:
        terminal.note(victims)
    if isinstance(error, (Interrupted, Terminated)):
        terminal.error(f"the job was stopped: {outcome.reason}")
        error.printed, error.brief = True, outcome.reason
    elif isinstance(error, JobFailed) or (isinstance(error, NodeLost) and printed):
        error.printed, error.brief = True, brief(status, outcome)
    return error


def _show_last_lines(follow: FollowSession, hide: Hide, alike: Sequence[ProcessStatus]) -> Sequence[str]:
    """Print the last lines of the first of several processes with the same error, and return them.

    If they are on the screen already, print only where, and return them. If the log is on another machine, has no lines, or its
    node does not answer, print that, and return an empty sequence. hide: masks secrets.
    """
    terminal, first, name = follow.call.terminal, alike[0], follow.watch.status.name(alike[0].node)
    log = JobPaths.log(first.role, first.rank, first.attempt)
    if isinstance(follow.fleet.failed.get(first.node), NotFound):
        terminal.note(f"the log of {first.role} {first.rank} is on {name}: {log}")
        return ()
    lines = last_lines(follow.fleet, follow.watch.status.job, first, hide)
    about = f"last lines of {first.role} {first.rank} ({name}, {log})"
    if not lines:
        terminal.note(f"no {about}: it has printed nothing, or its node does not answer")
        return lines
    if follow.lines.on_screen(first.role, first.rank, lines):
        terminal.note(f"{about}: see above")
        return lines
    terminal.note(f"{about}:")
    for line in lines:
        terminal.note(prefix(first.role, first.rank, name) + line)
    return lines


def _missing_module(lines: Sequence[str], node: str, python: str) -> str:
    """Build the fix for the module in the last of these lines that names one which Python does not find; "" without one.

    node: the name of the process's node. python: what python3 is for jobs of this machine, "" on other nodes.
    """
    names = (match[1] for match in map(_NO_MODULE.search, reversed(lines)) if match)
    name = next(names, "")
    if not name:
        return ""
    if python:
        return f"python3 is {python}: activate the environment that has {name}, or install {pip_name(name)} in this one"
    where = f"for python3 on {node}, or have PRELUDE in conf.py activate the environment that has it"
    return f"install {pip_name(name)} {where}; {PROGRAM} check compares the nodes"
