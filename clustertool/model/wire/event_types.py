"""Types of the events that a node records about a job, one JSON object a line in events.jsonl. A tuple is a list in JSON.

Every event has `t`, the time in seconds by the node's clock, and `type` (in records of the previous version: "e"):

    job          id, node, name, nodes, created, owner, mode, command, processes, skew   first line of every events file;
                 skew: seconds by which this clock was ahead of the laptop's, 0 if they were few
                 places: of the ranks of all nodes, see model/job/rank_places.py; records of older versions have none
    supervisor   pid, start, boot                  guard / gauge   pid, start
    started      role, rank, pid, start, attempt   listening  role, rank
    elsewhere    role, rank, listens, endpoint     a pserver listens at another address than planned
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

from typing import List, Literal, Optional, Tuple, TypedDict, Union

RankPlaces = Tuple[str, int, int, int, int]  # model/job/rank_places
RankKey = Tuple[str, int]
RankOutput = Tuple[
    str, int, Optional[float], Optional[float], float
]  # role, rank, epoch, step, time of the last output


class EventBase(TypedDict):
    t: float


class ProcessPlan(TypedDict):
    """A process of this node, as the first event names it."""

    role: str
    rank: int
    local_rank: int
    endpoint: str
    log: str


class JobHeader(TypedDict, total=False):
    """What is known of a job before it starts: the fields of its first event, and of the ledger's copy.

    `restored`: the event was made of the ledger, as the events file was damaged.
    """

    format: int
    id: str
    node: int
    name: str
    entry: str
    hostname: str
    nodes: List[str]
    created: float
    owner: str
    mode: str
    command: str
    skew: float
    output: str
    work_dir: str
    places: List[RankPlaces]
    processes: List[ProcessPlan]
    restored: bool


class JobEvent(EventBase, JobHeader):
    type: Literal["job"]


class SupervisorEvent(EventBase):
    type: Literal["supervisor"]
    pid: int
    start: int
    boot: str
    space: str


class CaretakerEvent(EventBase):
    type: Literal["guard", "gauge"]
    pid: int
    start: int


class StartedEvent(EventBase):
    type: Literal["started"]
    role: str
    rank: int
    pid: int
    start: int
    attempt: int
    log: str


class RankEvent(EventBase):
    type: Literal["listening", "frozen", "thawed"]
    role: str
    rank: int


class OtherAddressEvent(EventBase):
    type: Literal["elsewhere"]
    role: str
    rank: int
    listens: str
    endpoint: str


class _ExitedFields(TypedDict, total=False):
    signal: int
    stopped: bool
    note: str
    attempt: int
    cpu: float
    memory: float
    error: int
    consequence: bool


class ExitedEvent(EventBase, _ExitedFields):
    type: Literal["exited"]
    role: str
    rank: int
    code: int


class DiskEvent(EventBase):
    type: Literal["disk"]
    full: bool
    root: str


class _PhaseFields(TypedDict, total=False):
    end: Optional[str]
    why: str
    culprits: List[RankKey]
    attempt: int


class PhaseEvent(EventBase, _PhaseFields):
    type: Literal["phase"]
    name: str


class AbsentEvent(EventBase):
    type: Literal["absent"]
    nodes: List[int]
    endpoint: str
    seconds: float


class Unconnected(TypedDict):
    """Why a node has no connection to the coordinator, and since when."""

    endpoint: str
    errno: str
    why: str
    since: float
    again: bool


class UnconnectedEvent(EventBase, Unconnected):
    type: Literal["unconnected"]


class ConnectedEvent(EventBase):
    type: Literal["connected"]


class _LostFields(TypedDict, total=False):
    why: str
    ranks: List[RankOutput]


class LostEvent(EventBase, _LostFields):
    type: Literal["lost"]
    node: int


class RestartEvent(EventBase):
    type: Literal["restart"]
    attempt: int
    pause: float


class StoppingEvent(EventBase):
    type: Literal["stopping"]
    why: str


class CleanEvent(EventBase):
    type: Literal["clean"]
    survivors: List[str]


class SupervisorLostEvent(EventBase):
    type: Literal["supervisor-lost"]
    why: str


class _OutcomeLists(TypedDict, total=False):
    culprits: List[RankKey]
    victims: List[RankKey]
    node: int


class OutcomeFields(_OutcomeLists):
    """model.job.outcome.Outcome as JSON."""

    state: str
    code: int
    source: str
    reason: str


class OutcomeEvent(EventBase, OutcomeFields):
    """`verdict`: of the coordinator. `ended`: what each node recorded last."""

    type: Literal["verdict", "ended"]


Event = Union[
    JobEvent,
    SupervisorEvent,
    CaretakerEvent,
    StartedEvent,
    RankEvent,
    OtherAddressEvent,
    ExitedEvent,
    DiskEvent,
    PhaseEvent,
    AbsentEvent,
    UnconnectedEvent,
    ConnectedEvent,
    LostEvent,
    RestartEvent,
    StoppingEvent,
    CleanEvent,
    SupervisorLostEvent,
    OutcomeEvent,
]
