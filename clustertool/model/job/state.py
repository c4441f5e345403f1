"""This module folds a job's events. It alone decides in which state a job, its nodes and its ranks are.

    state of a job   what the records of its nodes show, the first line that is true
    running          a supervisor lives, and ranks of that node have started
    starting         a supervisor lives, and no rank has started: StartReason.JOINING
    unknown          a node has records, and the state of its processes is not known
    an outcome       a node has recorded how the job ended; "lost" counts less than the other outcomes
    lost             a supervisor was started and is gone, without an outcome
    starting         nodes have the job's directory, and no supervisor has started: StartReason.PLACED
    queued           no node has a record of it

Each node gives one NodePart, from its own records; decide() chooses the one that stands for the job. `inv jobs` has the
summaries of the nodes and `inv status` their events, so both show the same. Ranks, their places and times belong to an
attempt: a rank that starts again is another ProcessStatus, and `processes` has the newest one of each rank.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, Callable, Container, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from clustertool.model.elastic.membership import EpochChange, EpochHeaders
from clustertool.model.job.attempts import Attempt, ProcessStatus
from clustertool.model.job.caretakers import Event
from clustertool.model.job.node_status import NodePart, NodeStatus, NodeTrouble
from clustertool.model.job.outcome import COORDINATOR_NODE, Key, Outcome, exit_code
from clustertool.model.job.rank_places import MOST, unpack
from clustertool.model.job.state_names import OUTCOMES, JobState, NodeCause, NodeState, RankState
from clustertool.model.shape import read

_OF_THE_COORDINATOR = "phase lost absent restart hang verdict epoch left-out standby standby-left below-minimum".split()
_OF_A_RANK = frozenset({"started", "listening", "elsewhere", "exited", "frozen", "thawed"})


def decide(parts: Iterable[NodePart]) -> NodePart:
    """Choose the part of least weight, which stands for the job; QUEUED if there is none.

    The node that most parts name counts as the coordinator.
    """
    known = list(parts)
    votes = Counter(part.coordinator for part in known)
    coordinator = max(votes, key=lambda one: (votes[one], -one), default=COORDINATOR_NODE)
    return min(known, key=lambda part: part.weight(coordinator), default=NodePart(COORDINATOR_NODE, JobState.QUEUED))


_Weighed = Tuple[Tuple[int, bool, int], Outcome]  # an outcome that a node has recorded; the least weight counts


class JobStatus:
    """What is known of a job. Only apply() adds events; order matters only within one node's events.

    `plan`: the node of each rank in the first attempt, where that is known. Other ranks are then no ranks of the job.
    """

    def __init__(self, plan: Optional[Mapping[Key, int]] = None) -> None:
        # title: the name that the user gave to the job
        self.job = self.mode = self.owner = self.command = self.title = ""
        self.created = 0.0
        self.nodes: Dict[int, NodeStatus] = {}
        self.processes: Dict[Key, ProcessStatus] = {}
        self.attempts: Dict[int, Attempt] = {}
        self.ended = 0.0  # when the last node recorded the outcome
        self.silent: Container[int] = ()  # nodes that do not answer
        self.engine_end = ""  # why the job has ended, where its engine has proved that and no node has recorded it
        # Why nodes were lost, and the exit code of that, as the engine knows it.
        self.cause: Optional[Tuple[str, int]] = None
        self.plan = plan
        self._begun: Set[int] = set()  # nodes of which a first event was read
        self._led = 0  # the newest attempt that the coordinator has begun
        self._outcomes: Dict[int, _Weighed] = {}  # of each node
        self._headers = EpochHeaders(COORDINATOR_NODE)

    def apply(self, node: int, event: Event) -> None:
        """Update the job by the next event of a node. An event that this node cannot know is ignored."""
        here = self.nodes.setdefault(node, NodeStatus(node))
        if not self.knows(node, event):
            return
        here.apply(event)
        handle = _HANDLERS.get(str(event.get("type")))
        if handle is not None:
            handle(self, here, event)

    def knows(self, node: int, event: Event) -> bool:
        """Check whether a node can know an event: of a rank if it runs there, of the coordinator if the node coordinates.

        It coordinates if the headers of the epoch in its newest one name it. Each node can know all other events.
        """
        kind = event.get("type")
        if kind in _OF_THE_COORDINATOR:
            return node == self._headers.of(self.nodes[node].epoch)
        if kind not in _OF_A_RANK:
            return True
        return self.runs(node, (str(event["role"]), int(event["rank"])), event.get("attempt"))

    def runs(self, node: int, key: Key, attempt: Optional[int] = None) -> bool:
        """Check whether a rank runs on a node, in an attempt or in the newest one, by the places of the ranks.

        Where these are not known, by the node of its newest status; a rank without one may run anywhere, up to MOST ranks.
        """
        places = self._places(self.attempt if attempt is None else attempt)
        if places is not None:
            return places.get(key) == node
        process = self.processes.get(key)
        return process.node == node if process is not None else len(self.processes) < MOST

    def ranks_in(self, attempt: Optional[int] = None) -> Dict[Key, int]:
        """Map each rank to its node in an attempt; without an attempt, or without its places, to that of its newest status."""
        places = self._places(attempt) if attempt is not None else None
        return dict(places) if places is not None else {key: process.node for key, process in self.processes.items()}

    def has_rank(self, node: int, key: Key, attempt: int) -> bool:
        """Check whether a node is known to run a rank in an attempt."""
        return self.runs(node, key, attempt) and (self._places(attempt) is not None or key in self.processes)

    # -- answers

    @property
    def attempt(self) -> int:
        """The number of the newest attempt."""
        return max(self.attempts, default=0)

    @property
    def coordinator(self) -> int:
        """The node that coordinates the job, as the headers of nodes name it: see EpochHeaders.newest."""
        return self._headers.newest

    @property
    def elastic(self) -> bool:
        """Whether the job is elastic: a header names the coordinator."""
        return self._headers.elastic

    @property
    def epochs(self) -> List[EpochChange]:
        """The epochs of an elastic job, in their order."""
        found = [attempt.epoch for _, attempt in sorted(self.attempts.items())]
        return [epoch for epoch in found if epoch is not None]

    @property
    def hang(self) -> str:
        """The verdict that the newest attempt makes no progress; "" if there is none, or a trainer has printed since then."""
        led = self.attempts.get(self._led)
        at, text = (led.hang if led is not None else None) or (0.0, "")
        trainers = (process for process in self.processes.values() if process.role == "trainer")
        return "" if self.outcome or any(process.output > at for process in trainers) else text

    @property
    def phase(self) -> str:
        """The phase of the newest attempt that the coordinator has begun."""
        led = self.attempts.get(self._led)
        return led.phase if led is not None else ""

    @property
    def outcome(self) -> Optional[Outcome]:
        """How the job ended, by the record of the coordinator's node; by those of all nodes if it has ended, is lost or silent.

        Of several records that of the coordinator's node counts first, then an end, then a loss. As long as that node runs,
        another one cannot end the job by what it sends. A loss has the reason and the code of `cause`, if it is known; if only
        the engine has reported the end, it is a loss, too. None: no end is known.
        """
        coordinator = self.nodes.get(self.coordinator)
        ended = coordinator is not None and coordinator.state in (NodeState.ENDED, NodeState.LOST)
        gone = ended or self.coordinator in self.silent
        deciding = [one for node, one in self._outcomes.items() if gone or node == self.coordinator]
        chosen = min(deciding, key=self._order)[1] if deciding else None
        if self.cause is None or (chosen is not None and chosen.state is not JobState.LOST):
            return chosen
        if chosen is None:  # no node has recorded an end
            return Outcome(JobState.LOST, self.cause[1], "tool", self.cause[0]) if self.engine_end else None
        return chosen._replace(reason=self.cause[0], code=self.cause[1], brief="")

    @property
    def started(self) -> float:
        """When the first supervisor started, by the laptop's clock; 0.0 if none has."""
        return min((node.began - node.skew for node in self.nodes.values() if node.began), default=0.0)

    @property
    def part(self) -> NodePart:
        """The part that stands for the job.

        If it is LOST without an outcome, but nothing was read yet of a member that is neither silent nor lost, it is RUNNING.
        If no node has an outcome, but the engine has proved the end, it is LOST.
        """
        found = decide(node.part for node in self.nodes.values() if node.known)
        unread = [node for node in self.nodes.values() if not node.known and node.state is not NodeState.LOST]
        there = any(node.index not in self.silent for node in unread)
        if found.state is JobState.LOST and found.code is None and there:
            return NodePart(found.node, JobState.RUNNING)
        if self.engine_end and found.state not in OUTCOMES:
            code = self.cause[1] if self.cause is not None else None
            return NodePart(found.node, JobState.LOST, code, self.engine_end)
        return found

    @property
    def state(self) -> JobState:
        return self.part.state

    def name(self, node: int) -> str:
        """Return the name of a node; "node N" as long as it is not known."""
        known = self.nodes.get(node)
        return known.name if known and known.name else f"node {node}"

    def of(self, role: str) -> List[ProcessStatus]:
        """List the ranks of a role, sorted by rank."""
        return sorted((p for p in self.processes.values() if p.role == role), key=lambda p: p.rank)

    # -- what is known beyond the events

    def probed(self, here: NodeStatus, supervised: bool, unknown: str, beat: Optional[float], moved: float) -> None:
        """Note, after the events of a node, whether its supervisor lives (`supervised`), and its heartbeat.

        If that is not known (unknown: why), the node and its living ranks are set to UNKNOWN; without a supervisor, a node that
        runs or stops is set to LOST since `moved`, when the supervisor moved last. beat: seconds since its heartbeat.
        """
        here.supervised, here.unknown = supervised, unknown
        here.heartbeat = beat if supervised else None
        if unknown:
            here.state, here.trouble = NodeState.UNKNOWN, NodeTrouble(NodeCause.UNKNOWN, unknown)
            for process in self._on(here.index):
                if process.state.alive:
                    process.state = RankState.UNKNOWN
        elif not supervised and here.state in (NodeState.RUNNING, NodeState.STOPPING):
            self.lose(here.index, moved, NodeTrouble(NodeCause.SUPERVISOR_GONE))

    def end_by_engine(self, reason: str, since: float) -> None:
        """Set nodes that have recorded no end to LOST, since the engine has proved that no process of the job is left.

        `engine_end` becomes the reason. Nodes that were lost before keep their trouble, unless it is SUPERVISOR_GONE.
        """
        self.engine_end = reason
        for node in self.nodes.values():
            if node.state is not NodeState.ENDED:
                node.supervised, node.unknown, node.heartbeat = False, "", None
            if node.state not in (NodeState.ENDED, NodeState.LOST) or node.trouble.cause is NodeCause.SUPERVISOR_GONE:
                self.lose(node.index, since, NodeTrouble(NodeCause.ENGINE, reason))

    def lose(self, node: int, since: float, trouble: NodeTrouble) -> None:
        """Set a node to LOST, and those of its ranks that did not end before. A node that has ended only gets the trouble."""
        lost = self.nodes.setdefault(node, NodeStatus(node))
        lost.trouble, lost.lost = trouble, since
        if lost.state is NodeState.ENDED:
            return
        lost.state = NodeState.LOST
        for process in self._on(node):
            if process.state.alive or process.state in (RankState.WAITING, RankState.UNKNOWN):
                process.state, process.since = RankState.LOST, since

    def settle(self, answered: Iterable[int]) -> None:
        """Set, after all events, which nodes are silent, and ranks that wait: UNKNOWN on nodes that did not answer.

        Ranks that wait on nodes that have ended are set to NOT_STARTED, if the job has an outcome. A node that the outcome
        names as lost, and that did not answer, is set to LOST. Nodes whose state is unknown count as silent, too.
        """
        there = set(answered)
        silent = set(self.nodes) - there
        self.silent = silent
        outcome = self.outcome
        lost = outcome.node if outcome and outcome.state is JobState.LOST else -1
        if outcome and lost in silent and self.nodes[lost].state is not NodeState.LOST:
            self.lose(lost, self.ended, NodeTrouble(NodeCause.GIVEN_UP, outcome.reason))
        for process in self.processes.values():
            if process.state is RankState.WAITING and process.node in silent:
                process.state = RankState.UNKNOWN
            elif process.state is RankState.WAITING and outcome and self.nodes[process.node].state is NodeState.ENDED:
                process.state = RankState.NOT_STARTED
        self.silent = {node for node in self.nodes if node in silent or self.nodes[node].unknown}

    # -- events of a node

    def _on_job(self, here: NodeStatus, event: Event) -> None:
        """Read the job's header: names, nodes, and the places of ranks.

        Of epochs after the first, places count if the epoch is newer than those placed, or from its coordinator; processes of
        an older one do not count. A second header of a node is a start by the engine: how the job ended on this node before is
        then forgotten.
        """
        if here.index in self._begun:
            self._begin_again(here)
        self._begun.add(here.index)
        self.job, self.mode = str(event["id"]), str(event.get("mode", ""))
        self.owner, self.created = str(event.get("owner", "")), float(event.get("created", 0))
        self.command, self.title = str(event.get("command", "")), str(event.get("job_name", ""))
        here.skew = float(event.get("skew", 0))
        epoch = here.epoch
        self._headers.add(epoch, here.coordinator)
        self._headers.elastic = self._headers.elastic or "lead" in event
        for index, name in enumerate(event.get("nodes", ())):
            node = self.nodes.setdefault(index, NodeStatus(index))
            node.name = str(name) or node.name
        newest = epoch > self._headers.placed or here.index == self._headers.of(epoch)
        if not epoch or (event.get("places") and newest):
            self._headers.placed = max(self._headers.placed, epoch)
            self._place(event.get("places", ()), epoch)
        for p in event.get("processes", ()):
            if epoch < self._headers.placed or not self.runs(here.index, (str(p["role"]), int(p["rank"])), epoch):
                continue
            process = self._process(here, p)
            process.local_rank, process.endpoint, process.log = int(p["local_rank"]), str(p["endpoint"]), str(p["log"])
            if here.lost is not None and process.state is RankState.WAITING:
                process.state, process.since = RankState.LOST, here.lost

    def _begin_again(self, here: NodeStatus) -> None:
        """Forget state, trouble and outcome of a node, and when the job ended, since an engine has started it again."""
        here.state, here.trouble, here.lost, here.unconnected = NodeState.UNKNOWN, NodeTrouble(), None, {}
        self._outcomes.pop(here.index, None)
        self.ended = 0.0

    def _on_running(self, here: NodeStatus, event: Event) -> None:
        """Set the node to RUNNING: a supervisor runs, or an epoch has ended, and the job goes on; to STOPPING after `stopping`.

        It stays LOST if it is.
        """
        if here.state is not NodeState.LOST:  # the coordinator's event may be read before this one
            here.state = NodeState.STOPPING if event["type"] == "stopping" else NodeState.RUNNING

    def _on_disk(self, here: NodeStatus, event: Event) -> None:
        """Note that the disk of ROOT_DIR is full, or that it has room again."""
        here.trouble = NodeTrouble(NodeCause.DISK_FULL, str(event["root"])) if event["full"] else NodeTrouble()

    def _on_unconnected(self, here: NodeStatus, event: Event) -> None:
        """Note why the node has no connection to the coordinator, since when, and whether it had one before.

        The time is by the node's clock. The endpoint and the name of the errno are noted, too.
        """
        texts = {name: str(event[name]) for name in ("endpoint", "errno", "why")}
        here.unconnected = {**texts, "since": float(event["since"]), "again": bool(event.get("again"))}

    def _on_connected(self, here: NodeStatus, event: Event) -> None:
        """Forget that the node had no connection to the coordinator."""
        here.unconnected = {}

    def _on_supervisor_lost(self, here: NodeStatus, event: Event) -> None:
        """Set the node to LOST, and its living ranks, also those set to LOST, to STOPPED: its guard has ended them."""
        here.state = NodeState.LOST
        here.trouble = NodeTrouble(NodeCause.SUPERVISOR_LOST, str(event.get("why", "")))
        for process in self._on(here.index):
            if process.state.alive or (process.state is RankState.LOST and process.pid):
                self._enter(here, process, float(event.get("t", 0)), RankState.STOPPED)
                process.guarded = True

    def _on_ended(self, here: NodeStatus, event: Event) -> None:
        """Set the node to ENDED, record its outcome, and advance `ended` to this time, by the laptop's clock.

        Its lost ranks that were never started are WAITING again. An outcome that counts more stays: see _note_outcome().
        """
        here.state = NodeState.ENDED
        self.ended = max(self.ended, float(event.get("t", 0)) - here.skew)
        for process in self._on(here.index):
            if process.state is RankState.LOST and not process.pid:
                process.state, process.since = RankState.WAITING, 0.0  # it was never started
        assert here.ended is not None
        self._note_outcome(2 if here.ended.state is JobState.LOST else 1, here, here.ended)

    # -- events of a rank

    def _on_started(self, here: NodeStatus, event: Event) -> None:
        """Set a rank to RUNNING, in the attempt that it enters, with its pid and log."""
        process = self._begin(here, event)
        process.pid, process.start = int(event["pid"]), int(event.get("start", 0))
        process.log = str(event.get("log", process.log))
        t = self._enter(here, process, float(event.get("t", 0)), RankState.RUNNING)
        attempt = self.attempts[process.attempt]
        attempt.began = min(attempt.began or t, t)

    def _on_listening(self, here: NodeStatus, event: Event) -> None:
        """Note that a rank listens at its endpoint."""
        self._process(here, event).listening = True

    def _on_other_address(self, here: NodeStatus, event: Event) -> None:
        """Note that a rank listens, but not at its endpoint."""
        process = self._process(here, event)
        process.listening, process.listens = False, str(event["listens"])

    def _on_frozen(self, here: NodeStatus, event: Event) -> None:
        """Set a rank to FROZEN, or to RUNNING after `thawed`."""
        state = RankState.FROZEN if event["type"] == "frozen" else RankState.RUNNING
        self._enter(here, self._process(here, event), float(event.get("t", 0)), state)

    def _on_exited(self, here: NodeStatus, event: Event) -> None:
        """Set a rank to DONE, FAILED or STOPPED, with its exit code, note and usage.

        A command that could not start enters the attempt.
        """
        process, t = self._process(here, event), float(event.get("t", 0))
        if not process.states or int(event.get("attempt", process.attempt)) != process.attempt:
            process = self._begin(here, event)  # a command that could not start
            self._enter(here, process, t, RankState.RUNNING)
        process.code, process.signal = int(event["code"]), int(event.get("signal", 0))
        failed = RankState.FAILED if exit_code(process.code, process.signal) else RankState.DONE
        t = self._enter(here, process, t, RankState.STOPPED if event.get("stopped") else failed)
        process.error, process.note = int(event.get("error", 0)), str(event.get("note", ""))
        process.consequence = bool(event.get("consequence"))
        process.timed_out = bool(event.get("timed_out"))
        process.cpu, process.memory = float(event.get("cpu", 0)), float(event.get("memory", 0))
        attempt = self._attempt(process.attempt)
        attempt.ended = max(attempt.ended, t)

    # -- events of the coordinator

    def _on_phase(self, here: NodeStatus, event: Event) -> None:
        """Set the phase of the newest attempt that the coordinator has begun."""
        self._attempt(self._led).phase = str(event["name"])

    def _on_restart(self, here: NodeStatus, event: Event) -> None:
        """Begin an attempt, with the ranks of `places` where the event has them, else with the same as before."""
        self._led = int(event["attempt"])
        self._attempt(self._led)
        if event.get("places"):
            self._place(event["places"], self._led)

    def _on_hang(self, here: NodeStatus, event: Event) -> None:
        """Store the verdict that the newest attempt makes no progress."""
        self._attempt(self._led).hang = float(event["t"]) - here.skew, str(event["text"])

    def _on_epoch(self, here: NodeStatus, event: Event) -> None:
        """Begin an attempt with a new epoch."""
        change = read(EpochChange, event)
        change = change._replace(t=change.t - here.skew)
        self._led = change.attempt
        self._attempt(change.attempt).epoch = change

    def _on_lost(self, here: NodeStatus, event: Event) -> None:
        """Set a node that the coordinator has given up to LOST, with the last progress of its ranks."""
        node = int(event["node"])
        trouble = NodeTrouble(NodeCause.GIVEN_UP, str(event.get("why", "")))
        self.lose(node, float(event.get("t", 0)) - here.skew, trouble)
        for role, rank, epoch, step, output in event.get("ranks", ()):
            process = self.processes.get((str(role), int(rank)))
            if process is not None and process.node == node:
                process.epoch, process.step, process.output = epoch, step, float(output) - here.skew

    def _on_absent(self, here: NodeStatus, event: Event) -> None:
        """Set nodes that never connected to the coordinator to LOST."""
        for index in event["nodes"]:
            trouble = NodeTrouble(NodeCause.NEVER_CONNECTED, seconds=float(event["seconds"]))
            self.lose(int(index), float(event.get("t", 0)) - here.skew, trouble)

    def _on_verdict(self, here: NodeStatus, event: Event) -> None:
        """Record the coordinator's outcome, which counts most."""
        assert here.verdict is not None
        self._note_outcome(0, here, here.verdict)

    # -- helpers

    def _on(self, node: int) -> List[ProcessStatus]:
        """List the ranks of a node."""
        return [process for process in self.processes.values() if process.node == node]

    def _places(self, attempt: int) -> Optional[Mapping[Key, int]]:
        """Return the node of each rank in an attempt, by the newest known attempt up to it, else by the plan; None: unknown."""
        known = [number for number in self.attempts if number <= attempt]
        return self.attempts[max(known)].places if known else self.plan

    def _attempt(self, number: int) -> Attempt:
        """Return the attempt with this number; create it with the places of the one before."""
        if number not in self.attempts:
            self.attempts[number] = Attempt(number, self._places(number))
        return self.attempts[number]

    def _place(self, rows: Any, number: int) -> None:
        """Unpack the places of an attempt's ranks, and add ranks that are new. Those of attempt 0 must be of the plan.

        Ranks that a later attempt does not have are removed.
        """
        found = {(role, rank): node for role, rank, node in unpack(rows, len(self.nodes))}
        if number:
            self._attempt(number).places = found
            self.processes = {key: process for key, process in self.processes.items() if key in found}
        for key, node in found.items():
            if self.runs(node, key, number):
                self.processes.setdefault(key, ProcessStatus(*key, node, number))

    def _process(self, here: NodeStatus, event: Event) -> ProcessStatus:
        """Return the newest status of an event's rank, on whatever node it is; create it on the node `here` if it is new."""
        key = (str(event["role"]), int(event["rank"]))
        return self.processes.setdefault(key, ProcessStatus(*key, here.index))

    def _begin(self, here: NodeStatus, event: Event) -> ProcessStatus:
        """Enter the rank of an event into its attempt, and return it: a new one if it has run before."""
        before = self._process(here, event)
        number = int(event.get("attempt", before.attempt))
        process = before
        if before.states:
            process = ProcessStatus(*before.key, here.index)
            process.local_rank, process.endpoint, process.log = before.local_rank, before.endpoint, before.log
            self.processes[before.key] = process
        process.attempt, process.node = number, here.index
        self._attempt(number).ranks[process.key] = process
        return process

    def _enter(self, here: NodeStatus, process: ProcessStatus, t: float, state: RankState) -> float:
        """Record that a rank is in a state since `t`, by the clock of its node; a living one of a lost node is set to LOST.

        Returns `t` by the laptop's clock.
        """
        since = t - here.skew
        process.states.append((since, state))
        process.state, process.since = state, since
        if here.lost is not None and state.alive:  # the coordinator's event may be read before this one
            process.state, process.since = RankState.LOST, here.lost
        return since

    def _note_outcome(self, weight: int, here: NodeStatus, outcome: Outcome) -> None:
        """Record the outcome of a node, if it weighs no more than an earlier one of the node.

        The coordinator's verdict counts most (weight 0), then a node's end, least that a node gave it up. Of equal weight, the
        coordinator's node is the first, then a node that knows of a failure, then the one of the least number.
        """
        found = (weight, outcome.state is JobState.SUCCEEDED, here.index), outcome
        self._outcomes[here.index] = min(found, self._outcomes.get(here.index, found), key=lambda one: one[0])

    def _order(self, weighed: _Weighed) -> Tuple[int, bool, bool, int]:
        """Compute the sort key of an outcome, see _note_outcome(); the least one counts."""
        (weight, succeeded, node), _ = weighed
        return weight, node != self.coordinator, succeeded, node


