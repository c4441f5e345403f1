"""Following a job: the frames of all nodes become log lines and news until its verdict. Lost connections are opened again."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from clustertool.actions.stop_jobs import stop_how
from clustertool.errors import BadAnswer, ClustertoolError, NotFound
from clustertool.fleet.fleet import Check, Fleet
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import COORDINATOR_NODE, Key
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import NodeState, RankState
from clustertool.model.job.stop_result import StopResult, read_result
from clustertool.model.wire.agent_answers import Answer, StopAnswer
from clustertool.model.wire.agent_requests import FollowRequest, FollowWanted
from clustertool.model.wire.messages import ATTACHED, FOLLOW, SIGNAL, Request, stop_request
from clustertool.model.wire.stream_messages import StreamFrame
from clustertool.watch.job_view import Item, JobView
from clustertool.watch.lines import Frame
from clustertool.watch.news import DisconnectNews, RevivedNews

BEAT = 1.0  # seconds between two reports that a job is followed
_QUEUE = 64  # frames of up to 256 KiB that wait for a slow reader
_FULL = 1.0  # seconds between two checks whether there is a reader
_SILENT = 3.0  # seconds without a heartbeat of an agent, which sends one a second
_REMAINS = 10.0  # seconds beyond the grace that a node may take to end what its supervisor has left
_IN_DOUBT = (RankState.LOST, RankState.UNKNOWN)
_RETRY = 1.0
_LONGEST_RETRY = 30.0  # for a node of an elastic job that the others have lost
_CHECK = 0.2  # seconds between two checks of the nodes while frames arrive continuously
_NAP = 1.0  # seconds between two checks after which this process was blocked: Ctrl+Z, a terminal that does not read
_ASK = 5.0  # seconds between two questions to the engine whether the job has ended
_MOMENT = 3.0  # seconds in which a node may end whose connection was lost: where an engine knows the end of nodes
_LATE = 10.0  # seconds that records may come after the engine knows the end: a shared file system shows them late
_RETURN = 3.0  # seconds that a node which broke off may take to come back once the verdict is known
_RESTORE = 12.0  # the same where an engine may have the logs of ended nodes, which are fetched from it


def attached(fleet: Fleet, job: str, node: int = COORDINATOR_NODE) -> None:
    """Report to the job that it is followed: --lease counts from the last such report.

    node: of the job, which passes it on to the coordinator.
    """
    if node in fleet.agents:
        fleet.agents[node].send(ATTACHED({"job": job}))


class Inbox:
    """Frames from the agents' reader threads, bounded so that an endless log never fills the laptop's memory.

    close() when no more of them are read: else these threads wait in put() as long as the program lives.
    """

    def __init__(self, size: int = _QUEUE) -> None:
        self._frames: queue.Queue[Frame] = queue.Queue(size)
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self._frames.put((node, header, payload), timeout=_FULL)
                return

    def get(self, wait: float) -> Frame | None:
        with contextlib.suppress(queue.Empty):
            return self._frames.get(timeout=wait)
        return None

    def frames(self, check: Check) -> Iterator[Frame]:
        """Yield every frame, and wait for the next one. Raises what `check` raises."""
        while True:
            check()
            frame = self.get(0.1)
            if frame is not None:
                yield frame


class NodeQueues:
    """Frames of each node in a queue of its own, each one bounded: a reader in order of time waits for the right one."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._inboxes: dict[int, Inbox] = defaultdict(lambda: Inbox(8))
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the queues of all nodes, as Inbox.close() does."""
        with self._lock:
            self._closed = True
            for inbox in self._inboxes.values():
                inbox.close()

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        if not self._closed:
            self._of(node).put(node, header, payload)

    def next(self, node: int) -> Frame:
        """Wait for this node's next frame. Raises what `check` raises."""
        return next(self._of(node).frames(self._check))

    def _of(self, node: int) -> Inbox:
        with self._lock:
            return self._inboxes[node]


