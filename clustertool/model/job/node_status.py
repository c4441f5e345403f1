"""A node's part of a job is the fold of the node's own events. This module adds it to the state of the job."""

# Without annotations from __future__: types of NamedTuples that are text cost nodes time (decision 79).
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from clustertool.model import field_types as fields
from clustertool.model.job.caretakers import CaretakerRecord, Event
from clustertool.model.job.outcome import COORDINATOR_NODE, Outcome
from clustertool.model.job.state_names import OUTCOMES, JobState, NodeCause, NodeState, StartReason
from clustertool.model.shape import Annotated, read

_STEPS = frozenset({"supervisor", "started", "stopping", "clean", "ended"})


class NodePart(NamedTuple):
    """The state of one node's part of a job. `code` and `reason` are of its outcome; of UNKNOWN `reason` is the cause.

    `final`: the coordinator has decided this outcome. Else a node has recorded it, which may have been cut off from the
    coordinator. `ended`: when the node recorded its end, by its clock; 0.0 before. `coordinator`: the node that coordinates the
    job, as it knows.
    """

    node: int
    state: JobState
    code: Optional[int] = None
    reason: str = ""
    start: StartReason = StartReason.NONE
    final: bool = False
    ended: float = 0.0
    coordinator: int = COORDINATOR_NODE

    @property
    def may_run(self) -> bool:
        """Whether processes of the job may live there, as far as the node knows."""
        return self.state in (JobState.RUNNING, JobState.UNKNOWN) or self.start is StartReason.JOINING

    def weight(self, coordinator: int) -> Tuple[int, bool, bool, int]:
        """Compute the sort key of a part; the part with the least one decides on the state of the job.

        The order is that of the table in state.py. Of equal ones the coordinator's node is the first, then one without success.
        """
        order = {JobState.RUNNING: 0, JobState.UNKNOWN: 2}.get(self.state, 6)
        if self.state is JobState.STARTING:
            order = 1 if self.start is StartReason.JOINING else 7
        elif self.code is not None and self.state in OUTCOMES:
            order = 3 if self.final and self.node == coordinator else 5 if self.state is JobState.LOST else 4
        return order, self.node != coordinator, self.state is JobState.SUCCEEDED, self.node


class EarlierRow(NamedTuple):
    """A job that a new one may continue, as one node knows it: what a summary has of it, and whether it left an output here.

    kept: what is there of the files that --keep names. files: those that it has written into its working directory.
    """

    id: fields.JobId
    state: JobState
    node: Optional[fields.NodeIndex]
    owner: Optional[fields.Label]
    command: Optional[str]
    created: Optional[fields.Time]
    code: Optional[fields.ExitCode]
    reason: Optional[str]
    asked: fields.Label = ""
    name: fields.Label = ""
    workspace: fields.Label = ""
    start: StartReason = StartReason.NONE
    final: bool = False
    output: bool = False
    kept: Annotated[Tuple[fields.Label, ...], 100] = ()
    files: Annotated[Tuple[fields.Label, ...], 100] = ()

    @property
    def part(self) -> NodePart:
        """The part of the job that this row describes."""
        return NodePart(self.node or 0, self.state, self.code, self.reason or "", self.start, self.final)


def read_part(summary: Mapping[str, Any]) -> NodePart:
    """Read the part of a job from its summary in a node's answer to "jobs"; node 0 coordinates if it names no other."""
    code, start = summary["code"], StartReason(summary.get("start", ""))
    state, reason = JobState(summary["state"]), str(summary["reason"] or "")
    node, final = int(summary["node"] or 0), bool(summary.get("final"))
    coordinator = int(summary.get("lead", COORDINATOR_NODE))
    return NodePart(node, state, None if code is None else int(code), reason, start, final, coordinator=coordinator)


