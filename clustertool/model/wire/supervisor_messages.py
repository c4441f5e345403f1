"""Messages on a supervisor's socket: a connection carries one request and its answer, each in a frame (frames.py).

The sender is a process of the same user on the node: an agent, or a program that starts ranks itself. Every message has `type`.

    request           answer            effect
    stop              accepted          the processes of the job get TERM here, and the lead stops the other nodes
    attached          accepted          a laptop follows the job: for --lease
    status            status            none
    rank-environment  rank-environment  none
    bundle            bundle            none; the bundle is the payload of the frame

`error` may come in place of each answer. REQUESTS has the types of each request and of its answer.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Mapping, Optional, Tuple, TypedDict, Union, cast, get_type_hints

_LONGEST = 4096  # characters of a text in a request
_HIGHEST = 1 << 31

# -- requests


class StopHow(TypedDict):
    by: str  # what asked for it, as the verdict shows it
    code: int  # exit code of the job
    grace: float  # seconds between TERM and KILL
    force: bool


class StopCommand(StopHow):
    type: Literal["stop"]


class AttachedNotice(TypedDict):
    type: Literal["attached"]


class StatusQuery(TypedDict):
    type: Literal["status"]


class EnvironmentQuery(TypedDict):
    type: Literal["rank-environment"]
    role: str
    rank: int


class BundleQuery(TypedDict):
    type: Literal["bundle"]


SupervisorRequest = Union[StopCommand, AttachedNotice, StatusQuery, EnvironmentQuery, BundleQuery]

# -- answers


class Accepted(TypedDict):
    type: Literal["accepted"]


class LiveRank(TypedDict):
    role: str
    rank: int
    attempt: int
    state: str  # a RankState
    pid: int  # 0 if it does not run
    log: str  # relative to the job's directory


class LiveStatus(TypedDict):
    type: Literal["status"]
    job: str
    node: int
    attempt: int
    leads: bool  # the coordinator of the job runs in this supervisor
    stopping: str  # "", "stopping", or "clean" when no process of the attempt is left
    outcome: Optional[Dict[str, object]]  # model.job.outcome.Outcome
    ranks: List[LiveRank]  # of this node


class RankEnvironment(TypedDict):
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
    type: Literal["bundle"]


class Refused(TypedDict):
    type: Literal["error"]
    kind: str  # of errors.from_wire
    what: str
    fix: str


SupervisorAnswer = Union[Accepted, LiveStatus, RankEnvironment, BundleAnswer, Refused]

REQUESTS: Dict[str, Tuple[type, type]] = {
    "stop": (StopCommand, Accepted),
    "attached": (AttachedNotice, Accepted),
    "status": (StatusQuery, LiveStatus),
    "rank-environment": (EnvironmentQuery, RankEnvironment),
    "bundle": (BundleQuery, BundleAnswer),
}


def read_request(message: Mapping[str, object]) -> SupervisorRequest:
    """Check a request of any process of the user. Unknown fields are ignored. Raises ValueError."""
    type = message.get("type")
    if not isinstance(type, str) or type not in REQUESTS:
        raise ValueError(f"{str(type)[:60]!r} is no type of a request")
    for name, kind in get_type_hints(REQUESTS[type][0]).items():
        if name != "type" and not _fits(message.get(name), kind):
            raise ValueError(f"{name} of {type} is missing, or is no valid {kind.__name__}")
    return cast("SupervisorRequest", message)


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, str):
        return kind is str and len(value) <= _LONGEST
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, kind)) and kind in (int, float) and 0 <= cast("float", value) < _HIGHEST
