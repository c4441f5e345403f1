"""The coordinator of the machines that join a job decides, purely: decide(state, event) -> (state, actions).

    phase      event                                next       actions
    gathering  a machine offers                     gathering  Wait, or Refuse
    gathering  a machine leaves, or its connection  gathering  Wait
    gathering  a machine of an engine leaves        over       Abort               (the engine does not start it again)
    gathering  all N machines have joined           probing    Number, Order(probe)
    gathering  JOIN_TIMEOUT since the first one     over       Abort (75)
    probing    all machines have answered           planning   MakePlan
    planning   the plan is made                     placing    Order(place)
    planning   the workspace is still to come       awaiting
               from the laptop
    awaiting   node 0 has the workspace             placing, relaying
    planning   the plan is made; machines lack      relaying   Order(relay)        (they start relays, and node 0 one that
               the workspace                                                        serves)
    relaying   all relays listen                    fetching   Order(fetch)
    fetching   all have the workspace               placing    Order(place)
    placing    all have placed the job              launching  Order(launch)       (to all but the coordinator itself)
    placing    a port was taken meanwhile           undoing    Order(undo)         (a few times)
    undoing    all have undone it                   probing    Order(probe)
    launching  all supervisors are prepared         leading    Coordinate          (the coordinator's own supervisor)
    leading    the coordinator listens                     over       Go
    any**      not all have answered for 180 s      over       Abort (75)
    any*       a machine fails, leaves or is lost   over       Abort
    any        the coordinator is interrupted       over       Abort (130, 143)

    Of an elastic job (`gathering` is present):
    gathering  enough machines, see gathering.py    probing    Number, Order(probe)
    gathering  too few for too long                 over       Abort (75)
    any*       another machine fails, leaves or     undoing    Refuse, Order(undo), OutOfEpoch
               is lost
    planning   no plan for these machines, and an   undoing    Order(undo)         (then it waits for others, `timeout` at most)
               epoch has run before
    undoing    all have undone it                   gathering

    * but for gathering. Failures in answer to an order are collected until all machines have answered.
    ** but for gathering, awaiting, fetching and placing, which take as long as the workspace is large.

A machine that offers is refused if it has another code or another number of nodes than the coordinator, if its index belongs to
a machine that is connected, and after the plan. A machine whose connection is open but silent for the loss timeout counts as
gone: the caller reports that, so the newer one of two with the same index replaces it. A connection is a number. The
coordinator's own machine is connection 0 and never leaves. Times are seconds of any clock that only grows.
"""

from __future__ import annotations

from copy import copy
from typing import Callable, Dict, FrozenSet, Mapping, NamedTuple, Optional, Set, Tuple, Union

from clustertool.errors import ClustertoolError, NodeLost, PortInUse, Several, UsageError, as_one, only
from clustertool.model.elastic.epochs import Gathering, Readiness
from clustertool.model.job.outcome import some
from clustertool.model.joining import join_offers
from clustertool.model.joining.join_offers import COORDINATOR, JoinedNode, Offer

_ANSWER = 180.0  # seconds for an answer to an order that copies nothing: a file system that is gone never gives one
_TRIES = 5  # plans that are made because of a port that another job has taken meanwhile


# -- events -----------------------------------------------------------------------------------------------------------


class Offered(NamedTuple):
    """A machine offers itself."""

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
    """A machine has failed at the order of this round."""

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
    """Time has passed."""

    now: float


Event = Union[Offered, Gone, Left, Done, Failed, Planned, Signalled, Tick]


# -- actions ----------------------------------------------------------------------------------------------------------


class Refuse(NamedTuple):
    """Send a machine the error, with which it ends."""

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
    """Plan the job; the event Planned has the result."""


class Coordinate(NamedTuple):
    """Prepare the coordinator's own supervisor, as the order of this round."""

    round: int


class Go(NamedTuple):
    """Let all machines run their supervisors: the joining is over."""


class OutOfEpoch(NamedTuple):
    """Record that a machine of an elastic job, which was to take part in the next epoch, does not."""

    name: str
    why: str


