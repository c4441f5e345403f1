"""Following a job: the frames of all nodes become log lines and news until its verdict. Lost connections are opened again."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from clustertool.actions.stop_jobs import stop_how
from clustertool.errors import BadAnswer, ClustertoolError, NotFound
from clustertool.fleet import notify
from clustertool.fleet.fleet import MOMENT, Check, Fleet
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import COORDINATOR_NODE, Key
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import NodeState, RankState
from clustertool.model.job.stop_result import StopResult, read_result
from clustertool.model.wire.agent_answers import Answer, StopAnswer
from clustertool.model.wire.agent_requests import FollowRequest, FollowWanted
from clustertool.model.wire.event_types import NotificationEvent
from clustertool.model.wire.messages import ATTACHED, FOLLOW, SIGNAL, Request, stop_request
from clustertool.model.wire.stream_messages import StreamFrame
from clustertool.watch.job_view import Item, JobView
from clustertool.watch.lines import Frame
from clustertool.watch.news import DisconnectNews, EventNews, RevivedNews

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
_LATE = 10.0  # seconds that records may come after the engine knows the end: a shared file system shows them late
_RETURN = 3.0  # seconds that a node which broke off may take to come back once the verdict is known
_RESTORE = 12.0  # the same where an engine may have the logs of ended nodes, which are fetched from it


def send_attached(fleet: Fleet, job: str, node: int = COORDINATOR_NODE, laptop: str = "", notified: str = "") -> None:
    """Send ATTACHED to the agent of a node of the job, if it is connected: --lease counts from the last such message.

    The node passes it on to the coordinator. laptop, notified: see LaptopNotice.
    """
    if node in fleet.agents:
        fleet.agents[node].send(ATTACHED({"job": job, "laptop": laptop, "notified": notified}))


class Inbox:
    """A queue of frames from the agents' reader threads, bounded so that an endless log never fills the laptop's memory.

    close() when no more of them are read: else these threads wait in put() as long as the program lives.
    """

    def __init__(self, size: int = _QUEUE) -> None:
        self._frames: queue.Queue[Frame] = queue.Queue(size)
        self._closed = False

    def close(self) -> None:
        """Drop all further frames, and end the waits in put()."""
        self._closed = True

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        """Append a frame, after a wait for room if the queue is full. After close() frames are dropped."""
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self._frames.put((node, header, payload), timeout=_FULL)
                return

    def get(self, wait: float) -> Frame | None:
        """Return the next frame, or None if none comes in `wait` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._frames.get(timeout=wait)
        return None

    def frames(self, check: Check) -> Iterator[Frame]:
        """Yield the frames without end, and wait for each. Calls `check` several times a second, and raises what it raises."""
        while True:
            check()
            frame = self.get(0.1)
            if frame is not None:
                yield frame


class NodeQueues:
    """A bounded queue of frames for each node, so that a reader in order of time can wait for the frames of one node."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._inboxes: dict[int, Inbox] = defaultdict(lambda: Inbox(8))
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the queues of all nodes: further frames are dropped, and waits in put() end."""
        with self._lock:
            self._closed = True
            for inbox in self._inboxes.values():
                inbox.close()

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        """Append a frame to the queue of its node, and wait while that is full. After close() frames are dropped."""
        if not self._closed:
            self._inbox_of(node).put(node, header, payload)

    def next(self, node: int) -> Frame:
        """Wait for the next frame of a node and return it. Raises what `check` raises."""
        return next(self._inbox_of(node).frames(self._check))

    def _inbox_of(self, node: int) -> Inbox:
        with self._lock:
            return self._inboxes[node]


