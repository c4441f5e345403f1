"""A connection to a supervisor's socket carries one request and its answer, each in a frame (frames.py).

The sender is a process of the same user on the node: an agent, or a program that starts ranks itself. Every message has `type`.

    request           answer            effect
    stop              accepted          the processes of the job get TERM here, and the coordinator stops the other nodes
    attached          accepted          a laptop follows the job: for --lease, and for the notifications that it sends
    leave             accepted          the node is released from an elastic job: the next epoch begins without it
    status            status            none
    rank-environment  rank-environment  none
    bundle            bundle            none; the bundle is the payload of the frame
    stacks            stacks            the ranks here are sampled; the samples, as JSON, are the payload of the frame
    rank-started      accepted          a rank that mpirun has started is a child of the supervisor now, and belongs to the job
    rank-end          process-end       none; the answer comes when the rank has ended (and not if it has failed)
    launcher-signal   accepted          mpirun ends the rank: what this rank does now is no failure of its own
    launch-daemon     process-end       the supervisor of a node starts mpirun's daemon; the answer comes when that has ended

`error` may come in place of each answer. REQUESTS has the types of each request and of its answer.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Mapping, Optional, Tuple, TypedDict, Union, cast

from clustertool.model import field_types as fields
from clustertool.model.shape import Annotated, check_of, number, text, whole

_Number = Annotated[int, whole(0, (1 << 31) - 1)]

# -- requests


class StopHow(TypedDict):
    """How a job is ended."""

    by: fields.Label  # what asked for it, as the verdict shows it
    code: _Number  # exit code of the job
    grace: Annotated[float, number(0, (1 << 31) - 1)]  # seconds between TERM and KILL
    force: bool


class StopCommand(StopHow):
    """A request to end the job."""

    type: Literal["stop"]


class LaptopNotice(TypedDict):
    """What an attached laptop does about notifications. A program of an earlier version does not send it.

    laptop: its own name, if it sends those that name it; "" if it sends none. notified: the id of one that it has sent, or "".
    """

    laptop: fields.Label
    notified: fields.Label


class AttachedNotice(LaptopNotice):
    """A laptop follows the job."""

    type: Literal["attached"]


class LeaveCommand(TypedDict):
    """A request to release the node from an elastic job."""

    type: Literal["leave"]
    code: _Number  # with which the node ends; a program of an earlier version does not send it
    by: fields.Label  # what asked for it, as records show it


class StatusQuery(TypedDict):
    """A request for the ranks of this node as they are now."""

    type: Literal["status"]


class _OneRank(TypedDict):
    """The rank that a request is about."""

    role: fields.Label
    rank: _Number


class EnvironmentQuery(_OneRank):
    """A request for what a process needs to become this rank."""

    type: Literal["rank-environment"]


class BundleQuery(TypedDict):
    """A request for the bundle of the job."""

    type: Literal["bundle"]


class StacksWanted(TypedDict):
    """Of which ranks the stacks are taken, and how."""

    role: fields.Label  # "": of all
    ranks: fields.Label  # "3,7"; "": of all
    native: bool  # with the frames of native code
    tool: fields.Label  # the digest of py-spy; "": that of any which the node has
    seconds: Annotated[float, number(0, 600)]  # that it may take


class StacksQuery(StacksWanted):
    """A request for the stacks of the ranks of this node; the answer comes when they are taken (node/jobs/stack_sampler.py)."""

    type: Literal["stacks"]


class RankStarted(_OneRank):
    """A rank that mpirun has started has this pid."""

    type: Literal["rank-started"]
    pid: _Number


class RankEndQuery(_OneRank):
    """A request that is answered when this rank has ended."""

    type: Literal["rank-end"]


class LauncherSignal(_OneRank):
    """mpirun ends this rank."""

    type: Literal["launcher-signal"]


class LaunchDaemon(TypedDict):
    """A request to start mpirun's daemon of a node."""

    type: Literal["launch-daemon"]
    host: fields.Label  # as mpirun's hostfile names it
    command: Annotated[str, text(60_000)]  # for /bin/sh; it has the names of all nodes


