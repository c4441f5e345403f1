"""An agent sends frames of these types without a request: a followed job, and the reports of the node's relay.

answers.py checks each frame by these types before other code gets it. A tuple here is a list in JSON. Nodes import this module
for type checking only.
"""

from __future__ import annotations

from typing import Literal, Sequence, Tuple, TypedDict, Union

from clustertool.model import field_types as fields
from clustertool.model.wire.event_types import Events

# -- of a followed job


class _Base(TypedDict, total=False):
    """The node that a frame is about."""

    base: fields.BaseName  # of the node that a request with this base was about


class _LogTime(_Base, total=False):
    """The time of a part of a log."""

    t: fields.Seconds  # when the bytes were written, where logs are read in order of time


class LogFrame(_LogTime):
    """Bytes of a log, in the payload."""

    type: Literal["log"]
    node: fields.NodeIndex
    role: fields.LogRole
    rank: fields.Rank
    attempt: fields.AttemptNumber
    log: str
    off: int  # the payload is bytes of the log from here


class EventsFrame(_Base):
    """New events of the job."""

    type: Literal["events"]
    node: fields.NodeIndex
    events: Events
    at: int  # bytes of the events file that have been read so far


class BeatFrame(TypedDict):
    """A sign of life, with the node's time."""

    type: Literal["beat"]
    t: fields.Seconds


class EndFrame(_Base):
    """The job is over and all was sent."""

    type: Literal["end"]
    orphan: bool  # its supervisor and guard are gone without an outcome


class ClosedFrame(_Base):
    """Of the agent client: no more frames of the node will come."""

    type: Literal["closed"]
    why: str
    refused: bool  # the node sent something that is not valid


FollowFrame = Union[LogFrame, EventsFrame, BeatFrame, EndFrame]
StreamFrame = Union[FollowFrame, ClosedFrame]

# -- of a relay: pieces are numbers; `lacks` and `have` are sets of them (model/dispatch/topology.bits)


class RelayReady(TypedDict):
    """The relay listens."""

    type: Literal["relay-ready"]
    port: fields.Port  # where it listens
    empty: bool  # it has no piece of any release


class RelayLacks(TypedDict):
    """Which pieces the node lacks and has, by the manifest."""

    type: Literal["relay-lacks"]
    lacks: fields.LogText
    have: fields.LogText


class RelayProgress(TypedDict):
    """The progress of a node, or its end."""

    type: Literal["relay-got", "relay-done"]
    left: int  # bytes that are missing
    live: int  # sources
    peers: int  # bytes from other nodes
    came: fields.PerRank[int]  # pieces that came from the laptop


class RelayIdle(TypedDict):
    """Nothing has come to the node for a while."""

    type: Literal["relay-idle"]
    lacks: fields.LogText
    live: int
    why: fields.PerNode[str]  # of each source that failed, the cause


class RelayWrong(TypedDict):
    """A piece of the laptop does not have the digest that the manifest states."""

    type: Literal["relay-wrong"]
    piece: int  # of the laptop; it does not have the digest that the manifest says


class _FailedKind(TypedDict, total=False):
    """The class of an error."""

    kind: fields.ShortText


class RelayFailed(_FailedKind):
    """The relay has failed."""

    type: Literal["relay-failed"]
    what: fields.ErrorText
    fix: str


class _GoneWhy(TypedDict, total=False):
    """Why a relay is gone."""

    why: str


class RelayGone(_GoneWhy):
    """The process of the relay is gone."""

    type: Literal["relay-gone"]


RelayReport = Union[RelayReady, RelayLacks, RelayProgress, RelayIdle, RelayWrong, RelayFailed, RelayGone]

# -- to a relay, through its agent


class RelaySources(TypedDict):
    """A new list of sources."""

    type: Literal["relay-sources"]
    sources: Sequence[Tuple[str, int]]  # addresses and ports of other relays, the best first
    degree: int  # how many of them to use at a time


class RelayPiece(TypedDict):
    """A piece of the laptop, in the payload."""

    type: Literal["relay-piece"]
    piece: int


class RelayBeat(TypedDict):
    """A sign of life."""

    type: Literal["relay-beat"]


RelayOrder = Union[RelaySources, RelayPiece, RelayBeat]