class EngineQuestion:
    """A question to the engine, asked every 5 s in a thread until it is answered: why has the job ended? `reason`: the answer.

    It is asked only where the agents only read records (fleet.engine_end).
    """

    def __init__(self, fleet: Fleet, job: str) -> None:
        self._ask, self._job = fleet.engine_end, job
        self._next = 0.0
        self._since: float | None = None  # when the engine has answered that the job has ended
        self._asking = False
        self.reason = ""

    def ended_for(self, now: float) -> float:
        """Return for how many seconds the engine's answer that the job has ended is known; 0.0 before.

        It asks the engine in a thread if the last question is 5 s old, so call it regularly. now: time.monotonic().
        """
        if self._ask is not None and self._since is None and not self._asking and now >= self._next:
            self._asking, self._next = True, now + _ASK
            threading.Thread(target=self._ask_engine, args=(self._ask,), daemon=True).start()
        return now - self._since if self._since is not None else 0.0

    def _ask_engine(self, ask: Callable[[str], str | None]) -> None:
        """Ask the engine, and store the reason and the time if it answers that the job has ended. ask: Fleet.engine_end."""
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
        """Note whether the job is elastic, by a frame with the header of the job."""
        header = frame[1]
        if header["type"] == "events" and not self._elastic:
            self._elastic = any(event.get("type") == "job" and "lead" in event for event in header["events"])

    def pause(self, node: int) -> float:
        """Return the seconds before the next attempt to connect to a node: 1.0 unless it is a lost node of an elastic job.

        For such a node they double with each call, from 1.0 up to 30, and with each failed start of it. They begin anew by
        returned(), and after a start without an error.
        """
        if not (self._elastic and self._follower.lost(node)):
            return _RETRY
        self._tries[node] += 1
        return _retry_pause(self._tries[node] - 1)

    def returned(self, node: int) -> None:
        """Reset the pauses of a node to which the connection was opened again, and let turn() try at once to start it."""
        self._tries[node] = 0
        self._next[node] = 0.0

    def turn(self, now: float) -> Iterator[RevivedNews]:
        """Start lost nodes of an elastic job again, in threads, follow them, and yield news of one that was started.

        It starts nothing for other jobs, after the outcome, and without `revive`. now: time.monotonic().
        """
        watch = self._follower.watch
        with contextlib.suppress(queue.Empty):
            node = self._revived.get_nowait()
            self._follow_soon([node])
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
                threading.Thread(target=self._revive_node, args=(node, self._revive), daemon=True).start()

    @property
    def may_run(self) -> bool:
        """Return whether a node may still run, once the streams of all nodes of an elastic job have ended without an outcome.

        Read it only then, which it does not check: the first call begins the 3 s for which it is True, and makes turn() ask the
        nodes without a recorded end once more, as one that was started again may coordinate the job. The 3 s begin anew when a
        node was started or a new epoch is known. False for other jobs.
        """
        now = time.monotonic()
        if self._elastic and self._quiet_since is None:
            self._quiet_since = now
            self._follow_at.clear()
        return self._quiet_since is not None and now - self._quiet_since < _RETURN

    def _follow_soon(self, nodes: Iterable[int]) -> None:
        """Let _follow_again() follow these nodes at its next turn, without a pause, and begin the 3 s of may_run anew."""
        self._quiet_since = None
        for node in nodes:
            self._follows[node], self._follow_at[node] = 0, 0.0

    def _follow_again(self, now: float) -> None:
        """Request the events of nodes again whose stream has ended but not the node, in threads, with growing pauses.

        The supervisor of such a node has died. It may take part in a later epoch, and even coordinate it: when a new epoch is
        known, its members are asked at once, and their pauses begin anew. Those of other nodes go on.
        """
        watch = self._follower.watch
        for epoch in watch.status.epochs[-1:]:
            if epoch.attempt != self._epoch:
                self._epoch = epoch.attempt
                self._follow_soon(epoch.nodes)
        for node in watch.ended - set(watch.closed):
            known = watch.status.nodes.get(node)
            if known is not None and known.ended is None and now >= self._follow_at.get(node, 0.0):
                self._follows[node] += 1
                self._follow_at[node] = now + _retry_pause(self._follows[node])
                threading.Thread(target=self._follower.follow_again, args=(node,), daemon=True).start()

    def _revive_node(self, node: int, revive: Callable[[str, int], bool]) -> None:
        """Start a lost node again by `revive`, report it to turn() if it was started, and set when the next attempt is due.

        This is after a growing pause, up to 30 s, if `revive` has failed, and else in 30 s if the node still counts as lost.
        """
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
    """The follower of one job: start(), then items() until the job is over. `watch` has what is known of the job.

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
        # Those of which it is not shown so far: since when, and why.
        self._unreported: dict[int, tuple[float, str]] = {}
        self._engine = EngineQuestion(fleet, job)
        self._lost_nodes = LostNodes(self, job, revive)
        self._unsent: list[EventNews] = []
        self._laptop = os.urandom(8).hex() if notify.can_send(fleet.cluster.notify) else ""

    def start(self, request: FollowWanted) -> None:
        """Request events and logs from every node; late nodes are sent the request when they have logged in."""
        self._request = {**request, "job": self._job}
        self._late = self.fleet.late
        self._follow(self.fleet.agents, self.fleet.failed)

    def _follow(self, nodes: Iterable[int], failed: Mapping[int, ClustertoolError]) -> None:
        """Request events and logs from these nodes, and note which of them, and of `failed`, cannot be followed, and why.

        One without records of the job counts as ended; one whose connection was lost since its login is followed all the same.
        """
        gathered = self.fleet.ask(dict.fromkeys(nodes, FOLLOW(self._request)), patient=self._patient)
        lost = [node for node in gathered.failed if self.fleet.agents[node].dead is not None]
        self.watch.received.update(dict.fromkeys([*gathered.ok, *lost], time.monotonic()))
        for node, error in {**failed, **gathered.failed}.items():
            self.watch.closed[node] = error.what
            if isinstance(error, NotFound):  # its directory was removed there: nothing will come
                self.watch.ended.add(node)

    def items(self, check: Check, until: Callable[[JobStatus], bool] = lambda _: False) -> Iterator[Item]:
        """Yield the log lines and news of the job until it is over or `until` returns true for its status.

        It opens lost connections again, and ends the job itself 10 s after the engine has reported its end, or by _given_up().
        `check` is called several times a second, and may raise what ends the iteration.
        """
        self._left = False
        try:
            while not self.over and not until(self.watch.status):
                frame = self._inbox.get(0.05)
                now = time.monotonic()
                check()
                if frame is not None:
                    yield from self.watch.take(*frame, now)
                    self._lost_nodes.take(frame)
                    self._take_notifications(frame)
                if frame is None or now - self._checked_at > _CHECK:
                    if now - (self._checked_at or now) > _NAP:
                        self.watch.add_pause(now - self._checked_at, now)
                    self._checked_at = now
                    yield from self.watch.take_due(now)
                    yield from self.watch.remind(time.time())
                    yield from self._check_nodes(now)
                    yield from self._lost_nodes.turn(now)
                    yield from (self._unsent.pop() for _ in self._unsent[:])
                    if self._engine.ended_for(now) > _LATE or self._given_up(now):
                        yield from self.watch.end_by_engine(self._engine.reason, time.time())
            yield from self.watch.take_rest()
        finally:
            self._left = True

    def _given_up(self, now: float) -> bool:
        """Check whether the other nodes have ended, for over 10 s, because there is no record of the coordinator.

        Agents that only read records do not know that it is dead, and an engine may know it minutes later.
        """
        if self.fleet.engine_end is None or not self.watch.without_coordinator:
            return False
        self._alone_at = self._alone_at or now
        return now - self._alone_at > _LATE

    @property
    def over(self) -> bool:
        """Whether the job is over and no node has more to send.

        With an outcome: each node has ended or was given up by the coordinator; some seconds later, nodes that are disconnected
        or take no part in the last epoch count as ended, too. Without an outcome: all streams have ended, and no connection is
        being opened again.
        """
        outcome = self.watch.status.outcome
        if outcome is None:
            broken = self._broken_nodes & set(self.watch.received)  # not those that never followed the job
            return self.watch.over and not self._reopening and not broken and not self._lost_nodes.may_run
        self._verdict_at = self._verdict_at or time.monotonic()
        late = time.monotonic() - self._verdict_at > (_RETURN if self.fleet.engine_end is None else _RESTORE)
        left = self.watch.nodes - self.watch.ended
        return all(self.lost(node) or (late and (node in self.watch.closed or self._is_spare(node))) for node in left)

    def _is_spare(self, node: int) -> bool:
        """Check whether a node takes no part in the last epoch of an elastic job."""
        return any(node not in epoch.nodes for epoch in self.watch.status.epochs[-1:])

    def report_attached(self, notified: str = "") -> None:
        """Send ATTACHED to the coordinator or, if its connection is lost, to another node of the newest epoch.

        notified: the id of a notification that was sent.
        """
        epochs, closed = self.watch.status.epochs[-1:], self.watch.closed
        nodes = (self.watch.status.coordinator, *(node for epoch in epochs for node in epoch.nodes))
        node = next((node for node in nodes if node not in closed), COORDINATOR_NODE)
        send_attached(self.fleet, self._job, node, self._laptop, notified)

    def _take_notifications(self, frame: Frame) -> None:
        """Send, in threads, those notifications among the events of a frame that the coordinator lets this command send."""
        header = frame[1]
        for event in header["events"] if header["type"] == "events" and self._laptop else ():
            if event["type"] == "notification" and event["laptop"] == self._laptop:
                threading.Thread(target=self._notify, args=(event,), daemon=True).start()

    def _notify(self, event: NotificationEvent) -> None:
        """Send a notification to NOTIFY of this machine, and confirm that to the coordinator, which sends it otherwise.

        Adds news of a failure, which items() yields.
        """
        failed = notify.deliver(self.fleet.cluster.notify, event)
        if failed:
            self._unsent.append(EventNews(time.time(), "", {**event, "failed": failed}))
        else:
            self.report_attached(event["id"])

    def signal_ranks(self, number: int) -> None:
        """Send a signal, by its number, to the ranks of the job on this machine."""
        for agent in self.fleet.agents.values():
            if agent.host.here:
                agent.send(SIGNAL({"job": self._job, "number": number}))

    @property
    def _broken_nodes(self) -> set[int]:
        """The nodes whose connection was lost, which are not finished or refused, and which _reopen() does not try yet."""
        broken = set(self.watch.closed) - self.watch.ended - set(self.watch.refused) - self._reopening
        return {node for node in broken if node in self.fleet.agents}

    @property
    def missed(self) -> list[int]:
        """The nodes whose connection was lost and which have not sent the end of their records, without those given up."""
        return [node for node in sorted(self._away - self.watch.ended) if not self.lost(node)]

    def refusals(self) -> list[ClustertoolError]:
        """Return a BadAnswer for each node whose frames were not valid; [] if the outcome is known."""
        if self.watch.status.outcome is not None:
            return []
        fix = f"the job may still run: {PROGRAM} stop --job {self._job}; check its records on that node"
        return [BadAnswer(why, fix, self.watch.status.name(node)) for node, why in sorted(self.watch.refused.items())]

    def lost(self, node: int) -> bool:
        """Check whether the coordinator has given up a node."""
        known = self.watch.status.nodes.get(node)
        return known is not None and known.state is NodeState.LOST

    # -- what lost nodes may still run --

    def end_remains(self) -> tuple[dict[str, StopResult], dict[str, list[Key]]]:
        """Stop the job again on nodes where ranks may live after its end, if their agents answer.

        Returns {node: result} of these stops, and {node: ranks} of those that may still run, both by the names of the nodes.
        Where an engine proves the end of nodes, both are empty.
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
        """Map each node on which ranks may have started, and whose end is not proved, to its ranks that may live."""
        status, found = self.watch.status, {}
        for index, node in status.nodes.items():
            started = node.entered or (not node.known and status.phase != "")
            if started and not (node.clean or node.survivors or isinstance(self.fleet.failed.get(index), NotFound)):
                mine = [process for process in status.processes.values() if process.node == index]
                found[index] = sorted(one.key for one in mine if one.state.alive or one.state in _IN_DOUBT)
        return found

    def _answers(self, node: int, now: float) -> bool:
        """Guess whether the agent of a node answers: it sent a frame in the last 3 s, or its stream is complete."""
        return node in self.watch.ended or now - self.watch.received.get(node, 0.0) < _SILENT

    # -- broken connections --

    def _check_nodes(self, now: float) -> Iterator[Item]:
        """Follow late nodes that have logged in, open lost or silent connections again in threads, and yield news of lost ones.

        It puts the questions of logins, too. Where an engine knows the end of nodes, the news waits 3 s, and is left out if the
        node ends or comes back.
        """
        self.fleet.prompter.serve()
        if self._late:
            late, failed = self._late, self.fleet.failed
            self._late = self.fleet.sort_arrived()
            here = [node for node in late if node not in self._late]
            self._follow([node for node in here if node not in failed], {n: failed[n] for n in here if n in failed})
        timeout = self.fleet.cluster.loss_timeout
        for node in self.watch.nodes - self.watch.ended - self._reopening - set(self.watch.refused):
            if now - self.watch.received.get(node, now) > timeout:
                self.watch.closed.setdefault(node, f"silent for {timeout:g} s")
        for node in sorted(self._broken_nodes & self.watch.nodes):
            if node not in self._away:
                self._unreported[node] = now, self.watch.closed[node]
            self._away.add(node)
            self._reopening.add(node)
            threading.Thread(target=self._reopen, args=(node,), daemon=True).start()
        patience = 0.0 if self.fleet.engine_end is None else MOMENT
        for node, (since, why) in list(self._unreported.items()):
            if node not in self._away or node in self.watch.ended:
                del self._unreported[node]
            elif now - since >= patience:
                del self._unreported[node]
                yield DisconnectNews(time.time(), self.watch.status.name(node), why)

    def follow_again(self, node: int) -> None:
        """Request the events and logs of a node whose stream has ended, from where it ended. Errors are ignored."""
        with contextlib.suppress(ClustertoolError, KeyError):
            self.fleet.agents[node].ask(self._request_for_rest(node))
            self.watch.received[node] = time.monotonic()
            self.watch.ended.discard(node)

    def _request_for_rest(self, node: int) -> Request[Answer]:
        """Build the request for what a node has not sent so far."""
        offsets, events_at = self.watch.offsets.get(node, {}), self.watch.events_at.get(node, 0)
        return FOLLOW({**self._request, "offsets": offsets, "events_at": events_at})

    def _reopen(self, node: int) -> None:
        """Try to connect to a node again, with pauses, and follow it from where its stream broke off, until that is needless.

        It is needless after a success, after the node's end, when the caller has left, for invalid frames, and after a failure
        of a node that is lost or not needed because the outcome is known.
        """
        while not self._left and node not in self.watch.ended and node not in self.watch.refused:
            time.sleep(self._lost_nodes.pause(node))
            try:
                agent = self.fleet.reopen(node)
                if self._left:  # the fleet may have closed its connections before this one
                    agent.link.close()
                    break
                agent.ask(self._request_for_rest(node))
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
    """Compute the seconds before the next attempt, which double with each failed one (`tries`), up to 30."""
    return float(min(_LONGEST_RETRY, _RETRY * 2 ** min(tries, 10)))


def count_started(status: JobStatus) -> int:
    """Count the ranks of a job that are in any state but WAITING."""
    return sum(process.state is not RankState.WAITING for process in status.processes.values())