class Abort(NamedTuple):
    """Undo everything, everywhere. All machines end with this error."""

    error: ClustertoolError


Action = Union[Refuse, Drop, Wait, Number, Order, MakePlan, Coordinate, Go, OutOfEpoch, Abort]


# -- decisions --------------------------------------------------------------------------------------------------------


class JoinState(NamedTuple):
    """The state of the joining. `own`: the coordinator's offer. `round`: of the last order. `answered`: what has answered it.

    names: of all machines by index, where `engine` starts them together. elastic: how the machines of an epoch are chosen.
    standby: those that are connected, and do not take part in it. unfit: machines for which there is no plan, and why: the only
    node with a pserver may be missing.
    """

    own: Offer
    timeout: float
    names: Tuple[str, ...] = ()
    engine: str = ""
    phase: str = "gathering"
    members: Tuple[JoinedNode, ...] = ()
    since: Optional[float] = None  # when the first machine has joined
    round: int = 0
    answered: Tuple[int, ...] = ()
    failures: Tuple[Tuple[int, ClustertoolError], ...] = ()
    tries: int = 1
    asked: Tuple[int, float] = (0, 0.0)  # a round, and when it was seen first
    elastic: Optional[Gathering] = None
    standby: Tuple[JoinedNode, ...] = ()
    unfit: Optional[Tuple[FrozenSet[int], ClustertoolError]] = None

    @property
    def ended(self) -> bool:
        return self.phase == "over"


Step = Tuple[JoinState, Tuple[Action, ...]]
_ORDERS = {
    "probing": "probe",
    "relaying": "relay",
    "fetching": "fetch",
    "placing": "place",
    "launching": "launch",
    "undoing": "undo",
}

_QUICK = ("probing", "relaying", "launching", "undoing")

_NEXT = {"relaying": "fetching", "fetching": "placing", "placing": "launching", "undoing": "probing"}


def decide(state: JoinState, event: Event) -> Step:
    """Return the next state and the actions for an event. Once the joining is over, it only refuses offers."""
    if state.ended:
        return state, _refuse_late(state, event) if isinstance(event, Offered) else ()
    return _TABLE[type(event)](state, event)


# -- machines come and go ---------------------------------------------------------------------------------------------


def _on_offered(state: JoinState, event: Offered) -> Step:
    """Add a machine that offers itself, and begin once all are there; its earlier connection is dropped.

    A machine is refused with another code or number of nodes, with the index of a connected machine, and after the gathering.
    An elastic job takes any number of nodes, and drops late offers and those of a machine that has rebooted: they come again.
    """
    offer, own = event.offer, state.own
    if _member(state, event.connection) is not None:
        return state, ()  # an offer counts once
    if offer.code != own.code:
        return state, (Refuse(event.connection, join_offers.other_code(offer, own)),)
    if offer.nnodes != own.nnodes and state.elastic is None:
        what = f"{offer.hostname} was started for {offer.nnodes} nodes, the coordinator {own.name} for {own.nnodes}"
        return state, (Refuse(event.connection, UsageError(what, "give the same number of nodes on all machines")),)
    if state.phase != "gathering":
        return state, (Drop(event.connection),) if state.elastic is not None else _refuse_late(state, event)
    same = [member for member in state.members if join_offers.is_same(member, offer)]
    left = tuple(member for member in state.members if member not in same)
    twin = next((one for one in left if offer.node is not None and one.offer.node == offer.node), None)
    if twin is not None and state.elastic is not None and join_offers.has_rebooted(twin.offer, offer):
        return state, (Drop(event.connection),)  # it offers again until the connection of before counts as gone
    if twin is not None:
        return state, (Refuse(event.connection, join_offers.index_taken(offer, twin.offer)),)
    since = event.now if state.since is None else state.since
    state = state._replace(members=(*left, JoinedNode(event.connection, offer)), since=since)
    state, actions = _begin_if_complete(state)
    return state, (*(Drop(member.connection) for member in same), *actions)


