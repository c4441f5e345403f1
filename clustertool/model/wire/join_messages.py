"""The machines that join a job exchange these messages with its coordinator, before their supervisors run.

They travel as headers of frames over the job's mutual TLS, so the sender of each one has the job's key. From an offer on, both
sides send a `beat` when they have nothing else to send: silence ends a connection. An order of a round is answered by `done` or
`failed` of the same round. Modules import these types for type checking only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Literal, Optional, Tuple, TypedDict, Union

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import RelayRequest
    from clustertool.model.wire.coordinator_messages import Incarnation
    from clustertool.model.wire.spec_types import Spec


class _ExitCode(TypedDict, total=False):
    """The exit code of an error."""

    code: int  # where it is not that of the class


class JoinError(_ExitCode):
    """One error of a machine, as join_errors.py writes and reads it."""

    kind: str  # the name of the class
    what: str
    fix: str
    node: str


# -- to the coordinator


class _OfMembers(TypedDict, total=False):
    """What the offer of a machine has that was a member before."""

    epoch: int  # the highest attempt of an elastic job that this process has been in, and has ended; -1 if none


class OfferMessage(_OfMembers):
    """The first message of a machine. `address`: its own one on the way to the coordinator; `coordinator`: the other end's."""

    type: Literal["offer"]
    index: Optional[int]
    nnodes: int
    version: str
    code: str
    sender: Incarnation
    address: str
    coordinator: str
    hostname: str
    own: Dict[str, object]  # plain form of join_file.OwnSettings


class JoinBeat(TypedDict):
    """A sign of life."""

    type: Literal["beat"]  # from both sides


class DoneMessage(TypedDict):
    """The order of this round is done. `facts`: the answer to a probe. `port`: where a relay listens, 0: there is none."""

    type: Literal["done"]
    round: int
    facts: Optional[ProbeAnswer]
    port: int


class FailedMessage(TypedDict):
    """The order of this round has failed."""

    type: Literal["failed"]
    round: int
    errors: List[JoinError]


class LeavingMessage(TypedDict):
    """The machine leaves: its user or a signal ended it."""

    type: Literal["leaving"]
    errors: List[JoinError]


class StopJobMessage(TypedDict):
    """The user ends an elastic job between two epochs, by a request to this machine."""

    type: Literal["stop"]
    errors: List[JoinError]


NodeMessage = Union[OfferMessage, JoinBeat, DoneMessage, FailedMessage, LeavingMessage, StopJobMessage]

# -- from the coordinator


class RefusedMessage(TypedDict):
    """This machine is not wanted."""

    type: Literal["refused"]
    errors: List[JoinError]


class WaitMessage(TypedDict):
    """The offer is accepted. `missing`: the indices, [] where the machines have none."""

    type: Literal["wait"]
    present: int
    nnodes: int
    missing: List[int]


class ProbeOrder(TypedDict):
    """Probe the node for the plan."""

    type: Literal["probe"]
    round: int


class RelayOrder(TypedDict):
    """Start a relay (node/dispatch). `request`: without certificate, key and address; None: this machine needs none."""

    type: Literal["relay"]
    round: int
    request: Optional[RelayRequest]


class FetchOrder(TypedDict):
    """Fetch the workspace from these relays, the best first, `degree` of them at a time."""

    type: Literal["fetch"]
    round: int
    sources: List[Tuple[str, int]]
    degree: int


class PlaceOrder(TypedDict):
    """`release`: the workspace, "" if it lies on the machine. `warnings`: of the plan."""

    type: Literal["place"]
    round: int
    spec: Spec
    release: str
    warnings: List[str]


class LaunchOrder(TypedDict):
    """Start the supervisor, and prepare it."""

    type: Literal["launch"]
    round: int
    now: float  # the coordinator's clock


class UndoOrder(TypedDict):
    """Take back what was done for the plan, which is made again."""

    type: Literal["undo"]
    round: int


class GoOrder(TypedDict):
    """Run the supervisor: the coordinator listens."""

    type: Literal["go"]


class AbortMessage(TypedDict):
    """The joining is over: undo everything, and end with these errors."""

    type: Literal["abort"]
    errors: List[JoinError]


CoordinatorMessage = Union[
    JoinBeat,
    RefusedMessage,
    WaitMessage,
    ProbeOrder,
    RelayOrder,
    FetchOrder,
    PlaceOrder,
    LaunchOrder,
    UndoOrder,
    GoOrder,
    AbortMessage,
]
