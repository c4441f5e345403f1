"""A session follows a job until its verdict: it reads frames of all nodes, prints lines and news, and handles signals."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from clustertool.errors import BadAnswer, ClustertoolError, NotFound, Survivors, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.job.outcome import LEAD, Key
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import NodeState, StopState
from clustertool.model.job.stop_result import StopResult, last_result, read_result
from clustertool.model.planning import requests
from clustertool.model.wire.agent_answers import StopAnswer
from clustertool.model.wire.agent_requests import FollowRequest, FollowWanted, StopHow
from clustertool.model.wire.messages import ATTACHED, FOLLOW
from clustertool.model.wire.stream_messages import StreamFrame
from clustertool.show.outcome_view import show_results, stop_text
from clustertool.show.prefix import RankLines
from clustertool.show.terminal import ReaderGone
from clustertool.verbs import signals
from clustertool.verbs.verb import Call
from clustertool.watch.job_view import Item, JobView, LogLines

Frame = tuple[int, StreamFrame, bytes]
_QUEUE = 64  # frames of up to 256 KiB that wait for a slow terminal
_RETRY = 1.0
_BEAT = 1.0
_CHECK = 0.2  # seconds between two checks of the nodes while frames arrive continuously
_NAP = 1.0  # seconds between two checks after which this process was blocked: Ctrl+Z, a terminal that does not read
_BEHIND = (
    0.005,
    0.5,
)  # seconds for each node, and at most, after which those of a new job are followed that do not lead it
_RETURN = 3.0  # seconds that a node which broke off may take to come back once the verdict is known


class Inbox:
    """Frames from the agents' reader threads, bounded so that an endless log never fills the laptop's memory."""

    def __init__(self) -> None:
        self._frames: queue.Queue[Frame] = queue.Queue(_QUEUE)

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        self._frames.put((node, header, payload))

    def get(self, wait: float) -> Frame | None:
        with contextlib.suppress(queue.Empty):
            return self._frames.get(timeout=wait)
        return None


class NodeQueues:
    """Frames of each node in a queue of its own, each one bounded: a reader in order of time waits for the right one."""

    def __init__(self) -> None:
        self._lanes: dict[int, queue.Queue[Frame]] = defaultdict(lambda: queue.Queue(8))
        self._lock = threading.Lock()

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        self._lane(node).put((node, header, payload))

    def next(self, node: int) -> Frame:
        """This node's next frame, waited for. Raises Interrupted."""
        while True:
            signals.check()
            with contextlib.suppress(queue.Empty):
                return self._lane(node).get(timeout=0.1)

    def _lane(self, node: int) -> queue.Queue[Frame]:
        with self._lock:
            return self._lanes[node]


class JobStopper:
    """The signals of the user while a job is followed: the first one stops the job on all nodes, the next one kills it."""

    def __init__(self, call: Call, fleet: Fleet, job: str) -> None:
        self._call = call
        self._fleet = fleet
        self._job = job
        self._thread: threading.Thread | None = None
        self._answers: dict[int, StopAnswer | ClustertoolError] = {}
        self._requests = 0  # signals until now
        self._done = threading.Event()

    @property
    def stopping(self) -> bool:
        return self._thread is not None

    def start(self, grace: float) -> None:
        signals.count.job = self._job
        threading.Thread(target=self._listen, args=(grace,), daemon=True).start()

    def _listen(self, grace: float) -> None:
        """In a thread, because the loop may be blocked: no program reads our stdout, or a node does not answer."""
        beat_at = 0.0
        while not self._done.wait(0.05):
            self._signals(grace)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT
                self._attached()

    def _attached(self) -> None:
        """Report to the lead's node that a laptop is attached: --lease counts from the last such report."""
        if LEAD in self._fleet.agents:
            self._fleet.agents[LEAD].send(ATTACHED({"job": self._job}))

    def _signals(self, grace: float) -> None:
        asked = signals.count.ints + signals.count.terms
        if asked <= self._requests:
            return
        self._requests = asked
        force = asked > 1
        by, code = ("SIGTERM", 143) if signals.count.terms and not signals.count.ints else ("Ctrl+C", 130)
        how: StopHow = {"by": by, "code": code, "grace": grace, "force": force}
        self._thread = threading.Thread(target=self._stop, args=(how, grace), daemon=True)
        self._thread.start()
        gently = f"stopping the job on all nodes (grace {grace:g} s; Ctrl+C again kills at once)"
        hint = "killing everything now" if force else gently
        self._call.terminal.note(f"{by}: {hint}")

    def _stop(self, how: StopHow, grace: float) -> None:
        request = requests.stop(self._job, how)
        gathered = self._fleet.ask(dict.fromkeys(self._fleet.agents, request), timeout=grace + 20, patient=True)
        self._answers.update(gathered.ok)
        self._answers.update(gathered.failed)

    def close(self) -> None:
        """The job is over: read no more signals."""
        self._done.set()

    def show_results(self, watch: JobView) -> None:
        """Show the result of a stop on each node. Raises Survivors."""
        if self._thread is None:
            return
        self._thread.join(5.0)
        results = {self._fleet.name(node): self._result(watch, node) for node in sorted(watch.nodes)}
        show_results(results, self._call.terminal)
        left = [f"{n}: {stop_text(one)}" for n, one in results.items() if one.state is StopState.SURVIVORS]
        if left:
            raise Survivors("; ".join(left), "inv stop --force tries again")

    def _result(self, watch: JobView, node: int) -> StopResult:
        """From the node's last event, else from its answer to the stop: the lead's stop may have been faster, or the
        connection broken at our request."""
        known = watch.status.nodes.get(node)
        if known is not None and known.state is NodeState.ENDED:
            return last_result(tuple(known.survivors))
        return read_result(self._answers.get(node), self._job)