def _begin_if_complete(state: JoinState) -> Step:
    """Assign numbers and order the probes if all machines are there; else, and in an elastic job, report which are missing."""
    if state.elastic is not None or len(state.members) < state.own.nnodes:
        return state, (Wait(len(state.members), missing(state)),)
    return _number_machines(state._replace(members=join_offers.ordered(state.members)))


def _number_machines(state: JoinState) -> Step:
    """Assign numbers to the machines, which are all there, and order the probes."""
    number = Number(tuple(member.connection for member in state.members))
    state, orders = _order(state, "probing")
    return state, (Wait(len(state.members), ()), number, *orders)


def missing(state: JoinState) -> Tuple[int, ...]:
    """List the indices without a machine; () if the job is elastic, or one has joined without an index: it may get any."""
    indices = [member.offer.node for member in state.members]
    if state.elastic is not None or any(member.offer.node is None for member in state.members):
        return ()
    return tuple(index for index in range(state.own.nnodes) if index not in indices)


def _refuse_late(state: JoinState, event: Offered) -> Tuple[Action, ...]:
    """Refuse a machine that offers itself when the job has all its nodes."""
    names = some([member.offer.hostname for member in state.members])
    what = f"the job has all its {state.own.nnodes} nodes ({names}); {event.offer.hostname} is one too many"
    fix = "start the command on as many machines as it has nodes, or raise the number of nodes on all of them"
    return (Refuse(event.connection, UsageError(what, fix)),)


def _on_gone(state: JoinState, event: Gone) -> Step:
    """Leave out a machine whose connection has ended: gather again, or end a job that is not elastic after the gathering.

    One on standby is only removed.
    """
    member = _member(state, event.connection)
    if member is None:
        return state._replace(standby=tuple(one for one in state.standby if one.connection != event.connection)), ()
    if state.phase == "gathering":
        return _remove_and_wait(state, event.connection)
    if state.elastic is not None:
        return _gather_again(state, {event.connection: event.why})
    what = f"{member.offer.name} was lost before the job started: {event.why}"
    return _abort(state, NodeLost(what, "see what ended it there, and start the job again"))


def _on_left(state: JoinState, event: Left) -> Step:
    """Leave out a machine that leaves, as _on_gone() does for one whose connection has ended.

    While machines gather, one that an engine has started ends the joining of a job that is not elastic. A machine that does not
    take part is ignored.
    """
    if _member(state, event.connection) is None:
        return state, ()
    if state.elastic is not None and state.phase != "gathering":
        return _gather_again(state, {event.connection: event.error.what})
    alone = state.phase == "gathering" and (state.elastic is not None or not state.names)
    return _remove_and_wait(state, event.connection) if alone else _abort(state, event.error)


def _remove_and_wait(state: JoinState, connection: int) -> Step:
    """Remove a machine while machines gather, and report which are missing now."""
    state = state._replace(members=tuple(one for one in state.members if one.connection != connection))
    return state, (Wait(len(state.members), missing(state)),)


def _member(state: JoinState, connection: int) -> Optional[JoinedNode]:
    """Return the machine with this connection, None if it has not joined."""
    return next((member for member in state.members if member.connection == connection), None)


def _on_tick(state: JoinState, event: Tick) -> Step:
    """Do what it is time for: end a late order, begin an epoch, or end the joining after JOIN_TIMEOUT."""
    if state.phase in _QUICK:
        return _check_answers(state, event.now)
    if state.phase == "gathering" and state.elastic is not None:
        return _begin_if_ready(state, state.elastic, event.now)
    if state.phase != "gathering" or state.since is None or event.now - state.since < state.timeout:
        return state, ()
    lacking = missing(state)
    named = state.names, state.engine
    return _abort(state, join_offers.too_few(state.members, state.own.nnodes, lacking, state.timeout, *named))


