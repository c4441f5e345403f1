"""Types of frames that an agent sends without a request: a followed job, and the reports of the node's relay.

The agent client checks each frame (answers.check_frame) before other code gets it. It adds `closed` itself, when no more frames
of a node will come. A tuple here is a list in JSON. Modules import these types for type checking only.
"""

from __future__ import annotations

from typing import List, Literal, Sequence, Tuple, TypedDict, Union

from clustertool.model.wire.event_types import Event

# -- of a followed job


class _LogTime(TypedDict, total=False):
    t: float


class LogFrame(_LogTime):
    """The payload is bytes of a log from offset `off`; t: when they were written, where logs are read in order of time."""

    type: Literal["log"]
    node: int
    role: str
    rank: int
    attempt: int
    log: str
    off: int


class EventsFrame(TypedDict):
    """at: bytes of the events file that have been read so far."""

    type: Literal["events"]
    node: int
    events: List[Event]
    at: int


class BeatFrame(TypedDict):
    type: Literal["beat"]
    t: float


class EndFrame(TypedDict):
    """The job is over and all was sent; orphan: its supervisor and guard are gone without an outcome."""

    type: Literal["end"]
    orphan: bool


class _Refused(TypedDict, total=False):
    refused: bool


class ClosedFrame(_Refused):
    """No more frames will come; refused: because the node sent something that is not valid."""

    type: Literal["closed"]
    why: str


StreamFrame = Union[LogFrame, EventsFrame, BeatFrame, EndFrame, ClosedFrame]

# -- of a relay: pieces are numbers; `lacks` and `have` are sets of them (model/dispatch/topology.bits)


class RelayReady(TypedDict):
    """Listens at `port`; empty: it has no piece of any release."""

    type: Literal["relay-ready"]
    port: int
    empty: bool


class RelayLacks(TypedDict):
    """It has the manifest, so it knows what it lacks and what it has, of `count` pieces."""

    type: Literal["relay-lacks"]
    lacks: str
    have: str
    count: int


class RelayProgress(TypedDict):
    """left: bytes that are missing; live: sources; peers: bytes from other nodes; came: pieces that came from the laptop."""

    type: Literal["relay-got", "relay-done"]
    left: int
    live: int
    peers: int
    came: List[int]


class RelayIdle(TypedDict):
    """Nothing has come for a while; why: of each source that failed, the cause."""

    type: Literal["relay-idle"]
    lacks: str
    live: int
    why: List[str]


class RelayWrong(TypedDict):
    """The laptop's piece does not have the digest that the manifest says."""

    type: Literal["relay-wrong"]
    piece: int


class _FailedKind(TypedDict, total=False):
    kind: str


class RelayFailed(_FailedKind):
    type: Literal["relay-failed"]
    what: str
    fix: str


class _GoneWhy(TypedDict, total=False):
    why: str


class RelayGone(_GoneWhy):
    type: Literal["relay-gone"]


RelayReport = Union[RelayReady, RelayLacks, RelayProgress, RelayIdle, RelayWrong, RelayFailed, RelayGone]

# -- to a relay, through its agent


class RelaySources(TypedDict):
    """Addresses and ports of other relays, the best first; degree: how many of them to use at a time."""

    type: Literal["relay-sources"]
    sources: Sequence[Tuple[str, int]]
    degree: int


class RelayPiece(TypedDict):
    """The payload is the piece."""

    type: Literal["relay-piece"]
    piece: int


class RelayBeat(TypedDict):
    type: Literal["relay-beat"]


RelayOrder = Union[RelaySources, RelayPiece, RelayBeat]

# -- between relays


class PeerGet(TypedDict):
    type: Literal["get"]
    piece: int


class PeerPiece(TypedDict):
    """The payload is the piece."""

    type: Literal["piece"]
    piece: int


class PeerHave(TypedDict):
    type: Literal["have"]
    have: str


class PeerNew(TypedDict):
    type: Literal["new"]
    new: List[int]
