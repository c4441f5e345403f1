"""The machines that join a job exchange these messages with its coordinator, before their supervisors run.

They travel as headers of frames over the job's mutual TLS, so the sender of each one has the job's key. From an offer on, both
sides send a `beat` when they have nothing else to send: silence ends a connection. An order of a round is answered by `done` or
`failed` of the same round. Modules import these types for type checking only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Literal, Optional, Tuple, TypedDict

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


class _Errors(TypedDict):
    """The errors that a message reports."""

    errors: List[JoinError]


class _OfRound(TypedDict):
    """The round of an order, and of the message that answers it."""

    round: int


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


class DoneMessage(_OfRound):
    """The order of this round is done. `facts`: the answer to a probe. `port`: where a relay listens, 0: there is none."""

    type: Literal["done"]
    facts: Optional[ProbeAnswer]
    port: int


class FailedMessage(_OfRound, _Errors):
    """The order of this round has failed."""

    type: Literal["failed"]


class LeavingMessage(_Errors):
    """The machine leaves: its user or a signal ended it."""

    type: Literal["leaving"]


class StopJobMessage(_Errors):
    """The user ends an elastic job between two epochs, by a request to this machine."""

    type: Literal["stop"]


# -- from the coordinator


class RefusedMessage(_Errors):
    """This machine is not wanted."""

    type: Literal["refused"]


class WaitMessage(TypedDict):
    """The offer is accepted. `missing`: the indices, [] where the machines have none."""

    type: Literal["wait"]
    present: int
    nnodes: int
    missing: List[int]


class ProbeOrder(_OfRound):
    """Probe the node for the plan."""

    type: Literal["probe"]


class RelayOrder(_OfRound):
    """Start a relay (node/dispatch). `request`: without certificate, key and address; None: this machine needs none."""

    type: Literal["relay"]
    request: Optional[RelayRequest]


class FetchOrder(_OfRound):
    """Fetch the workspace from these relays, the best first, `degree` of them at a time."""

    type: Literal["fetch"]
    sources: List[Tuple[str, int]]
    degree: int


class PlaceOrder(_OfRound):
    """`release`: the workspace, "" if it lies on the machine. `warnings`: of the plan."""

    type: Literal["place"]
    spec: Spec
    release: str
    warnings: List[str]


class LaunchOrder(_OfRound):
    """Start the supervisor, and prepare it."""

    type: Literal["launch"]
    now: float  # the coordinator's clock


class UndoOrder(_OfRound):
    """Take back what was done for the plan, which is made again."""

    type: Literal["undo"]


class GoOrder(TypedDict):
    """Run the supervisor: the coordinator listens."""

    type: Literal["go"]


class AbortMessage(_Errors):
    """The joining is over: undo everything, and end with these errors."""

    type: Literal["abort"]