def _check_answers(state: JoinState, now: float) -> Step:
    """End the joining if an order has no answer after 180 s; in an elastic job leave out machines that are late.

    If the coordinator is late, an elastic job ends, too.
    """
    number, since = state.asked
    if number != state.round:
        return state._replace(asked=(state.round, now)), ()
    if now - since < _ANSWER:
        return state, ()
    late = {one.connection: one.offer.name for one in state.members if one.connection not in _done_with(state)}
    why = f"no answer to `{_ORDERS[state.phase]}` for {_ANSWER:g} s"
    if state.elastic is not None and COORDINATOR not in late:
        state, actions = _gather_again(state, dict.fromkeys(late, why))
        return state, (*map(Drop, sorted(late)), *actions)
    what = f"{why} from {some(list(late.values()))}"
    return _abort(state, NodeLost(what, "see whether its devices and the file system of ROOT_DIR answer there"))


def _begin_if_ready(state: JoinState, elastic: Gathering, now: float) -> Step:
    """Begin the epoch if enough machines are there, and end the joining if that takes too long or there is no plan for them."""
    numbered = join_offers.with_numbers(state.members, elastic.numbers)
    present = list(numbered)
    ready = elastic.readiness(present, now)
    if ready is Readiness.WAIT:
        return state, ()
    if ready is Readiness.FAIL:
        there = join_offers.present_names(state.members)
        what = f"{there}: {len(present)} of at least {elastic.minimum} nodes are there after {elastic.timeout:g} s"
        fix = "start the job on more machines; [elastic] timeout in job.toml is the time that it waits for them"
        return _abort(state, NodeLost(what, fix))
    chosen = elastic.taking_part(present, state.own.node or COORDINATOR)
    if state.unfit is not None and state.unfit[0] == frozenset(chosen):
        if now - elastic.began < elastic.timeout:
            return state, ()
        why = state.unfit[1]
        what = f"{join_offers.present_names(state.members)}: {why.what}; no other node has joined within {elastic.timeout:g} s"
        return _abort(state, NodeLost(what, why.fix))
    members = tuple(numbered[number] for number in chosen)
    standby = tuple(member for number, member in numbered.items() if number not in chosen)
    return _number_machines(state._replace(members=members, standby=standby))


def _gather_again(state: JoinState, gone: Mapping[int, str]) -> Step:
    """Leave out connections, for these reasons: the others are ordered to undo the epoch, and gather again."""
    members = tuple(one for one in state.members if one.connection not in gone)
    left = [OutOfEpoch(one.offer.hostname, gone[one.connection]) for one in state.members if one.connection in gone]
    state, orders = _order(state._replace(members=members), "undoing")
    return state, (*orders, *left)


# -- all are there ----------------------------------------------------------------------------------------------------


def _order(state: JoinState, phase: str) -> Step:
    """Begin a phase with its order to all machines, in a new round."""
    state = state._replace(phase=phase, round=state.round + 1, answered=(), failures=())
    return state, (Order(_ORDERS[phase], state.round),)


def _on_answered(state: JoinState, event: Union[Done, Failed]) -> Step:
    """Note that a machine has done or failed at the order of this round, go on if it is the last; ignore other answers."""
    if event.round != state.round or _member(state, event.connection) is None or event.connection in state.answered:
        return state, ()
    failures = [(event.connection, event.error)] if isinstance(event, Failed) else []
    answered = (*state.answered, event.connection)
    return _continue_if_answered(state._replace(answered=answered, failures=(*state.failures, *failures)))


def _continue_if_answered(state: JoinState) -> Step:
    """Begin the next phase if the last machine has answered, or handle the failures."""
    asked = {member.connection for member in state.members}
    if not asked <= _done_with(state):
        return state, ()
    if state.failures:
        return _handle_failures(state)
    if state.phase == "undoing" and state.elastic is not None:
        return state._replace(phase="gathering", members=(*state.members, *state.standby), standby=()), ()
    if state.phase == "probing":
        return state._replace(phase="planning"), (MakePlan(),)
    if state.phase == "leading":
        return state._replace(phase="over"), (Go(),)
    if state.phase == "launching" or (state.phase == "placing" and asked == {COORDINATOR}):
        return _coordinate(state)
    return _order(state, _NEXT[state.phase])


