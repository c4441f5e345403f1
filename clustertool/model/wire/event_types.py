"""A node records events of these types about a job, one JSON object a line in events.jsonl. A tuple is a list in JSON.

Records of the previous version have the type under another key: record_lines.py. Only the laptop imports this module at run
time, and checks events by these types (answers.py).
"""

from __future__ import annotations

from typing import Annotated, List, Literal, Optional, Tuple, TypedDict, Union

from clustertool.model import field_types as fields
from clustertool.model.elastic.membership import EpochChange
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import OUTCOMES
from clustertool.model.notification import Notification
from clustertool.model.shape import one_of

OutcomeName = Annotated[str, one_of(OUTCOMES)]


class EventBase(TypedDict):
    """What each event has: the time at which it was recorded, by the node's clock."""

    t: fields.Time


class AnyEvent(EventBase):
    """What an event of an unknown type has."""

    type: fields.Label


class RankName(TypedDict):
    """The rank that an event or an entry is about."""

    role: fields.Role
    rank: fields.Rank


class ProcessPlan(RankName):
    """A process of this node, as the first event names it."""

    local_rank: fields.Rank
    endpoint: fields.Label
    log: str


class _JobId(TypedDict):
    """The id of a job."""

    id: fields.JobId


class JobHeader(_JobId, total=False):
    """What is known of a job before it starts: the fields of its first event, and of the ledger's copy."""

    format: int
    node: fields.NodeIndex
    name: fields.Label
    entry: fields.Label
    hostname: fields.Label
    nodes: fields.PerNode[fields.Label]
    created: fields.Time
    owner: fields.Label
    asked: fields.Label  # by --job-id; the id has a number after it where it was taken
    job_name: fields.Label
    workspace: fields.Label  # where its files come from: a folder of the laptop, or of the nodes (--job-workspace)
    # the machine of the list of nodes on which the command was typed, and a digest of the command
    starter: fields.Label
    same_command: fields.Label
    mode: fields.Label
    command: str
    # Of its containers, as the user named it, with its digest on this node; without containers none of them.
    image: fields.Label
    digest: fields.Label
    runtime: fields.Label
    skew: fields.Seconds  # by which this node's clock was ahead of the laptop's; 0 if they were few
    output: str
    work_dir: str
    places: fields.PerRank[fields.RankPlaces]  # of the ranks of all nodes; records of older versions have none
    processes: fields.PerRank[ProcessPlan]
    restored: bool  # made of the ledger, as the events file was damaged
    epoch: fields.AttemptNumber  # of an elastic job: that of this header, and the node that coordinates it
    lead: fields.NodeIndex
    minimum: fields.NodeIndex  # of an elastic job: how many nodes it has at least and at most
    maximum: fields.NodeIndex


class JobEvent(EventBase, JobHeader):
    """The first line of every events file."""

    type: Literal["job"]


class SamplePlan(TypedDict):
    """Of a header, as `top` needs it."""

    nodes: fields.PerNode[fields.Label]
    places: fields.PerRank[fields.RankPlaces]


class MembershipSample(TypedDict):
    """The nodes of an elastic job, as `top` needs them: what the events of one node state about the newest epoch.

    coordinates: whether the node coordinates the epoch; only then the other lists and the last fields are known. nodes: those
    that take part. left: nodes of the epoch before, and why they do not. began: of the epoch.
    """

    epoch: fields.AttemptNumber
    minimum: fields.NodeIndex
    maximum: fields.NodeIndex
    coordinates: bool
    nodes: fields.PerNode[fields.Label]
    standby: fields.PerNode[fields.Label]
    left: fields.PerNode[Tuple[fields.Label, fields.Label]]
    joined: fields.PerNode[fields.Label]
    began: fields.Time
    cause: str


class _OneProcess(TypedDict):
    """The process that an event is about."""

    pid: fields.Pid
    start: int  # clock ticks since the boot


class CaretakerEvent(EventBase, _OneProcess):
    """A guard or a gauge of the node has started."""

    type: Literal["guard", "gauge"]


class MemoryInUseEvent(EventBase):
    """Ranks of another attempt wait on this node: ended ranks have used memory of devices, and it is not free."""

    type: Literal["memory-in-use"]
    devices: fields.PerCard[fields.CardIndex]
    used: fields.Size
    seconds: fields.Pause  # how long they wait at most


class SupervisorEvent(EventBase, _OneProcess):
    """A supervisor of the node has started."""

    type: Literal["supervisor"]
    boot: fields.Label
    space: fields.Label  # of process ids: processes.namespace("pid")


class StartedEvent(EventBase, RankName, _OneProcess):
    """A rank was started."""

    type: Literal["started"]
    attempt: fields.AttemptNumber
    log: str


class RankEvent(EventBase, RankName):
    """A rank listens at its endpoint, was frozen, or goes on."""

    type: Literal["listening", "frozen", "thawed"]  # frozen: by SIGSTOP


class OtherAddressEvent(EventBase, RankName):
    """A pserver listens at another address than planned."""

    type: Literal["elsewhere"]
    listens: fields.Label  # a pserver, at another address than planned
    endpoint: fields.Label


class _ExitedFields(TypedDict, total=False):
    """The fields of ExitedEvent that may be missing."""

    signal: fields.Signal
    stopped: bool  # after the supervisor had signalled it
    note: str
    attempt: fields.AttemptNumber
    cpu: float  # seconds of it and the children that it waited for
    memory: float  # peak bytes of them
    error: int  # of a failure: a number made of the last line of its log without its digits
    consequence: bool  # whether this line is about a lost connection
    timed_out: bool  # of a collective


class ExitedEvent(EventBase, RankName, _ExitedFields):
    """A rank has ended, or could not be started."""

    type: Literal["exited"]
    code: fields.ExitCode