class NodeRecord(CaretakerRecord):
    """The state of a node's supervisor and its outcome, from the node's own events; ranks are in JobStatus."""

    def __init__(self) -> None:
        super().__init__()
        self.known = False  # it has a record of the job
        self.coordinator, self.epoch = COORDINATOR_NODE, 0  # of its newest header
        self.began = 0.0  # when the first supervisor started, by the clock of the node
        self.entered = False  # a rank was started, or could not be; also if it is not known whether one was
        self.step = ""  # the newest event about starting and stopping ranks
        self.survivors: List[str] = []
        self.supervisor_lost = False
        self.clean = False  # nothing of the job lives on this node
        self.verdict: Optional[Outcome] = None  # the coordinator's
        self.ended: Optional[Outcome] = None
        self.ended_at = 0.0  # by the clock of the node

    def apply(self, event: Event) -> None:
        """Update the node by an event: its caretakers, step, outcome and survivors.

        A job header begins anew, without an outcome. Raises KeyError, TypeError or ValueError for an event that is not valid.
        """
        self.known = True
        super().apply(event)
        kind = event.get("type")
        if kind in _STEPS:
            self.step = str(kind)
        if kind in ("supervisor", "started"):
            self.clean = self.supervisor_lost = False
        if kind == "supervisor":
            self.began = self.began or float(event.get("t", 0))
        elif kind == "job":  # a second one: the engine has started the job again
            self.entered = self.entered if "epoch" in event else bool(event.get("restored"))
            self.coordinator, self.epoch = int(event.get("lead", COORDINATOR_NODE)), int(event.get("epoch", 0))
            self.verdict = self.ended = None
            self.ended_at, self.survivors = 0.0, []
        elif kind in ("started", "exited"):
            self.entered = True
        elif kind == "supervisor-lost":
            self.supervisor_lost = True
        elif kind == "clean":  # between two attempts it is no end
            self.survivors = [str(survivor) for survivor in event.get("survivors", ())]
            self.clean = self.supervisor_lost and not self.survivors
        elif kind == "verdict":
            self.verdict = read(Outcome, event)
        elif kind == "ended":
            self.clean = not self.survivors
            self.ended, self.ended_at = read(Outcome, event), float(event.get("t", 0))

    def part_of(self, node: int, alive: bool, unknown: str = "") -> NodePart:
        """Return the state of the node's part of the job, from its events and what is known of its processes.

        `alive`: a supervisor is recorded and lives. `unknown`: why the state of its processes is not known.
        """
        return self._part(node, alive, unknown)._replace(coordinator=self.coordinator)

    def _part(self, node: int, alive: bool, unknown: str) -> NodePart:
        """Return the part without its coordinator: by the outcome, else by what lives. alive, unknown: see part_of().

        UNKNOWN for damaged records if there is neither an end nor a living supervisor. Without an outcome: RUNNING, or STARTING
        before the first rank; without a living supervisor UNKNOWN if that is not sure, STARTING if there was none, else LOST.
        """
        outcome = self.verdict or self.ended
        if self.ended is None and self.damaged and not alive:
            return NodePart(node, JobState.UNKNOWN, reason=unknown or "its records are damaged")
        if outcome is not None:
            final = self.verdict is not None
            return NodePart(node, outcome.state, outcome.code, outcome.reason, final=final, ended=self.ended_at)
        if alive:
            running = NodePart(node, JobState.RUNNING)
            return running if self.entered else NodePart(node, JobState.STARTING, start=StartReason.JOINING)
        if unknown:
            return NodePart(node, JobState.UNKNOWN, reason=unknown)
        if not self.caretakers and not self.entered:
            return NodePart(node, JobState.STARTING, start=StartReason.PLACED)
        return NodePart(node, JobState.LOST)


def record_of(events: Iterable[Event]) -> NodeRecord:
    """Apply one node's events in their order, and return its record. Events that are not valid are marked as damage."""
    found = NodeRecord()
    for event in events:
        found.take(event)
    return found


class NodeTrouble(NamedTuple):
    """Why a node is LOST or UNKNOWN, or what else is wrong there. `seconds`: of NEVER_CONNECTED.

    `detail`: a text of the node's or the coordinator's record; of DISK_FULL the folder.
    """

    cause: NodeCause = NodeCause.NONE
    detail: str = ""
    seconds: float = 0.0


class NodeStatus(NodeRecord):
    """The state of a node, from all records. `supervised` and `unknown` are its answer to a question, not of its events."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.name = ""
        self.state = NodeState.UNKNOWN
        self.trouble = NodeTrouble()
        self.heartbeat: Optional[float] = None  # seconds since its supervisor last moved, as the node itself sees it
        self.lost: Optional[float] = None  # when it was given up
        self.skew = 0.0  # seconds by which its clock was ahead of the laptop's when the job started
        self.unconnected: Dict[str, Any] = {}  # the event, while it has no connection to the coordinator
        self.supervised: Optional[bool] = None  # whether its supervisor lives; None if it was not asked
        self.unknown = ""

    @property
    def supervisor(self) -> int:
        """The pid of its newest supervisor, 0 if none is recorded."""
        return self.caretakers.get("supervisor", (0, 0))[0]

    @property
    def part(self) -> NodePart:
        """The state of the node's part of the job.

        Without its own answer, the events of the coordinator and of its guard count.
        """
        alive = self.supervised
        if alive is None:  # it was not asked: the events of the coordinator and of its guard count
            alive = self.state is not NodeState.LOST and bool(self.supervisor or self.entered)
        return self.part_of(self.index, alive, self.unknown)

    def as_dict(self) -> Dict[str, object]:
        """Build an entry of "nodes" of `inv status --json`, without its "why"."""
        names = ("index", "name", "state", "supervisor", "survivors", "heartbeat", "lost", "skew", "unconnected")
        return {name: getattr(self, name) for name in names}