def _done_with(state: JoinState) -> Set[int]:
    """Return the connections of which no answer is expected any more. The coordinator's own supervisor is prepared last."""
    return {*state.answered, COORDINATOR} if state.phase == "launching" else set(state.answered)


def _coordinate(state: JoinState) -> Step:
    """Begin the last order, to the coordinator itself: prepare its supervisor, to which the port of the joining passes."""
    state = state._replace(phase="leading", round=state.round + 1, failures=())
    others = tuple(member.connection for member in state.members if member.connection != COORDINATOR)
    return state._replace(answered=others), (Coordinate(state.round),)


def _handle_failures(state: JoinState) -> Step:
    """Handle failures of an order: if only ports were taken at the placing, undo and plan again; else end with all errors.

    After the fifth plan it ends in each case. An elastic job goes on without the machines that failed, unless the coordinator's
    did, or the last order has failed.
    """
    error = as_one([_with_node_name(state, connection, error) for connection, error in state.failures])
    assert error is not None
    failed = frozenset(connection for connection, _ in state.failures)
    if state.elastic is not None and COORDINATOR not in failed and state.phase != "leading":
        return _without_failed(state)
    if state.phase != "placing" or state.tries >= _TRIES or not only(error, PortInUse):
        return _abort(state, error)
    return _order(state._replace(tries=state.tries + 1), "undoing")


def _without_failed(state: JoinState) -> Step:
    """Leave out the machines of an elastic job that failed, each with its error. One whose port was taken meanwhile stays.

    If too few are left for the first epoch, the joining ends.
    """
    errors = {connection: error for connection, error in state.failures if not only(error, PortInUse)}
    if state.elastic is not None and state.elastic.first and len(state.members) - len(errors) < state.elastic.minimum:
        error = as_one([_with_node_name(state, connection, error) for connection, error in state.failures])
        assert error is not None
        return _abort(state, error)
    refused = tuple(Refuse(failed, _with_node_name(state, failed, error)) for failed, error in errors.items())
    state, actions = _gather_again(state, {connection: error.what for connection, error in errors.items()})
    return state, (*refused, *actions)


def _with_node_name(state: JoinState, connection: int, error: ClustertoolError) -> ClustertoolError:
    """Return the error with the name of its machine, unless it has one."""
    member = _member(state, connection)
    if error.node or member is None or isinstance(error, Several):
        return error
    named = copy(error)
    named.node = member.offer.hostname
    return named


def _on_planned(state: JoinState, event: Planned) -> Step:
    """Order the placing, or first the relays, once there is a plan; wait if the workspace is still to come.

    An error ends the joining, or leaves out the machines of an elastic job that it is about, or waits for others.
    """
    if event.error is not None:
        failed = frozenset(connection for connection, _ in event.failures)
        if state.elastic is not None and not state.elastic.first and not failed:
            nodes = frozenset(join_offers.with_numbers(state.members, state.elastic.numbers))
            return _gather_again(state._replace(unfit=(nodes, event.error)), {})
        if state.elastic is None or not failed or COORDINATOR in failed:
            return _abort(state, event.error)
        return _without_failed(state._replace(failures=event.failures))
    if event.later:
        return state._replace(phase="awaiting"), ()
    return _order(state, "relaying" if event.fetch else "placing")


def _on_signalled(state: JoinState, event: Signalled) -> Step:
    """End the joining, since the coordinator got a signal."""
    return _abort(state, event.error)


def _abort(state: JoinState, error: ClustertoolError) -> Step:
    """End the joining: all machines undo what they have done, and end with this error."""
    return state._replace(phase="over"), (Abort(error),)


_TABLE: Dict[type, Callable[..., Step]] = {
    Offered: _on_offered,
    Gone: _on_gone,
    Left: _on_left,
    Done: _on_answered,
    Failed: _on_answered,
    Planned: _on_planned,
    Signalled: _on_signalled,
    Tick: _on_tick,
}
