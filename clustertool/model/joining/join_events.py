"""The events and actions of decide() in join_decisions.py.

What happens while machines join a job, and what its coordinator does then.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple, Union

from clustertool.errors import ClustertoolError
from clustertool.model.joining.join_offers import Offer

# -- events -----------------------------------------------------------------------------------------------------------


class Offered(NamedTuple):
    connection: int
    offer: Offer
    now: float


class Gone(NamedTuple):
    """The connection has ended, or was silent for too long."""

    connection: int
    why: str


class Left(NamedTuple):
    """The machine was interrupted. `error`: that, as the others report it."""

    connection: int
    error: ClustertoolError


class Done(NamedTuple):
    """An order is done. `round`: of the order."""

    connection: int
    round: int


class Failed(NamedTuple):
    connection: int
    round: int
    error: ClustertoolError


class Planned(NamedTuple):
    """The plan is made, or `error` says why there is none.

    fetch: machines lack the workspace. later: node 0 lacks it, too: the laptop sends it, and this event comes again then.
    failures: the same as errors of single machines, where it consists of such errors.
    """

    error: Optional[ClustertoolError] = None
    fetch: bool = False
    later: bool = False
    failures: Tuple[Tuple[int, ClustertoolError], ...] = ()


class Signalled(NamedTuple):
    """A signal for the coordinator."""

    error: ClustertoolError


class Tick(NamedTuple):
    now: float


Event = Union[Offered, Gone, Left, Done, Failed, Planned, Signalled, Tick]


# -- actions ----------------------------------------------------------------------------------------------------------


class Refuse(NamedTuple):
    connection: int
    error: ClustertoolError


class Drop(NamedTuple):
    """Close a connection that another one of the same machine replaces."""

    connection: int


class Wait(NamedTuple):
    """Tell all machines how many have joined. missing: indices, () where the machines have none."""

    present: int
    missing: Tuple[int, ...]


class Number(NamedTuple):
    """The connections in the order of their node ids."""

    order: Tuple[int, ...]


class Order(NamedTuple):
    """`kind`: probe, relay, fetch, place, launch or undo."""

    kind: str
    round: int


class MakePlan(NamedTuple):
    pass


class Coordinate(NamedTuple):
    round: int


class Go(NamedTuple):
    pass


class OutOfEpoch(NamedTuple):
    """Record that a machine of an elastic job, which was to take part in the next epoch, does not."""

    name: str
    why: str


class Abort(NamedTuple):
    """Undo everything, everywhere. All machines end with this error."""

    error: ClustertoolError


Action = Union[Refuse, Drop, Wait, Number, Order, MakePlan, Coordinate, Go, OutOfEpoch, Abort]