class EngineQuestion:
    """Asks the engine regularly why a job has ended, in a thread, where the agents only read records. `reason`: its answer."""

    def __init__(self, fleet: Fleet, job: str) -> None:
        self._ask, self._job = fleet.engine_end, job
        self._next = 0.0
        self._since: float | None = None  # when the engine has answered that the job has ended
        self._asking = False
        self.reason = ""

    def ended_for(self, now: float) -> float:
        """Ask the engine now and then, and count the seconds since it was known that the job has ended; 0.0 before.

        Call it regularly. now: time.monotonic().
        """
        if self._ask is not None and self._since is None and not self._asking and now >= self._next:
            self._asking, self._next = True, now + _ASK
            threading.Thread(target=self._question, args=(self._ask,), daemon=True).start()
        return now - self._since if self._since is not None else 0.0

    def _question(self, ask: Callable[[str], str | None]) -> None:
        try:
            found = ask(self._job)
            if found is not None:
                self.reason, self._since = found, time.monotonic()
        finally:
            self._asking = False


class LostNodes:
    """The nodes of an elastic job that do not take part: each one is started again, by a follower that stays attached.

    take() frames and turn() regularly. returned(): the connection to a node was opened again. All but turn() may be called in
    threads.
    """

    def __init__(self, follower: JobFollower, job: str, revive: Callable[[str, int], bool] | None) -> None:
        self._follower, self._job, self._revive = follower, job, revive
        self._elastic = False
        self._tries: Counter[int] = Counter()  # by node
        self._next: dict[int, float] = {}  # when a node is tried again
        self._busy: set[int] = set()
        self._revived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._follows: Counter[int] = Counter()  # of nodes whose supervisor has died
        self._follow_at: dict[int, float] = {}  # when such a node is followed again
        self._epoch = 0  # the newest one
        self._quiet_since: float | None = None  # since when all nodes have ended, and none knows how the job has

    def take(self, frame: Frame) -> None:
        header = frame[1]
        if header["type"] == "events" and not self._elastic:
            self._elastic = any(event.get("type") == "job" and "lead" in event for event in header["events"])

    def pause(self, node: int) -> float:
        """Compute the seconds before the next attempt to open a lost connection."""
        if not (self._elastic and self._follower.lost(node)):
            return _RETRY
        self._tries[node] += 1
        return _retry_pause(self._tries[node] - 1)

    def returned(self, node: int) -> None:
        self._tries[node] = 0
        self._next[node] = 0.0

    def turn(self, now: float) -> Iterator[RevivedNews]:
        watch = self._follower.watch
        with contextlib.suppress(queue.Empty):
            node = self._revived.get_nowait()
            self._expect([node])
            yield RevivedNews(time.time(), watch.status.name(node))
        if not self._elastic or watch.status.outcome is not None:
            return
        self._follow_again(now)
        if self._revive is None:
            return
        for node in watch.nodes - set(watch.closed) - self._busy:
            due = self._next.get(node)
            if due is not None and now >= due or due is None and self._follower.lost(node):
                self._busy.add(node)
                threading.Thread(target=self._start, args=(node, self._revive), daemon=True).start()

    @property
    def may_run(self) -> bool:
        """Check whether a node may run although all have ended, as far as they are followed, and have them asked once more.

        One that was started again coordinates the job, perhaps.
        """
        now = time.monotonic()
        if self._elastic and self._quiet_since is None:
            self._quiet_since = now
            self._follow_at.clear()
        return self._quiet_since is not None and now - self._quiet_since < _RETURN

    def _expect(self, nodes: Iterable[int]) -> None:
        """Follow these nodes again, since they take part again."""
        self._quiet_since = None
        for node in nodes:
            self._follows[node], self._follow_at[node] = 0, 0.0

    def _follow_again(self, now: float) -> None:
        """Follow nodes again whose supervisor has died, in threads.

        Such a node sends nothing more. It may take part in a later epoch, and even coordinate it.
        """
        watch = self._follower.watch
        for epoch in watch.status.epochs[-1:]:
            if epoch.attempt != self._epoch:
                self._epoch = epoch.attempt
                self._expect(epoch.nodes)
        for node in watch.ended - set(watch.closed):
            known = watch.status.nodes.get(node)
            if known is not None and known.ended is None and now >= self._follow_at.get(node, 0.0):
                self._follows[node] += 1
                self._follow_at[node] = now + _retry_pause(self._follows[node])
                threading.Thread(target=self._follower.follow_again, args=(node,), daemon=True).start()

    def _start(self, node: int, revive: Callable[[str, int], bool]) -> None:
        try:
            if revive(self._job, node):
                self._revived.put(node)
            self._tries[node] = 0
            self._next.pop(node, None)
            if self._follower.lost(node):
                self._next[node] = time.monotonic() + _LONGEST_RETRY
        except ClustertoolError:
            self._tries[node] += 1
            self._next[node] = time.monotonic() + _retry_pause(self._tries[node])
        finally:
            self._busy.discard(node)


