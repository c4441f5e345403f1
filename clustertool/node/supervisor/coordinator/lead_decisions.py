"""The lead decides, purely: decide(state, event) -> (state, actions). No clock, no I/O, no order but the events' own.

    phase      event                         next       actions
    joining    all nodes joined              pserver*   Start(first role)
    pserver    all pservers listen           trainer    Start(trainer), Start(heter): each waits for the other's ports
    trainer    all trainers exited 0         ending     Stop       (pservers and heter trainers end: their 143 is no failure)
    any        a process failed              ending     Stop       (a trainer, policy continue: the others go on)
    any        a node is lost, or absent     ending     Stop
    any        stop asked, time is over      ending     Stop
    ending     all nodes clean or lost       over       Finish(outcome)
                 a restart, and all clean    pserver*   Start(first role) of the next attempt, again: after a pause

    * a collective job has no pservers and goes on to trainer at once.

Processes that fail by themselves before the stop reaches them are culprits, too, in the order in which the lead learns of them;
those whose error is that another process has gone are behind the others. The server holds the Stop of a failure for a moment,
so that failures of the same cause arrive before it; stop() gives the order that is due then.
What ended the job first is its outcome; only a restart that is under way gives way to a lost node and to a stop. A
node whose supervisor ended its processes unasked (it thinks the lead lost) counts as lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Dict, FrozenSet, List, Optional, Tuple, Union

from clustertool.model.job.outcome import Failure, Key, Outcome, alike, exit_code, failed, some
from clustertool.model.job.state_names import JobState
from clustertool.model.roles import role_name

_NAMED = 3  # different errors in a reason


@dataclass(frozen=True)
class RankExit:
    role: str
    rank: int
    code: int
    signal: int = 0
    stopped: bool = False
    note: str = ""
    error: int = 0  # see Failure
    consequence: bool = False  # see Failure

    @property
    def key(self) -> Key:
        return (self.role, self.rank)

    @property
    def failed(self) -> bool:
        return not self.stopped and exit_code(self.code, self.signal) != 0


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    node: int


@dataclass(frozen=True)
class Listening:
    key: Key
    attempt: int = 0


@dataclass(frozen=True)
class Exited:
    """Exits that one supervisor reaped in one pass: simultaneous as far as it can be known."""

    exits: Tuple[RankExit, ...]
    attempt: int = 0


@dataclass(frozen=True)
class Clean:
    node: int
    survivors: Tuple[str, ...] = ()
    attempt: int = 0


@dataclass(frozen=True)
class Lost:
    node: int
    why: str


@dataclass(frozen=True)
class Absent:
    """These nodes never joined. `where`: a description of the coordinator; `seconds`: for how long they were expected."""

    nodes: Tuple[int, ...]
    where: str
    seconds: float


@dataclass(frozen=True)
class StopAsked:
    """`kind` STOPPED (130 Ctrl+C, 143 SIGTERM, 0 inv stop) or TIMEOUT (124). `brief`: `by` in few words, see Outcome."""

    by: str
    code: int
    kind: JobState = JobState.STOPPED
    brief: str = ""


Event = Union[Joined, Listening, Exited, Clean, Lost, Absent, StopAsked]


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """`again`: the first role of a new attempt; it begins after a pause, unless a Stop comes before."""

    role: str
    attempt: int
    again: bool = False


@dataclass(frozen=True)
class Stop:
    why: str


@dataclass(frozen=True)
class Finish:
    outcome: Outcome


Action = Union[Start, Stop, Finish]


@dataclass(frozen=True)
class Shape:
    """What never changes: which process is where, and the policy."""

    nodes: FrozenSet[int]
    names: Tuple[str, ...]
    place: Tuple[Tuple[Key, int], ...]
    on_failure: str = "abort"
    max_restarts: int = 0

    @cached_property
    def pservers(self) -> FrozenSet[Key]:
        return frozenset(key for key, _ in self.place if key[0] == "pserver")

    @cached_property
    def with_trainers(self) -> Tuple[str, ...]:
        """The roles that start once every pserver listens."""
        return ("trainer", "heter") if any(key[0] == "heter" for key, _ in self.place) else ("trainer",)

    @cached_property
    def trainers(self) -> int:
        return sum(key[0] == "trainer" for key, _ in self.place)

    def on(self, node: int) -> FrozenSet[Key]:
        return frozenset(key for key, at in self.place if at == node)

    def node_of(self, key: Key) -> int:
        return dict(self.place)[key]


@dataclass(frozen=True)
class State:
    shape: Shape
    phase: str = "joining"
    attempt: int = 0
    joined: FrozenSet[int] = frozenset()
    listening: FrozenSet[Key] = frozenset()
    exits: Tuple[RankExit, ...] = ()
    trainers_ended: int = 0
    culprits: Tuple[RankExit, ...] = ()
    gone: FrozenSet[int] = frozenset()
    lost: FrozenSet[int] = frozenset()
    survivors: Tuple[str, ...] = ()
    ending: Optional[Outcome] = None
    restart: bool = False


Step = Tuple[State, Tuple[Action, ...]]


def decide(state: State, event: Event) -> Step:
    """The next state and what to do now. What a supervisor reports of the processes of another attempt is dropped."""
    if state.phase == "over" or (isinstance(event, _OF_ONE_ATTEMPT) and event.attempt != state.attempt):
        return state, ()
    return _TABLE[type(event)](state, event)


def _joined(state: State, event: Joined) -> Step:
    state = replace(state, joined=state.joined | {event.node})
    if state.phase == "ending":
        return state, (stop(state),)
    return _advance(state)


def _listening(state: State, event: Listening) -> Step:
    return _advance(replace(state, listening=state.listening | {event.key}))


def _advance(state: State) -> Step:
    """Go on to the next role when its barrier is reached."""
    if state.phase == "joining" and state.joined >= state.shape.nodes:
        role = "pserver" if state.shape.pservers else "trainer"
        return replace(state, phase=role), (Start(role, state.attempt, again=state.attempt > 0),)
    if state.phase == "pserver" and state.listening >= state.shape.pservers:
        return replace(state, phase="trainer"), tuple(Start(role, state.attempt) for role in state.shape.with_trainers)
    return state, ()


def _exited(state: State, event: Exited) -> Step:
    ended = state.trainers_ended + sum(exit.role == "trainer" for exit in event.exits)
    state = replace(state, exits=state.exits + event.exits, trainers_ended=ended)
    if state.ending or state.restart:
        return replace(state, culprits=_ordered(state.culprits + _failures(state, event))), ()
    if any(exit.stopped for exit in event.exits):
        return _lost(state, Lost(state.shape.node_of(event.exits[0].key), "its supervisor ended its processes unasked"))
    bad = sorted((exit for exit in event.exits if exit.failed or _left_early(state, exit)), key=lambda exit: exit.key)
    if bad:
        state = replace(state, culprits=_ordered(state.culprits + tuple(bad)))
        if state.shape.on_failure == "abort" or any(exit.role != "trainer" for exit in bad):
            return _fail(state)
    if state.trainers_ended == state.shape.trainers:
        if state.culprits:
            return _fail(state)
        return _end(state, Outcome(JobState.SUCCEEDED, 0, "job", "all trainers are done"))
    return state, ()


def _failures(state: State, event: Exited) -> Tuple[RankExit, ...]:
    """Processes that failed by themselves while the job ends because of an earlier failure: they are culprits as well."""
    if not state.restart and (state.ending is None or state.ending.state is not JobState.FAILED):
        return ()
    return tuple(sorted((exit for exit in event.exits if exit.failed), key=lambda exit: exit.key))


def _ordered(culprits: Tuple[RankExit, ...]) -> Tuple[RankExit, ...]:
    """Causes before consequences; else in the order in which the lead learned of them."""
    return tuple(sorted(culprits, key=lambda exit: exit.consequence))


def _left_early(state: State, exit: RankExit) -> bool:
    """A pserver that ends before it ever listened would keep everybody waiting."""
    return exit.role == "pserver" and not exit.stopped and exit.key not in state.listening


def _fail(state: State) -> Step:
    if state.attempt < state.shape.max_restarts:
        state = replace(state, phase="ending", restart=True)
        return state, (stop(state),)
    return _end(state, _failed(state))


def stop(state: State) -> Stop:
    """The order of a job or an attempt that ends, with all failures that are known now."""
    if state.ending is not None and state.ending.state is not JobState.FAILED:
        return Stop(state.ending.reason)
    return Stop(f"restart after attempt {state.attempt}: {reason(state)}" if state.restart else reason(state))


def may_fail(state: State) -> bool:
    """Whether the job ends because of a failure, and other processes of it may fail of the same cause."""
    failing = state.restart or (state.ending is not None and state.ending.state is JobState.FAILED)
    return state.phase == "ending" and failing and len(state.exits) < len(state.shape.place)


def _failed(state: State) -> Outcome:
    first = state.culprits[0]
    code = exit_code(first.code, first.signal) or 1
    keys = tuple(exit.key for exit in state.culprits)
    return Outcome(JobState.FAILED, code, "job", reason(state), keys, node=state.shape.node_of(first.key))


def reason(state: State) -> str:
    """All failures, the first one first; those with the same error in one sentence."""
    place, names = dict(state.shape.place), state.shape.names
    groups = alike(
        Failure(exit.role, exit.rank, names[place[exit.key]], exit.code, exit.signal, exit.note, exit.error)
        for exit in state.culprits
    )
    more = sum(map(len, groups[_NAMED:]))
    return "; ".join([*map(failed, groups[:_NAMED]), *([f"{more} more failed"] if more else [])])


def _end(state: State, outcome: Outcome) -> Step:
    return replace(state, phase="ending", ending=outcome, restart=False), (Stop(outcome.reason),)


def _clean(state: State, event: Clean) -> Step:
    if state.phase != "ending":
        return state, ()  # a supervisor that ended by itself: its connection or its exits will say why
    return _over(replace(state, gone=state.gone | {event.node}, survivors=state.survivors + event.survivors))


def _lost(state: State, event: Lost) -> Step:
    state = replace(state, lost=state.lost | {event.node}, gone=state.gone | {event.node})
    if state.ending:
        return _over(state)
    name = state.shape.names[event.node]
    culprits = tuple(sorted(state.shape.on(event.node)))
    brief = f"node {name} is lost"
    outcome = Outcome(JobState.LOST, 75, "tool", f"{brief}: {event.why}", culprits, node=event.node, brief=brief)
    state, actions = _end(state, outcome)
    state, more = _over(state)
    return state, actions + more


def _absent(state: State, event: Absent) -> Step:
    """No node is to blame if no other one has joined: then the way to the coordinator is blocked."""
    absent = frozenset(event.nodes)
    state = replace(state, lost=state.lost | absent, gone=state.gone | absent)
    if state.ending:
        return _over(state)
    all_others = len(absent) == len(state.shape.nodes) - 1
    names = some([state.shape.names[node] for node in event.nodes])
    what = "no other node could connect" if all_others else f"no connection from {names}"
    node = event.nodes[0] if len(event.nodes) == 1 and not all_others else -1
    brief = f"{what} to {event.where}"
    state, actions = _end(
        state, Outcome(JobState.LOST, 75, "tool", f"{brief} within {event.seconds:g} s", node=node, brief=brief)
    )
    state, more = _over(state)
    return state, actions + more


def expected(state: State, where: str) -> str:
    """What the job waits for before its trainers start; "" if they have started. `where`: a description of the coordinator."""
    if state.phase == "joining":
        missing = [state.shape.names[node] for node in sorted(state.shape.nodes - state.joined)]
        return f"a connection from {some(missing)} to {where}"
    if state.phase == "pserver":
        closed = sorted(state.shape.pservers - state.listening)
        names = state.shape.names
        return some(
            [f"an open port of {role_name(key[0])} {key[1]} on {names[state.shape.node_of(key)]}" for key in closed]
        )
    return ""


def _stop_asked(state: State, event: StopAsked) -> Step:
    if state.ending:
        return state, (Stop(event.by),)
    return _end(state, Outcome(event.kind, event.code, "tool", event.by, brief=event.brief))


def _over(state: State) -> Step:
    """When the last node is clean or lost: the verdict, or the next attempt, never together with survivors of the last one."""
    if not state.gone >= state.shape.nodes:
        return state, ()
    if state.restart and not state.survivors:
        return _advance(State(state.shape, attempt=state.attempt + 1, joined=state.joined))
    ending = state.ending
    if ending is None or ending.state is JobState.FAILED:
        ending = _failed(state)  # others may have failed since
    outcome = ending._replace(victims=_victims(state, ending))
    return replace(state, phase="over", ending=outcome), (Finish(outcome),)


def _victims(state: State, outcome: Outcome) -> Tuple[Key, ...]:
    """Processes that were stopped. A pserver's or heter trainer's stop after success is none."""
    if outcome.state is JobState.SUCCEEDED:
        return ()
    guilty = set(outcome.culprits)
    ended: Dict[Key, RankExit] = {exit.key: exit for exit in state.exits}
    victims: List[Key] = [key for key, exit in ended.items() if key not in guilty and exit.stopped]
    return tuple(sorted(victims))


_OF_ONE_ATTEMPT = (Listening, Exited, Clean)
_TABLE: Dict[type, Callable[..., Step]] = {
    Joined: _joined,
    Listening: _listening,
    Exited: _exited,
    Clean: _clean,
    Lost: _lost,
    Absent: _absent,
    StopAsked: _stop_asked,
}