class DiskEvent(EventBase):
    """The disk of ROOT_DIR is full, or has room again."""

    type: Literal["disk"]
    full: bool  # or it has room again
    root: str


class _PhaseFields(TypedDict, total=False):
    """Of an ending because of failures: these as text, and their ranks, the first one first."""

    end: Optional[OutcomeName]
    why: str
    culprits: fields.PerRank[fields.RankKey]
    attempt: fields.AttemptNumber


class PhaseEvent(EventBase, _PhaseFields):
    """The job has entered a phase."""

    type: Literal["phase"]
    name: fields.Label  # of the coordinator: joining, pserver, trainer, ending


class EpochEvent(EventBase):
    """An epoch of an elastic job begins. It has the fields of model.elastic.membership.EpochChange."""

    type: Literal["epoch"]
    attempt: fields.AttemptNumber


class EpochEndedEvent(EventBase):
    """An epoch has ended on this node; the job goes on."""

    type: Literal["epoch-ended"]
    attempt: fields.AttemptNumber
    why: str


class LeaseLostEvent(EventBase):
    """The node has ended its ranks, since the coordinator did not acknowledge its heartbeats for `seconds`."""

    type: Literal["lease-lost"]
    attempt: fields.AttemptNumber
    seconds: float


class LeftEvent(EventBase):
    """The node was released from an elastic job."""

    type: Literal["left"]
    why: str


class StandbyEvent(EventBase):
    """A machine that has joined an elastic job does not take part in this epoch, or one that was on standby is gone."""

    type: Literal["standby", "standby-left"]
    name: fields.Label
    address: fields.Label


class LeftOutEvent(EventBase):
    """A machine was to take part in the next epoch, and failed, left or was lost while that was prepared."""

    type: Literal["left-out"]
    name: fields.Label
    why: str


class BelowMinimumEvent(EventBase):
    """The job waits for nodes; it ends if it is below its minimum for `seconds`."""

    type: Literal["below-minimum"]
    present: int
    minimum: int
    seconds: float


class AbsentEvent(EventBase):
    """Nodes have never connected to the coordinator."""

    type: Literal["absent"]
    nodes: fields.PerNode[fields.NodeIndex]  # they never connected to the coordinator
    endpoint: fields.Label
    seconds: float


class Unconnected(TypedDict):
    """Since when a node has no connection to the coordinator, and the newest cause. again: it had one before."""

    endpoint: fields.Label
    errno: fields.Label
    why: str
    since: fields.Time
    again: bool


class UnconnectedEvent(EventBase, Unconnected):
    """The node has no connection to the coordinator."""

    type: Literal["unconnected"]


class ConnectedEvent(EventBase):
    """The node has a connection to the coordinator again."""

    type: Literal["connected"]


class _LostFields(TypedDict, total=False):
    """What a loss in an elastic job has besides."""

    ends_by: fields.Time  # in an elastic job: when the ranks of the node have ended, by the coordinator's clock


class LostEvent(EventBase, _LostFields):
    """The coordinator has given a node up."""

    type: Literal["lost"]
    node: fields.NodeIndex  # the coordinator gave it up
    why: str
    ranks: fields.PerRank[fields.RankOutput]  # what the coordinator knew of them, by its clock


class RestartEvent(EventBase):
    """The coordinator begins a new attempt with all ranks."""

    type: Literal["restart"]  # of the coordinator: all starts again
    attempt: fields.AttemptNumber
    pause: fields.Pause  # seconds before the start


class HangEvent(EventBase):
    """The job makes no progress, and samples of its ranks show which of them do not go on."""

    type: Literal["hang"]
    text: fields.Label
    ranks: Annotated[List[Tuple[fields.Role, fields.Rank]], 100_000]


class NotificationEvent(EventBase, Notification):
    """The coordinator sends a notification. laptop: the attached one that it lets send it, or "". failed: why that failed."""

    type: Literal["notification"]
    laptop: fields.Label
    failed: fields.Label


class StoppingEvent(EventBase):
    """The processes of this node are ended, by the supervisor, or by its guard or a stop if it is gone."""

    # The supervisor ends this node's processes; or it is gone, and its guard or a stop ended them.
    type: Literal["stopping", "supervisor-lost"]
    why: str


class CleanEvent(EventBase):
    """The processes of an attempt have ended on this node, but for survivors."""

    type: Literal["clean"]
    survivors: fields.PerRank[fields.Label]  # processes of the job that live on this node


class OutcomeEvent(EventBase):
    """It has the fields of model.job.outcome.Outcome."""

    type: Literal["verdict", "ended"]  # of the coordinator, and what each node recorded last
    state: OutcomeName


_OfNode = Union[JobEvent, SupervisorEvent, CaretakerEvent, DiskEvent, UnconnectedEvent, ConnectedEvent]
_OfRank = Union[MemoryInUseEvent, StartedEvent, RankEvent, OtherAddressEvent, ExitedEvent]
_OfCoordinator = Union[PhaseEvent, AbsentEvent, LostEvent, RestartEvent, HangEvent, NotificationEvent]
_OfEnd = Union[StoppingEvent, CleanEvent, Annotated[OutcomeEvent, Outcome]]
_OfEpochs = Union[
    Annotated[EpochEvent, EpochChange],
    EpochEndedEvent,
    LeaseLostEvent,
    LeftEvent,
    LeftOutEvent,
    StandbyEvent,
    BelowMinimumEvent,
]
Event = Annotated[Union[_OfNode, _OfRank, _OfCoordinator, _OfEpochs, _OfEnd], AnyEvent]
Events = Annotated[List[Event], 200_000]  # of one job on one node
