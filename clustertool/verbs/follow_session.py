"""A session shows a followed job to the user until its verdict: it prints lines and news, and handles signals."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clustertool.actions.follow_job import BEAT, Inbox, JobFollower
from clustertool.engines.base import Engine
from clustertool.errors import ClustertoolError, NotFound, Survivors, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer.local_logs import LocalLogs
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Key
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import NodeState, StopState
from clustertool.model.job.stop_result import StopResult, last_result, read_result
from clustertool.model.paths import ENDPOINTS, endpoints_log
from clustertool.model.wire.agent_answers import StopAnswer
from clustertool.model.wire.agent_requests import FollowWanted, StopHow
from clustertool.show.job_text import news_text, show_results, stop_text
from clustertool.show.prefix import RankLines
from clustertool.show.terminal import ReaderGone
from clustertool.verbs import signals
from clustertool.verbs.detach_key import DetachKey
from clustertool.verbs.verb import Call
from clustertool.watch.job_view import Item, JobView, LogLines, LogPiece
from clustertool.watch.news import PhaseNews

_FIRST = ("trainer", 0)


@dataclass(frozen=True)
class Ending:
    """How an interrupt ends a job.

    stop: returns what the nodes have answered, by their names. patience: seconds for the rest of that after the records of all
    nodes have the end. where: on which nodes.
    """

    stop: Callable[[str, StopHow], Mapping[str, StopAnswer | ClustertoolError]]
    patience: float = 5.0
    where: str = "all nodes"


def ending(engine: Engine) -> Ending:
    """Choose who proves the end of a job, and how long it may take: the engine where it runs the job, else the agents."""
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
        return self._thread is not None

    def start(self, grace: float) -> None:
        signals.count.job = self._job
        threading.Thread(target=self._listen, args=(grace,), daemon=True).start()

    def _listen(self, grace: float) -> None:
        """Pass on signals and report that the job is followed, in a thread.

        The loop may be blocked: no program reads our stdout, or a node does not answer.
        """
        beat_at = 0.0
        while not self._done.wait(0.05):
            self._signals(grace)
            while signals.count.for_ranks:
                self._follower.signal_ranks(signals.count.for_ranks.pop(0))
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT
                self._follower.report_attached()

    def _signals(self, grace: float) -> None:
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
        assert self._how is not None
        try:
            self._answers.update(self._how.stop(self._job, how))
            self._errors.clear()
        except ClustertoolError as error:
            self._errors.append(error)
            self._call.terminal.warn(error.what + f" ({error.fix})" * bool(error.fix))

    def close(self) -> None:
        """Read no more signals: the job is over."""
        self._done.set()

    def show_results(self, watch: JobView) -> None:
        """Show the result of a stop on each node. Raises Survivors."""
        if self._thread is None or self._how is None:
            return
        fleet = self._follower.fleet
        self._thread.join(self._how.patience)
        away = {node for node, error in fleet.failed.items() if isinstance(error, NotFound)}  # nothing to stop here
        results = {fleet.name(node): self._result(watch, node) for node in sorted(watch.nodes - away)}
        show_results(results, self._call.note)
        left = [f"{n}: {stop_text(one)}" for n, one in results.items() if one.state is StopState.SURVIVORS]
        if left:
            raise Survivors("; ".join(left), f"{PROGRAM} stop --job {watch.status.job} --force tries again")
        raise_all([error for error in self._errors if isinstance(error, Survivors)])

    def _result(self, watch: JobView, node: int) -> StopResult:
        """Read the result of the stop from the node's last event, else from its answer to the stop.

        The coordinator's stop may have been faster, or the connection broken at our request.
        """
        known = watch.status.nodes.get(node)
        if known is not None and known.state is NodeState.ENDED:
            return last_result(tuple(known.survivors))
        return read_result(self._answers.get(self._follower.fleet.name(node)), self._job)


class FollowSession:
    """One attached session of a job. run() returns when the job is over or the user has left it (`detached`).

    ends: how an interrupt stops the job; Ctrl+D leaves it alone (run, attach). None: an interrupt only leaves (logs -f: raises
    Interrupted), and news of the job that are no warnings are not shown. copy: gets the logs that are shown, and rank 0's.
    revive: see JobFollower.
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
        self._call, self._job, self._stops = call, job, ends is not None
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
        """The command that follows the job again, and copies its logs again if they were copied."""
        folder = self.copy.shown if self.copy is not None else None
        copied = f" --log-dir {shlex.quote(str(folder))}" if folder is not None else ""
        return f"{PROGRAM} attach --job {self._job}{copied}"

    def start(self, request: FollowWanted, grace: float = 0.0) -> None:
        """Request events and logs from every node. From here on an interrupt stops the job."""
        if self._stops:
            self.stopper.start(grace)
        shown = request.get("logs", [])
        if self.copy is not None and not isinstance(shown, str) and _FIRST not in shown:
            self._hidden = [_FIRST]
            request = {**request, "logs": [*shown, _FIRST]}
        self._follower.start(request)

    def run(self, until: Callable[[JobStatus], bool] | None = None) -> None:
        """Follow the job until it is over, `until` is true, the user has pressed Ctrl+D, or the user's terminal is closed."""

        def done(status: JobStatus) -> bool:
            self.detached = bool(signals.count.hups) or (
                self._stops and not self.stopper.stopping and self._key.pressed()
            )
            return self.detached or (until is not None and until(status))

        self._key.forget()
        if self._stops and self._key.readable and until is None:
            self._call.terminal.note("Ctrl+C stops the job; Ctrl+D detaches: the job goes on")
        try:
            for item in self._follower.items(self._check, done):
                self._show(item)
        except ReaderGone:
            if self._stops:
                self._call.terminal.note(f"the output is closed; the job goes on: {self.again}")
            raise
        if self._follower.over:
            self.stopper.close()
            self._tell_away()
            self._end_remains()
            self.stopper.show_results(self.watch)
            raise_all(self._follower.refusals())

    def tell_detached(self) -> None:
        """Report that the user has left the job, and how to come back."""
        self._call.terminal.note(f"detached; the job goes on: {self.again}")
        if self._call.json:
            self._call.answer({"job": self._job, "exit": {"code": 0, "source": "tool", "reason": "detached"}})

    def copy_piece(self, piece: LogPiece) -> None:
        """Write it to the folder of this machine. The first error of that is reported, and ends the copying."""
        if self.copy is not None and not self.copy.failure:
            self.copy.write(piece.log, piece.offset, piece.data)
            if self.copy.failure:
                self._call.terminal.warn(f"logs are not copied any more: {self.copy.failure}")

    def _copy_endpoints(self) -> None:
        """Write endpoints.log with the logs, when the records of all nodes have come."""
        endpoints = [process.endpoint for process in self.watch.status.of("trainer")]
        if endpoints and all(endpoints):
            self._lacks_endpoints = False
            self.copy_piece(LogPiece(ENDPOINTS, 0, endpoints_log(endpoints).encode()))

    def _check(self) -> None:
        """Raise an interrupt if it does not stop the job. JobStopper counts the others."""
        if not self._stops:
            signals.check()

    def _tell_away(self) -> None:
        """Warn of nodes that were not there for the end: what they wrote is not lost, but has not been shown."""
        shown = (
            f"what was printed there last is not shown; {PROGRAM} logs --job {self._job} has it when the node answers"
        )
        for node in self._follower.missed:
            self._call.terminal.warn(f"{self.watch.status.name(node)} did not come back: {shown}")

    def _end_remains(self) -> None:
        """End the ranks of a node whose supervisor and guard were killed together."""
        if self._stops:
            results, self.left = self._follower.end_remains()
            for name, result in results.items():
                if result.state is not StopState.ENDED_ALREADY:
                    self._call.terminal.note(f"{name}, which was lost: {stop_text(result)}")

    def _show(self, item: Item) -> None:
        if self._lacks_endpoints:
            self._copy_endpoints()
        if isinstance(item, LogPiece):
            self.copy_piece(item)
        elif isinstance(item, LogLines) and (item.role, item.rank) in self._hidden:
            return
        elif isinstance(item, LogLines):
            self.lines.show(item.role, item.rank, self.watch.status.name(item.node), item.lines, item.t)
        elif not isinstance(item, PhaseNews):
            self._call.terminal.warn(news_text(item))
        elif self._stops and not (self._call.terse and item.at_once):
            self._call.terminal.note(news_text(item))