LauncherRequest = Union[RankStarted, RankEndQuery, LauncherSignal, LaunchDaemon]
SupervisorRequest = Union[
    StopCommand, AttachedNotice, LeaveCommand, StatusQuery, EnvironmentQuery, BundleQuery, StacksQuery, LauncherRequest
]

# -- answers


class Accepted(TypedDict):
    """The request is accepted."""

    type: Literal["accepted"]


class LiveRank(TypedDict):
    """One rank as it is now."""

    role: str
    rank: int
    attempt: int
    state: str  # a RankState
    pid: int  # 0 if it does not run
    log: str  # relative to the job's directory


class LiveStatus(TypedDict):
    """The node's part of the job as it is now."""

    type: Literal["status"]
    job: str
    node: int
    attempt: int
    leads: bool  # the coordinator of the job runs in this supervisor
    stopping: str  # "", "stopping", or "clean" when no process of the attempt is left
    outcome: Optional[Dict[str, object]]  # model.job.outcome.Outcome
    ranks: List[LiveRank]  # of this node


class RankSession(TypedDict):
    """What starts another program inside the container of a rank. Its command line follows `argv`."""

    argv: List[str]
    env: Dict[str, str]  # besides that of a login session


class _OfContainers(TypedDict, total=False):
    """What only a rank in a container has."""

    session: RankSession


class RankEnvironment(_OfContainers):
    """What a process needs to become a rank in the present attempt. It contains the values of SECRETS."""

    type: Literal["rank-environment"]
    role: str
    rank: int
    attempt: int
    argv: List[str]
    env: Dict[str, str]  # all of it: a rank inherits nothing else
    work_dir: str
    log: str  # an absolute path, for appending; its folder may be missing
    umask: int
    file_limit: int  # soft limit of open files; 0: that of the process
    device_kind: str
    devices: List[int]
    shards: List[str]


class BundleAnswer(TypedDict):
    """The bundle is the payload of the frame."""

    type: Literal["bundle"]


class StacksTaken(TypedDict):
    """The payload of the frame is {"samples": list of model/job/stacks.ProcessSample, "fault": why there are none, or ""}."""

    type: Literal["stacks"]


class ProcessEnd(TypedDict):
    """How a process has ended."""

    type: Literal["process-end"]
    code: int
    signal: int  # that has ended it, or 0


class Refused(TypedDict):
    """An error in place of the answer."""

    type: Literal["error"]
    kind: str  # of errors.from_wire
    what: str
    fix: str


SupervisorAnswer = Union[Accepted, LiveStatus, RankEnvironment, BundleAnswer, StacksTaken, ProcessEnd, Refused]

REQUESTS: Dict[str, Tuple[type, type]] = {
    "stop": (StopCommand, Accepted),
    "attached": (AttachedNotice, Accepted),
    "leave": (LeaveCommand, Accepted),
    "status": (StatusQuery, LiveStatus),
    "rank-environment": (EnvironmentQuery, RankEnvironment),
    "bundle": (BundleQuery, BundleAnswer),
    "stacks": (StacksQuery, StacksTaken),
    "rank-started": (RankStarted, Accepted),
    "rank-end": (RankEndQuery, ProcessEnd),
    "launcher-signal": (LauncherSignal, Accepted),
    "launch-daemon": (LaunchDaemon, ProcessEnd),
}


def read_request(message: Mapping[str, object]) -> SupervisorRequest:
    """Check a request to a supervisor, which any process of the user can send, and return it.

    Unknown fields may have few values. The code of a `leave` without one is 0; an `attached` may have its type only. Raises
    ValueError for an unknown type, and a missing or wrong field.
    """
    type = message.get("type")
    if not isinstance(type, str) or type not in REQUESTS:
        raise ValueError(f"{str(type)[:60]!r} is no type of a request")
    if type == "leave":
        message = {"code": 0, **message}
    if type == "attached":
        message = {"laptop": "", "notified": "", **message}
    return cast("SupervisorRequest", check_of(REQUESTS[type][0])(message, ""))