class JobFollower:
    """Follows one job: start(), then items() until the job is over. `watch` has what is known of the job.

    patient: an interrupt does not end the first requests. pieces: the bytes of logs are items, too. revive: starts a node of an
    elastic job again that does not take part; returns whether it was started, or raises ClustertoolError.
    """

    def __init__(
        self,
        fleet: Fleet,
        inbox: Inbox,
        job: str,
        patient: bool = False,
        pieces: bool = False,
        revive: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.fleet = fleet
        self.watch = JobView(frozenset(range(len(fleet.cluster.hosts))), pieces=pieces)
        self.watch.status.job = job  # nodes may have no record that names it
        self._inbox, self._job, self._patient = inbox, job, patient
        self._request: FollowRequest = {"job": job}
        self._checked_at = self._verdict_at = self._alone_at = 0.0
        self._reopening: set[int] = set()
        self._left = False  # the caller reads no more items
        self._late: list[int] = []
        self._away: set[int] = set()  # nodes whose connection was lost
        self._unreported: dict[
            int, tuple[float, str]
        ] = {}  # those of which it is not shown so far: since when, and why
        self._engine = EngineQuestion(fleet, job)
        self._lost_nodes = LostNodes(self, job, revive)

    def start(self, request: FollowWanted) -> None:
        """Request events and logs from every node. Those of a fleet that are late follow when they have logged in."""
        self._request = {**request, "job": self._job}
        self._late = self.fleet.late
        self._follow(self.fleet.agents, self.fleet.failed)

    def _follow(self, nodes: Iterable[int], failed: Mapping[int, ClustertoolError]) -> None:
        """Request events and logs from these nodes; those of `failed` cannot be asked."""
        gathered = self.fleet.ask(dict.fromkeys(nodes, FOLLOW(self._request)), patient=self._patient)
        self.watch.received.update(dict.fromkeys(gathered.ok, time.monotonic()))
        for node, error in {**failed, **gathered.failed}.items():
            self.watch.closed[node] = error.what
            if isinstance(error, NotFound):  # its directory was removed there: nothing will come
                self.watch.ended.add(node)

    def items(self, check: Check, until: Callable[[JobStatus], bool] = lambda _: False) -> Iterator[Item]:
        """Yield what is new, until the job is over or `until` is true. `check` may raise what ends this."""
        self._left = False
        try:
            while not self.over and not until(self.watch.status):
                frame = self._inbox.get(0.05)
                now = time.monotonic()
                check()
                if frame is not None:
                    yield from self.watch.take(*frame, now)
                    self._lost_nodes.take(frame)
                if frame is None or now - self._checked_at > _CHECK:
                    if now - (self._checked_at or now) > _NAP:
                        self.watch.blocked(now - self._checked_at, now)
                    self._checked_at = now
                    yield from self.watch.idle(now)
                    yield from self.watch.remind(time.time())
                    yield from self._check_nodes(now)
                    yield from self._lost_nodes.turn(now)
                    if self._engine.ended_for(now) > _LATE or self._given_up(now):
                        yield from self.watch.end_by_engine(self._engine.reason, time.time())
            yield from self.watch.rest()
        finally:
            self._left = True

    def _given_up(self, now: float) -> bool:
        """Check whether no record of the coordinator comes, and the others have ended because of that.

        Agents that only read records do not know that it is dead, and an engine may know it minutes later.
        """
        if self.fleet.engine_end is None or not self.watch.without_coordinator:
            return False
        self._alone_at = self._alone_at or now
        return now - self._alone_at > _LATE

    @property
    def over(self) -> bool:
        """Every node has ended, was given up by the coordinator, or stays away after the verdict, as a spare node may do."""
        outcome = self.watch.status.outcome
        if outcome is None:
            broken = self._broken & set(self.watch.received)  # not those that never followed the job
            return self.watch.over and not self._reopening and not broken and not self._lost_nodes.may_run
        self._verdict_at = self._verdict_at or time.monotonic()
        late = time.monotonic() - self._verdict_at > (_RETURN if self.fleet.engine_end is None else _RESTORE)
        left = self.watch.nodes - self.watch.ended
        return all(self.lost(node) or (late and (node in self.watch.closed or self._spare(node))) for node in left)

    def _spare(self, node: int) -> bool:
        """Check whether a node takes no part in the last epoch of an elastic job."""
        return any(node not in epoch.nodes for epoch in self.watch.status.epochs[-1:])

    def report_attached(self) -> None:
        """See attached(). In an elastic job the coordinator of the newest epoch gets it, or another node of this epoch."""
        epochs, closed = self.watch.status.epochs[-1:], self.watch.closed
        nodes = (self.watch.status.coordinator, *(node for epoch in epochs for node in epoch.nodes))
        attached(self.fleet, self._job, next((node for node in nodes if node not in closed), COORDINATOR_NODE))

    def signal_ranks(self, number: int) -> None:
        """Pass a signal on to the ranks on this machine."""
        for agent in self.fleet.agents.values():
            if agent.host.here:
                agent.send(SIGNAL({"job": self._job, "number": number}))

    @property
    def _broken(self) -> set[int]:
        """Nodes whose connection was lost, and which are asked again."""
        broken = set(self.watch.closed) - self.watch.ended - set(self.watch.refused) - self._reopening
        return {node for node in broken if node in self.fleet.agents}

    @property
    def missed(self) -> list[int]:
        """Nodes that did not come back for the end: what they wrote last was not seen."""
        return [node for node in sorted(self._away - self.watch.ended) if not self.lost(node)]

    def refusals(self) -> list[ClustertoolError]:
        """List the errors of nodes that sent something not valid, if the verdict is not known because of that."""
        if self.watch.status.outcome is not None:
            return []
        fix = f"the job may still run: {PROGRAM} stop --job {self._job}; check its records on that node"
        return [BadAnswer(why, fix, self.watch.status.name(node)) for node, why in sorted(self.watch.refused.items())]

    def lost(self, node: int) -> bool:
        """Check whether the coordinator has given this node up."""
        known = self.watch.status.nodes.get(node)
        return known is not None and known.state is NodeState.LOST

    # -- what lost nodes may still run --

    def end_remains(self) -> tuple[dict[str, StopResult], dict[str, list[Key]]]:
        """End what still runs after the end of the job on nodes whose end is not proved, where their agents answer.

        Returns the results of these nodes, and the ranks that may still run, both by the name of the node.
        """
        doubtful = {} if self.fleet.engine_end is not None else self._doubtful()
        now, how = time.monotonic(), stop_how("the end of the job", self.fleet.cluster.grace)
        asked = [node for node in doubtful if node not in self.watch.closed and self._answers(node, now)]
        request, timeout = stop_request(self._job, how), how["grace"] + _REMAINS
        gathered = self.fleet.ask(dict.fromkeys(asked, request), timeout, patient=self._patient)
        found: dict[int, StopAnswer | ClustertoolError] = {**gathered.failed, **gathered.ok}
        results = {node: read_result(answer, self._job) for node, answer in found.items()}
        left = {node: keys for node, keys in doubtful.items() if node not in results or not results[node].over}
        name = self.watch.status.name
        return {name(node): one for node, one in results.items()}, {name(node): keys for node, keys in left.items()}

    def _doubtful(self) -> dict[int, list[Key]]:
        """Find the nodes on which ranks have started, or may have, and whose end is not proved: with these ranks."""
        status, found = self.watch.status, {}
        for index, node in status.nodes.items():
            started = node.entered or (not node.known and status.phase != "")
            if started and not (node.clean or node.survivors or isinstance(self.fleet.failed.get(index), NotFound)):
                mine = [process for process in status.processes.values() if process.node == index]
                found[index] = sorted(one.key for one in mine if one.state.alive or one.state in _IN_DOUBT)
        return found

    def _answers(self, node: int, now: float) -> bool:
        """Guess whether the agent of a node answers: it has sent a heartbeat a moment ago, or all that it has."""
        return node in self.watch.ended or now - self.watch.received.get(node, 0.0) < _SILENT

    # -- broken connections --

    def _check_nodes(self, now: float) -> Iterator[Item]:
        """Open the connections of silent and lost nodes again, in threads, and yield news of those that stay away."""
        self.fleet.prompter.serve()
        if self._late:
            late, failed = self._late, self.fleet.failed
            self._late = self.fleet.arrived()
            here = [node for node in late if node not in self._late]
            self._follow([node for node in here if node not in failed], {n: failed[n] for n in here if n in failed})
        timeout = self.fleet.cluster.loss_timeout
        for node in self.watch.nodes - self.watch.ended - self._reopening - set(self.watch.refused):
            if now - self.watch.received.get(node, now) > timeout:
                self.watch.closed.setdefault(node, f"silent for {timeout:g} s")
        for node in sorted(self._broken & self.watch.nodes):
            if node not in self._away:
                self._unreported[node] = now, self.watch.closed[node]
            self._away.add(node)
            self._reopening.add(node)
            threading.Thread(target=self._reopen, args=(node,), daemon=True).start()
        patience = 0.0 if self.fleet.engine_end is None else _MOMENT
        for node, (since, why) in list(self._unreported.items()):
            if node not in self._away or node in self.watch.ended:
                del self._unreported[node]
            elif now - since >= patience:
                del self._unreported[node]
                yield DisconnectNews(time.time(), self.watch.status.name(node), why)

    def follow_again(self, node: int) -> None:
        """Request the events and logs of a node that has ended once, from where they ended."""
        with contextlib.suppress(ClustertoolError, KeyError):
            self.fleet.agents[node].ask(self._rest(node))
            self.watch.received[node] = time.monotonic()
            self.watch.ended.discard(node)

    def _rest(self, node: int) -> Request[Answer]:
        """Build the request for what a node has not sent so far."""
        offsets, events_at = self.watch.offsets.get(node, {}), self.watch.events_at.get(node, 0)
        return FOLLOW({**self._request, "offsets": offsets, "events_at": events_at})

    def _reopen(self, node: int) -> None:
        while not self._left and node not in self.watch.ended and node not in self.watch.refused:
            time.sleep(self._lost_nodes.pause(node))
            try:
                agent = self.fleet.reopen(node)
                if self._left:  # the fleet may have closed its connections before this one
                    agent.link.close()
                    break
                agent.ask(self._rest(node))
            except BadAnswer as error:
                self._inbox.put(node, {"type": "closed", "why": error.what, "refused": True}, b"")
                break
            except ClustertoolError as error:
                if self.watch.status.outcome is not None or self.lost(node):
                    self.watch.closed[node] = error.what
                    break
                continue
            self.watch.received[node] = time.monotonic()
            self.watch.closed.pop(node, None)
            self._away.discard(node)
            self._lost_nodes.returned(node)
            break
        self._reopening.discard(node)


def _retry_pause(tries: int) -> float:
    """Compute the seconds before the next attempt, after so many that have failed."""
    return float(min(_LONGEST_RETRY, _RETRY * 2 ** min(tries, 10)))


def started(status: JobStatus) -> int:
    """Count the processes that have started."""
    return sum(process.state is not RankState.WAITING for process in status.processes.values())