# A node chooses the type of an event: only these types, whose fields are checked, reach a handler.
_HANDLERS: Dict[str, Callable[[JobStatus, NodeStatus, Event], None]] = {
    "job": JobStatus._on_job,
    "supervisor": JobStatus._on_running,
    "disk": JobStatus._on_disk,
    "unconnected": JobStatus._on_unconnected,
    "connected": JobStatus._on_connected,
    "stopping": JobStatus._on_running,
    "supervisor-lost": JobStatus._on_supervisor_lost,
    "ended": JobStatus._on_ended,
    "started": JobStatus._on_started,
    "listening": JobStatus._on_listening,
    "elsewhere": JobStatus._on_other_address,
    "frozen": JobStatus._on_frozen,
    "thawed": JobStatus._on_frozen,
    "exited": JobStatus._on_exited,
    "phase": JobStatus._on_phase,
    "restart": JobStatus._on_restart,
    "hang": JobStatus._on_hang,
    "epoch": JobStatus._on_epoch,
    "epoch-ended": JobStatus._on_running,
    "lost": JobStatus._on_lost,
    "absent": JobStatus._on_absent,
    "verdict": JobStatus._on_verdict,
}


def ranks_of(events: Iterable[Event]) -> List[ProcessStatus]:
    """Apply the events of ranks on one node, without invalid ones, and list the ranks that have entered an attempt."""
    found = JobStatus()
    for event in events:
        if event.get("type") in _OF_A_RANK:
            with suppress(KeyError, TypeError, ValueError):  # a program of the job can damage its records
                found.apply(COORDINATOR_NODE, event)
    return [process for process in found.processes.values() if process.states]