class FollowSession:
    """One attached session of a job. run() returns when the job is over or the user has left it.

    stops: an interrupt stops the job (run, attach); else it only leaves (logs -f: raises Interrupted), and news of the
    job that are no warnings are not shown. ranks: the node of each rank, where the plan is known.
    """

    def __init__(
        self,
        call: Call,
        fleet: Fleet,
        inbox: Inbox,
        job: str,
        lines: RankLines,
        *,
        stops: bool = True,
        ranks: Mapping[Key, int] | None = None,
    ) -> None:
        self._stops = stops
        self._call = call
        self.fleet = fleet
        self._inbox = inbox
        self._job = job
        self.lines = lines
        self.watch = JobView(frozenset(range(len(fleet.cluster.hosts))), JobStatus(plan=ranks))
        self._request: FollowRequest = {"job": job}
        self._stopper = JobStopper(call, fleet, job)
        self._checked_at = 0.0
        self._others: list[int] = []  # nodes that are followed a moment later
        self._others_at = 0.0
        self._reopening: set[int] = set()
        self._away: set[int] = set()  # nodes whose lost connection was reported
        self._verdict_at = 0.0
        self.detached = False

    @property
    def stopping(self) -> bool:
        """The user asked for an end."""
        return self._stopper.stopping

    def start(self, request: FollowWanted, grace: float = 0.0, *, new: bool = False) -> None:
        """Request events and logs from every node. From here on an interrupt stops the job.

        new: the job has just been launched. Then all nodes join the lead, and this must not delay them: only the
        lead's node is asked at once, and the others a moment later; until then their events are on their disks.
        """
        self._request = {**request, "job": self._job}
        if self._stops:
            self._stopper.start(grace)
        first = [node for node in self.fleet.agents if not new or node == LEAD]
        self._others = [node for node in self.fleet.agents if node not in first]
        self._others_at = time.monotonic() + min(_BEHIND[0] * len(self._others), _BEHIND[1])
        self._missing(self.fleet.failed)
        self._ask(first)

    def _ask(self, nodes: Sequence[int]) -> None:
        gathered = self.fleet.ask(dict.fromkeys(nodes, FOLLOW(self._request)), patient=self._stops)
        self._missing(gathered.failed)
        self.watch.received.update(dict.fromkeys(gathered.ok, time.monotonic()))

    def _missing(self, failed: Mapping[int, ClustertoolError]) -> None:
        for node, error in failed.items():
            self.watch.closed[node] = error.what
            if isinstance(error, NotFound):  # its directory was removed there: nothing will come
                self.watch.ended.add(node)

    def _ask_others(self) -> None:
        if self._others and time.monotonic() > self._others_at:
            others, self._others = self._others, []
            self._ask(others)

    def run(self, until: Callable[[JobStatus], bool] = lambda _: False) -> None:
        """Until the job is over, `until` is true, or the user's terminal is closed (`detached`)."""
        try:
            self._follow(until)
            self._show(self.watch.rest())
        except ReaderGone:
            if self._stops:
                self._call.terminal.note(f"the output is closed; the job goes on: inv attach --job {self._job}")
            raise
        if self._over():
            self._stopper.close()
            self._tell_away()
            self._stopper.show_results(self.watch)
            if self.watch.status.outcome is None:
                raise_all([self._refusal(node, why) for node, why in sorted(self.watch.refused.items())])

    def _refusal(self, node: int, why: str) -> BadAnswer:
        fix = f"the job may still run: inv stop --job {self._job}; check its records on that node"
        return BadAnswer(why, fix, self.watch.name(node))

    def _follow(self, until: Callable[[JobStatus], bool]) -> None:
        while not self._over() and not until(self.watch.status):
            self._ask_others()
            frame = self._inbox.get(0.05)
            now = time.monotonic()
            if not self._stops:
                signals.check()
            if frame is not None:
                self._show(self.watch.take(frame[0], frame[1], frame[2], now))
            if frame is None or now - self._checked_at > _CHECK:
                if now - (self._checked_at or now) > _NAP:
                    self.watch.blocked(now - self._checked_at, now)
                self._checked_at = now
                self._show(self.watch.idle(now))
                self._show(self.watch.remind(time.time()))
                self._check_nodes(now)
            if signals.count.hups:
                self.detached = True
                return

    def _over(self) -> bool:
        """Every node has ended, was given up by the lead, or stays away after the verdict."""
        outcome = self.watch.status.outcome
        if outcome is None:
            return self.watch.over and not self._reopening
        self._verdict_at = self._verdict_at or time.monotonic()
        late = time.monotonic() - self._verdict_at > _RETURN
        for node in self.watch.nodes - self.watch.ended:
            known = self.watch.status.nodes.get(node)
            if known is not None and known.state is NodeState.LOST:
                continue
            if node in self.watch.closed and late:
                continue
            return False
        return True

    def _tell_away(self) -> None:
        """What nodes wrote that were not there for the end is not lost, but has not been shown."""
        for node in sorted(self._away - self.watch.ended):
            known = self.watch.status.nodes.get(node)
            if known is None or known.state is not NodeState.LOST:
                shown = (
                    f"what was printed there last is not shown; inv logs --job {self._job} has it when the node answers"
                )
                self._call.terminal.warn(f"{self.watch.name(node)} did not come back: {shown}")

    def _show(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, LogLines):
                self.lines.show(item.role, item.rank, self.watch.name(item.node), item.lines)
            elif item.level == "warn":
                self._call.terminal.warn(item.text)
            elif self._stops:
                self._call.terminal.note(item.text)

    # -- broken connections --

    def _check_nodes(self, now: float) -> None:
        """A node that is silent or lost is asked again, in a thread, until it answers or the job is over."""
        self.fleet.serve()
        timeout = self.fleet.cluster.loss_timeout
        for node in self.watch.nodes - self.watch.ended - self._reopening - set(self.watch.refused):
            silent = now - self.watch.received.get(node, now) > timeout
            if node in self.watch.closed or silent:
                if silent and node not in self.watch.closed:
                    self.watch.closed[node] = f"silent for {timeout:g} s"
                if node in self.fleet.agents:
                    if node not in self._away:
                        why = f"connection lost ({self.watch.closed[node]}), trying again"
                        self._call.terminal.warn(f"{self.watch.name(node)}: {why}")
                    self._away.add(node)
                    self._reopening.add(node)
                    threading.Thread(target=self._reopen, args=(node,), daemon=True).start()

    def _reopen(self, node: int) -> None:
        while node not in self.watch.ended and node not in self.watch.refused:
            time.sleep(_RETRY)
            try:
                agent = self.fleet.reopen(node)
                offsets, events_at = self.watch.offsets.get(node, {}), self.watch.events_at.get(node, 0)
                agent.ask(FOLLOW({**self._request, "offsets": offsets, "events_at": events_at}))
            except BadAnswer as error:
                self._inbox.put(node, {"type": "closed", "why": error.what, "refused": True}, b"")
                break
            except ClustertoolError as error:
                known = self.watch.status.nodes.get(node)
                if self.watch.status.outcome is not None or (known is not None and known.state is NodeState.LOST):
                    self.watch.closed[node] = error.what
                    break
                continue
            self.watch.received[node] = time.monotonic()
            self.watch.reopened(node)
            self._away.discard(node)
            break
        self._reopening.discard(node)
