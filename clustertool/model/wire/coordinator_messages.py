"""The supervisors of a job exchange these messages with its coordinator. This module has the rules by which one counts.

Every message has `type`, `attempt` (of the job, from 0) and `sender`, the incarnation of the process that sent it. `number` and
`ack` belong to the mailbox (node/system/tls_link): a message with a number is sent again after a break, until it is
acknowledged. Unknown fields are ignored.

- The first join of a node fixes the node's incarnation for the job. A connection that joins as the same node with another
  incarnation is closed. A guard may join to report that its supervisor is `gone`: `of` is the supervisor's incarnation.
- The coordinator drops a message from another incarnation than the joined one, and a message about processes (listening,
  exited, quiet, clean) of another attempt than the present one. The other types are about the job and count in any attempt.
- A supervisor obeys one coordinator, the incarnation that answers first. It closes a connection on which another one answers.
- A supervisor never goes back: it drops `start` and `stop` of an attempt below its own. `finish` counts in any attempt.
- In an elastic job the coordinator closes a connection that joins with an attempt below that with which the epoch began, and a
  supervisor one on which the coordinator has such an attempt. A node numbers its beats (`beat`, also of its join), and the
  coordinator's beats have the newest number that it has received (`seen`): model/elastic/lease.py.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple, TypedDict, Union

from clustertool.model import field_types as fields
from clustertool.model.shape import read, read_own
from clustertool.model.wire.supervisor_messages import LaptopNotice

_OF_ONE_ATTEMPT = ("start", "stop", "launch", "release", "sample")


class Incarnation(NamedTuple):
    """One process during one boot of one machine: no other process has the same three values."""

    boot: fields.Label
    pid: int
    start: int  # clock ticks since the boot


# role, rank, epoch, step, seconds since the last output
Reached = Tuple[str, int, Optional[float], Optional[float], float]


class Envelope(TypedDict, total=False):
    """`attempt` and `sender` are always there; the mailbox adds the others."""

    attempt: int
    sender: Incarnation
    number: int
    ack: int


# -- to the coordinator


class _Gone(TypedDict, total=False):
    """What a guard's join has besides: why its supervisor is gone, and which one."""

    gone: str
    of: Incarnation


class _Beat(TypedDict, total=False):
    """Of an elastic job. beat: from a node. seen: from the coordinator."""

    beat: int
    seen: int


class JoinMessage(Envelope, _Gone, _Beat):
    """The first message of a node on a connection."""

    type: Literal["join"]
    node: int
    token: str


class _News(TypedDict, total=False):
    """What a beat of a node may have besides."""

    ranks: List[Reached]  # how far they are, if that has changed
    metrics: List[object]  # [role, rank, values of Metrics], with METRICS_FILE, if they have changed
    quiet: float  # seconds for which its running trainers have made no progress
    bye: bool  # the supervisor has the outcome and leaves


class BeatMessage(Envelope, _News, _Beat):
    """A sign of life."""

    type: Literal["beat"]  # from both sides


class ListeningMessage(Envelope):
    """A rank listens at its endpoint."""

    type: Literal["listening"]
    role: str
    rank: int


class ExitedMessage(Envelope):
    """Ranks have ended."""

    type: Literal["exited"]
    # What one supervisor reaped in one go: the first MESSAGE_FIELDS of each RankExit.
    exits: Sequence[Tuple[object, ...]]
    steps: object  # JobSteps of the ranks of this node, as to_plain() converts it


class QuietMessage(Envelope):
    """At a stop, of the processes of this node only those of mpirun are left."""

    type: Literal["quiet"]


class CleanMessage(Envelope):
    """No rank of the attempt is left on this node, or only the survivors."""

    type: Literal["clean"]
    survivors: List[str]


class _StopFields(TypedDict, total=False):
    """The fields of a stop that may be missing."""

    outside: bool  # by a signal, in a job that an engine may end, or to all its processes: it may know the reason
    lost: bool  # the node has lost its records, and the job ends as with a lost node
    grace: float  # seconds between TERM and KILL, if they are not the job's
    leaves: bool  # in an elastic job: this node is shut down, and the others go on if they are enough


class StopMessage(Envelope, _StopFields):
    """A request to end the job."""

    type: Literal["stop"]
    by: str  # what asked for it, as the verdict shows it
    code: int  # with which exit code the job is to end


class AttachedMessage(Envelope, LaptopNotice):
    """A laptop follows the job."""

    type: Literal["attached"]


class SampledMessage(Envelope):
    """The trainers and pservers of this node were sampled."""

    type: Literal["sampled"]
    of: int  # the number of the order
    traces: List[object]  # model.job.hang.RankTrace


class LeaveMessage(Envelope):
    """In an elastic job: release this node."""

    type: Literal["leave"]
    by: str  # what asked for it


MemberMessage = Union[
    JoinMessage,
    BeatMessage,
    ListeningMessage,
    ExitedMessage,
    QuietMessage,
    CleanMessage,
    StopMessage,
    AttachedMessage,
    SampledMessage,
    LeaveMessage,
]

# -- from the coordinator


class StartOrder(Envelope):
    """Start the ranks of a role."""

    type: Literal["start"]
    role: str


class DaemonOrder(Envelope):
    """For one node: start the daemon of mpirun. It comes after the order to start the trainers."""

    type: Literal["launch"]
    command: str  # for /bin/sh


class _StopOrderFields(TypedDict, total=False):
    """The fields of an order to stop that may be missing."""

    grace: float  # see StopMessage
    outside: bool  # because of a signal, whose sender may signal the ranks of all nodes as well


class StopOrder(Envelope, _StopOrderFields):
    """End the ranks of the attempt."""

    type: Literal["stop"]
    why: str


class ReleaseOrder(Envelope):
    type: Literal["release"]  # no rank is left on any node: the processes of mpirun can be ended


class SampleOrder(Envelope):
    """Sample the ranks: the job makes no progress."""

    type: Literal["sample"]
    of: int  # the number of the order


class FinishOrder(Envelope):
    type: Literal["finish"]  # the job is over on all nodes, or the epoch: then the state of the outcome is NEXT_EPOCH
    outcome: Dict[str, object]  # Outcome.as_record()


class OverMessage(TypedDict):
    """To a machine on standby, which waits for an epoch of an elastic job: the job is over."""

    type: Literal["over"]
    outcome: Dict[str, object]  # Outcome.as_record()


Order = Union[StartOrder, DaemonOrder, StopOrder, ReleaseOrder, SampleOrder, FinishOrder]


def read_incarnation(value: object) -> Incarnation:
    """Read the value of `sender` or `of`. Raises ValueError."""
    return read(Incarnation, value, "an incarnation")


def is_of_earlier_epoch(message: Mapping[str, object], epoch: int) -> bool:
    """Check whether a message of an elastic job belongs to an attempt before the epoch.

    Raises ValueError if its attempt is no number.
    """
    return read_own(int, message.get("attempt"), "an attempt") < epoch


def is_outdated(order: Mapping[str, object], attempt: int) -> bool:
    """Check whether an order that is for one attempt only belongs to one before `attempt`, the supervisor's own.

    Raises ValueError if its attempt is no number.
    """
    return read_own(int, order.get("attempt"), "an attempt") < attempt and order.get("type") in _OF_ONE_ATTEMPT
