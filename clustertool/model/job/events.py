"""Events are what happened on a node, one JSON object a line; folding all nodes' events gives the job's status.

Every event has `t` (the node's clock, seconds) and `e`, its kind:

    job          id, node, name, nodes, created, owner, mode, command, processes, skew   first line of every events file;
                 skew: seconds by which this clock was ahead of the laptop's, 0 if they were few
                 places: of the ranks of all nodes, see model/job/rank_places.py; records of older versions have none
    supervisor   pid, start, boot                  guard / gauge   pid, start
    started      role, rank, pid, start, attempt   listening  role, rank
    elsewhere    role, rank, listens, endpoint     a pserver listens where nobody looks for it
    exited       role, rank, code, signal, stopped, note, attempt   `stopped`: after the supervisor had signalled it;
                 error, consequence        of a failure: a number made of the last line of its log without its digits, and
                                           whether the line is about a lost connection
                 cpu, memory               seconds and peak bytes of it and the children it waited for
    frozen / thawed      role, rank                a rank was stopped by SIGSTOP, or goes on
    disk         full, root                        the disk of ROOT_DIR is full, or has room again
    phase        name, why, culprits, attempt      the lead: joining, pserver, trainer, ending; of an ending because of
                                                   failures, these in words and as [role, rank], the first one first
    lost         node, why, ranks                  the lead gave a node up; ranks: what it knew of them:
                                                   [role, rank, epoch, step, time of the last output], the lead's clock
    absent       nodes, endpoint, seconds          these nodes never connected to the lead
    unconnected  endpoint, errno, why, since, again   this node has no connection to the lead since then, and the newest
                                               cause; again: it had one before
    connected                                      it has one again
    restart      attempt, pause                    the lead: all starts again, after so many seconds
    stopping     why, by                           the supervisor ends its processes
    clean        survivors                         nothing of the job lives here (or these do)
    supervisor-lost      why                       guard or stop ended this node's processes
    verdict      state, code, source, reason, culprits, victims, node         the lead's; also in
    ended        the same                          every node's last word
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Container, Dict, Iterable, List, Mapping, Optional, Tuple

from clustertool.model.job.outcome import Key, Outcome, exit_code, read_outcome
from clustertool.model.job.rank_places import MOST, unpack

Event = Mapping[str, Any]
_Word = Tuple[
    Tuple[int, bool, int], Outcome
]  # an outcome that nodes have recorded, and its weight: the least one counts
_LIVING = ("running", "frozen")
LEAD = 0  # the node of the lead, see model/planning/requests.py
_OF_THE_LEAD = frozenset({"phase", "lost", "absent", "restart", "verdict"})
_OF_A_RANK = frozenset({"started", "listening", "elsewhere", "exited", "frozen", "thawed"})


@dataclass
class ProcessStatus:
    role: str
    rank: int
    node: int
    local_rank: int = 0
    endpoint: str = ""
    log: str = ""
    state: str = "waiting"
    pid: int = 0
    since: float = 0.0
    code: Optional[int] = None
    signal: int = 0
    stopped: bool = False
    attempt: int = 0
    note: str = ""
    error: int = 0  # of a failure: equal numbers for equal last lines of the log
    epoch: Optional[float] = None  # the last one that it printed, like step
    step: Optional[float] = None
    output: float = 0.0  # when it printed last, or was started if it printed nothing; 0 if that is not known


@dataclass
class NodeStatus:
    index: int
    name: str = ""
    state: str = "unknown"
    supervisor: int = 0
    survivors: List[str] = field(default_factory=list)
    why: str = ""
    heartbeat: Optional[float] = None  # seconds since its supervisor last moved, as the node itself sees it
    lost: Optional[float] = None  # when it was given up
    skew: float = 0.0  # seconds by which its clock was ahead of the laptop's when the job started
    unconnected: Dict[str, Any] = field(
        default_factory=dict
    )  # the event of that name, while it has no connection to the lead


@dataclass
class JobStatus:
    """What is known of a job. `apply` is the only way in; order matters only within one node's events.

    `plan`: the node of each rank, where the plan is known. Other ranks are then no ranks of the job.
    """

    job: str = ""
    mode: str = ""
    owner: str = ""
    created: float = 0.0
    command: str = ""
    phase: str = ""
    attempt: int = 0
    nodes: Dict[int, NodeStatus] = field(default_factory=dict)
    processes: Dict[Key, ProcessStatus] = field(default_factory=dict)
    ended: float = 0.0  # when the last node knew the outcome
    plan: Optional[Mapping[Key, int]] = field(default=None, repr=False)
    silent: Container[int] = ()  # nodes that do not answer
    _of_lead: Optional[_Word] = field(default=None, repr=False)  # the outcome that the lead's node has recorded
    _of_others: Optional[_Word] = field(default=None, repr=False)

    def apply(self, node: int, event: Event) -> None:
        here = self.nodes.setdefault(node, NodeStatus(node))
        kind = str(event.get("e", "")).replace("-", "_")
        handle = getattr(self, f"_on_{kind}", None)
        if handle is not None and self.knows(node, event):
            handle(here, event)

    def knows(self, node: int, event: Event) -> bool:
        """False for an event that `node` cannot know: of a rank that it does not run, or of the lead, which runs elsewhere."""
        if event.get("e") in _OF_THE_LEAD:
            return node == LEAD
        return event.get("e") not in _OF_A_RANK or self.runs(node, (str(event["role"]), int(event["rank"])))

    def runs(self, node: int, key: Key) -> bool:
        """Whether a rank may be one of `node`."""
        process = self.processes.get(key)
        if self.plan is not None:
            return self.plan.get(key) == node
        return process.node == node if process is not None else len(self.processes) < MOST

    @property
    def outcome(self) -> Optional[Outcome]:
        """How the job ended. The records of the lead's node decide, those of other nodes where it has ended or does not answer.

        As long as the lead's node runs, another node cannot end the job by what it sends.
        """
        lead = self.nodes.get(LEAD)
        gone = LEAD in self.silent or (lead is not None and lead.state in ("ended", "lost"))
        words = [word for word in (self._of_lead, self._of_others if gone else None) if word is not None]
        return min(words, key=lambda word: word[0][0])[1] if words else None

    @property
    def state(self) -> str:
        if self.outcome:
            return self.outcome.state
        if self.nodes and all(n.state in ("ended", "lost") for n in self.nodes.values()):
            return "lost"
        return "starting" if all(p.state == "waiting" for p in self.processes.values()) else "running"

    def of(self, role: str) -> List[ProcessStatus]:
        return sorted((p for p in self.processes.values() if p.role == role), key=lambda p: p.rank)

    def _on_job(self, here: NodeStatus, event: Event) -> None:
        self.job, self.mode = str(event["id"]), str(event.get("mode", ""))
        self.owner, self.created = str(event.get("owner", "")), float(event.get("created", 0))
        self.command = str(event.get("command", ""))
        here.skew = float(event.get("skew", 0))
        for index, name in enumerate(event.get("nodes", ())):
            self.nodes.setdefault(index, NodeStatus(index)).name = str(name)
        for role, rank, node in unpack(event.get("places", ()), len(self.nodes)):
            if self.runs(node, (role, rank)):
                self.processes.setdefault((role, rank), ProcessStatus(role, rank, node))
        for p in event.get("processes", ()):
            if not self.runs(here.index, (str(p["role"]), int(p["rank"]))):
                continue
            process = self._process(here, p)
            process.local_rank, process.endpoint, process.log = int(p["local_rank"]), str(p["endpoint"]), str(p["log"])
            if here.lost is not None and process.state == "waiting":
                process.state, process.since = "lost", here.lost

    def _on_supervisor(self, here: NodeStatus, event: Event) -> None:
        here.supervisor = int(event["pid"])
        if here.state != "lost":  # the lead's word of this node may have been read before the node's own
            here.state = "running"

    def _process(self, here: NodeStatus, event: Event) -> ProcessStatus:
        key = (str(event["role"]), int(event["rank"]))
        return self.processes.setdefault(key, ProcessStatus(*key, here.index))

    def _change(self, here: NodeStatus, event: Event, state: str) -> ProcessStatus:
        process = self._process(here, event)
        process.state, process.since = state, float(event.get("t", 0)) - here.skew
        if (
            here.lost is not None and state in _LIVING
        ):  # the word of the lead may have been read before this, which is older
            process.state, process.since = "lost", here.lost
        return process

    def lose(self, node: int, since: float, why: str) -> None:
        """A node is lost, and so are its ranks that did not end before."""
        lost = self.nodes.setdefault(node, NodeStatus(node))
        lost.why, lost.lost = why, since
        if lost.state == "ended":
            return
        lost.state = "lost"
        for process in self.processes.values():
            if process.node == node and process.state in (*_LIVING, "waiting", "unknown"):
                process.state, process.since = "lost", since

    def settle(self, answered: Iterable[int]) -> None:
        """After the events of all nodes that answered: the ranks of the other nodes are lost, or nothing is known of them."""
        silent = set(self.nodes) - set(answered)
        self.silent = silent
        lost = self.outcome.node if self.outcome and self.outcome.state == "lost" else -1
        if self.outcome and lost in silent and self.nodes[lost].state != "lost":
            self.lose(lost, self.ended, self.outcome.reason)
        for process in self.processes.values():
            if process.state == "waiting" and process.node in silent:
                process.state = "unknown"
            elif process.state == "waiting" and self.outcome and self.nodes[process.node].state == "ended":
                process.state = "not started"

    def _on_started(self, here: NodeStatus, event: Event) -> None:
        process = self._change(here, event, "running")
        process.pid, process.attempt = int(event["pid"]), int(event.get("attempt", 0))
        process.code, process.signal, process.stopped, process.note, process.error = None, 0, False, "", 0
        process.epoch, process.step = None, None
        process.log = str(event.get("log", process.log))
        self.attempt = max(self.attempt, process.attempt)

    def _on_listening(self, here: NodeStatus, event: Event) -> None:
        self._process(here, event).note = "listening"

    def _on_elsewhere(self, here: NodeStatus, event: Event) -> None:
        self._process(here, event).note = f"listens on {event['listens']}, not on {event['endpoint']}"

    def _on_frozen(self, here: NodeStatus, event: Event) -> None:
        self._change(here, event, "frozen")

    def _on_thawed(self, here: NodeStatus, event: Event) -> None:
        self._change(here, event, "running")

    def _on_exited(self, here: NodeStatus, event: Event) -> None:
        code, signal, stopped = int(event["code"]), int(event.get("signal", 0)), bool(event.get("stopped"))
        process = self._change(here, event, "stopped" if stopped else "failed" if exit_code(code, signal) else "done")
        process.code, process.signal, process.stopped = code, signal, stopped
        process.error = int(event.get("error", 0))
        process.note, process.attempt = str(event.get("note", "")), int(event.get("attempt", process.attempt))
        self.attempt = max(self.attempt, process.attempt)

    def _on_disk(self, here: NodeStatus, event: Event) -> None:
        here.why = f"the disk of {event['root']} is full" if event["full"] else ""

    def _on_phase(self, here: NodeStatus, event: Event) -> None:
        self.phase = str(event["name"])

    def _on_restart(self, here: NodeStatus, event: Event) -> None:
        self.attempt = max(self.attempt, int(event["attempt"]))

    def _on_lost(self, here: NodeStatus, event: Event) -> None:
        node = int(event["node"])
        self.lose(node, float(event.get("t", 0)) - here.skew, str(event.get("why", "")))
        for role, rank, epoch, step, output in event.get("ranks", ()):
            process = self.processes.get((str(role), int(rank)))
            if process is not None and process.node == node:
                process.epoch, process.step, process.output = epoch, step, float(output) - here.skew

    def _on_absent(self, here: NodeStatus, event: Event) -> None:
        for index in event["nodes"]:
            why = f"no connection to the coordinator within {float(event['seconds']):g} s"
            self.lose(int(index), float(event.get("t", 0)) - here.skew, why)

    def _on_unconnected(self, here: NodeStatus, event: Event) -> None:
        texts = {name: str(event[name]) for name in ("endpoint", "errno", "why")}
        here.unconnected = {**texts, "since": float(event["since"]), "again": bool(event.get("again"))}

    def _on_connected(self, here: NodeStatus, event: Event) -> None:
        here.unconnected = {}

    def _on_stopping(self, here: NodeStatus, event: Event) -> None:
        if here.state != "lost":
            here.state = "stopping"

    def _on_clean(self, here: NodeStatus, event: Event) -> None:
        here.survivors = [str(s) for s in event.get("survivors", ())]

    def _on_supervisor_lost(self, here: NodeStatus, event: Event) -> None:
        here.state, here.why = "lost", "supervisor lost: " + str(event.get("why", ""))
        for process in self.processes.values():
            if process.node == here.index and (process.state in _LIVING or (process.state == "lost" and process.pid)):
                process.state, process.stopped, process.note = "stopped", True, "its supervisor was lost"
                process.since = float(event.get("t", 0)) - here.skew

    def _on_verdict(self, here: NodeStatus, event: Event) -> None:
        self._say(0, here, event)

    def _on_ended(self, here: NodeStatus, event: Event) -> None:
        here.state = "ended"
        self.ended = max(self.ended, float(event.get("t", 0)) - here.skew)
        for process in self.processes.values():
            if process.node == here.index and process.state == "lost" and not process.pid:
                process.state, process.since = "waiting", 0.0  # it was never started
        self._say(2 if event["state"] == "lost" else 1, here, event)

    def _say(self, weight: int, here: NodeStatus, event: Event) -> None:
        """The lead's verdict counts most, then how a node ended, least that a node gave the lead up.

        Of equal weight, the lead's node is the first, then a node that knows of a failure, then the one of the least number.
        """
        found = (weight, event["state"] == "succeeded", here.index), read_outcome(event)
        before = self._of_lead if here.index == LEAD else self._of_others
        if before is None or found[0] <= before[0]:
            if here.index == LEAD:
                self._of_lead = found
            else:
                self._of_others = found


def fold(events: Iterable[Tuple[int, Event]]) -> JobStatus:
    """(node, event) pairs, in order per node -> status."""
    status = JobStatus()
    for node, event in events:
        status.apply(node, event)
    return status


def read_events(lines: Iterable[bytes]) -> Iterable[Event]:
    """Lines of an events file; a torn last line (a full disk, a crash) is skipped."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
