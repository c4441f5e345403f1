"""The coordinator decides, purely: decide(state, event) -> (state, actions). No clock, no I/O, no order but the events' own.

    phase      event                         next       actions
    joining    all nodes joined              pserver*   Start(first role)
    pserver    all pservers listen           trainer    Start(trainer), Start(heter): each waits for the other's ports
    trainer    all trainers exited 0         ending     Stop       (pservers and heter trainers end: their 143 is no failure)
                 of mpirun: and it exited 0
    trainer    the job hangs                 ending     Stop       (on_hang abort: 124; restart: as after a failure)
    any        a process failed              ending     Stop       (a trainer, policy continue: the others go on)
    any        a node is lost, or absent     ending     Stop
    any        stop asked, time is over      ending     Stop       (a signal to a job of an engine: Ask)
    ending     no rank on any node           ending     Release    (only where mpirun starts the trainers)
    ending     the engine answered           ending                (its outcome is that of the job)
    ending     all nodes clean or lost       over       Finish(outcome), after the engine's answer
                 a restart, and all clean    pserver*   Start(first role) of the next attempt, again: after a pause
                   no step later than before,
                   for the third restart     over       Finish(outcome): the failure

    An attempt that ends gets no second Stop, but for one with a shorter grace: the stop of a user arrives from each node.
    * a collective job has no pservers and goes on to trainer at once.

Where mpirun starts the trainers, it is started together with them. What it and its daemons do after a failure of a rank is no
failure of theirs, and a rank that mpirun ends is a victim. Only one that SIGKILL has ended is no effect of that, and its ranks
fail when they use it (MPI_Init). Without a rank that failed, they are culprits: those that a signal has ended, or that could
not be started, before mpirun, and mpirun before its daemons.

Processes that fail by themselves before the stop reaches them are culprits, too, in the order in which the coordinator learns
of them; those whose error is that another process has gone are behind the others, and have followed the first one. The server
holds the Stop of a failure for a moment, so that failures of the same cause arrive before it, and longer where only failures
are known that must have another cause; stop() gives the order that is due then. A failure that is late is no cause of earlier
ones. What ended the job first is its outcome; only a restart that is under way gives way to a lost node and to a stop. A
node whose supervisor ended its processes unasked (it thinks the coordinator lost) counts as lost.
"""

from __future__ import annotations

import signal
from typing import Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple, Union

from clustertool.model.job.job_steps import JobSteps
from clustertool.model.job.outcome import Key, Outcome, RankExit, alike, exit_code, sentences, some
from clustertool.model.job.start_error import NOT_EXECUTABLE, NOT_FOUND
from clustertool.model.job.state_names import JobState
from clustertool.model.roles import LAUNCHERS, MPI_DAEMON, MPIRUN, role_name

_NAMED = 3  # different errors in a reason
_NOT_STARTED = (NOT_EXECUTABLE, NOT_FOUND)


# -- events -----------------------------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """A node has joined the job."""

    node: int


class Listening(NamedTuple):
    """A pserver listens at its endpoint."""

    key: Key
    attempt: int = 0


class Exited(NamedTuple):
    """Exits that one supervisor reaped in one pass: simultaneous as far as it can be known.

    late: they came so long after the first failure, and after the stop, that they cannot be its cause. steps: that the ranks of
    this supervisor had printed by then.
    """

    exits: Tuple[RankExit, ...]
    attempt: int = 0
    late: bool = False
    steps: JobSteps = JobSteps()


class Clean(NamedTuple):
    """A node has ended all processes of the attempt but `survivors`."""

    node: int
    survivors: Tuple[str, ...] = ()
    attempt: int = 0


class Quiet(NamedTuple):
    """At a stop, no rank is left on the node, and something of mpirun is."""

    node: int
    attempt: int = 0


class Lost(NamedTuple):
    """A node is lost: its supervisor is silent or dead, or sends what cannot be read. why: the reason as text."""

    node: int
    why: str


class Absent(NamedTuple):
    """Nodes never joined. where: a description of the coordinator. seconds: for how long they were expected."""

    nodes: Tuple[int, ...]
    where: str
    seconds: float


class StopAsked(NamedTuple):
    """A request to end the job, by a user, a signal or a limit.

    The state `kind`: STOPPED (130 Ctrl+C, 143 SIGTERM, 0 inv stop), TIMEOUT (124), LOST (75: a node's records were removed).
    brief: `by` as short text, see Outcome. outside: by a signal, of which the job's engine may know the reason. grace: seconds
    between TERM and KILL, None: the job's.
    """

    by: str
    code: int
    kind: JobState = JobState.STOPPED
    brief: str = ""
    outside: bool = False
    grace: Optional[float] = None


class Explained(NamedTuple):
    """The engine has answered: `outcome` is how it ended the job."""

    outcome: Outcome


class LauncherTimeout(NamedTuple):
    """The job has waited for mpirun, or for ranks after it, for too long: waits_for_launcher() is the same for `seconds`."""

    seconds: float


class Hung(NamedTuple):
    """The job makes no progress, and is to end for that. text: which ranks do not go on. restart: or to begin again."""

    text: str
    restart: bool


Event = Union[Joined, Listening, Exited, Clean, Lost, Absent, StopAsked, Explained, LauncherTimeout, Quiet, Hung]


# -- actions ----------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """The order to start the ranks of a role.

    again: the first role of a new attempt; it begins after a pause, unless a Stop comes before.
    """

    role: str
    attempt: int
    again: bool = False


class Stop(NamedTuple):
    """The order to end all processes of the attempt. grace: seconds between TERM and KILL, None: the job's."""

    why: str
    grace: Optional[float] = None


class Release(NamedTuple):
    """No rank is left anywhere: mpirun and its daemons may be ended, which end the ranks of all nodes when one of them ends."""


class Ask(NamedTuple):
    """Ask the job's engine why it ends the job. by, code: see StopAsked."""

    by: str
    code: int


class Finish(NamedTuple):
    """The verdict, when nothing of the job is left on any node that could be reached."""

    outcome: Outcome


Action = Union[Start, Stop, Release, Ask, Finish]


Places = Tuple[Tuple[Key, int], ...]  # the node of each process


class Shape:
    """What never changes in a job or epoch: the nodes, which process is where, and the policy.

    first: the number of the first attempt of this start. grace: seconds between TERM and KILL, unless a stop has others.
    most_idle: restarts in a row without a later step than before, after which the job ends; 0: no limit.
    """

    def __init__(
        self,
        nodes: FrozenSet[int],
        names: Tuple[str, ...],
        place: Places,
        on_failure: str = "abort",
        max_restarts: int = 0,
        first: int = 0,
        grace: float = 10.0,
        most_idle: int = 0,
    ) -> None:
        self.nodes, self.names, self.place = nodes, names, place
        self.on_failure, self.max_restarts, self.first, self.grace = on_failure, max_restarts, first, grace
        self.most_idle = most_idle
        self.node_of = dict(place)
        self.pservers = frozenset(key for key in self.node_of if key[0] == "pserver")
        self.trainers = sum(key[0] == "trainer" for key in self.node_of)
        present = {key[0] for key in self.node_of}
        self.launched = MPIRUN in present
        # The roles that start once every pserver listens. mpirun is the last one: its ranks are expected then.
        self.with_trainers = ("trainer", *(role for role in ("heter", MPIRUN) if role in present))

    def on(self, node: int) -> FrozenSet[Key]:
        """Return the keys of the processes on a node."""
        return frozenset(key for key, at in self.place if at == node)


class State(NamedTuple):
    """All that the coordinator knows of the present attempt of a job or epoch."""

    shape: Shape
    phase: str = "joining"
    attempt: int = 0
    joined: FrozenSet[int] = frozenset()
    listening: FrozenSet[Key] = frozenset()
    exits: Tuple[RankExit, ...] = ()
    trainers_ended: int = 0
    culprits: Tuple[RankExit, ...] = ()
    quiet: FrozenSet[int] = frozenset()
    released: bool = False
    gone: FrozenSet[int] = frozenset()
    lost: FrozenSet[int] = frozenset()
    survivors: Tuple[str, ...] = ()
    ending: Optional[Outcome] = None
    grace: Optional[float] = None  # of the stop of this attempt, see Stop
    blamed: Tuple[int, ...] = ()  # the node of the first failure of each attempt before, of those that ranks have ended
    asked: bool = False  # the engine, which has not answered yet
    restart: bool = False
    hang: str = ""  # why this attempt ends, if no process has failed
    steps: JobSteps = JobSteps()
    left: FrozenSet[int] = frozenset()  # the last two: see epoch_decisions
    counted: bool = False


Step = Tuple[State, Tuple[Action, ...]]


def decide(state: State, event: Event) -> Step:
    """Return (next state, actions that are due).

    Events of another attempt, and those after the end, change nothing.
    """
    if state.phase == "over" or (isinstance(event, _OF_ONE_ATTEMPT) and event.attempt != state.attempt):
        return state, ()
    return with_release(*_TABLE[type(event)](state, event))


def with_release(state: State, actions: Tuple[Action, ...]) -> Step:
    """Return (state, actions), with a Release, once, if the job ends and all nodes are quiet or gone, one at least quiet."""
    if state.phase == "ending" and state.quiet and not state.released and state.quiet | state.gone >= state.shape.nodes:
        return state._replace(released=True), (*actions, Release())
    return state, actions


def _on_quiet(state: State, event: Quiet) -> Step:
    """Return (state, no actions), where the node is quiet."""
    return state._replace(quiet=state.quiet | {event.node}), ()


def _on_joined(state: State, event: Joined) -> Step:
    """Return (state, actions): a node has joined; the first role starts if it is the last one."""
    return _advance(state._replace(joined=state.joined | {event.node}))  # it gets the orders that were given before


def _on_listening(state: State, event: Listening) -> Step:
    """Return (state, actions): a pserver listens; the trainers start if it is the last one."""
    return _advance(state._replace(listening=state.listening | {event.key}))


def _advance(state: State) -> Step:
    """Return (state, actions), which start the next roles if all nodes have joined, or all pservers listen.

    Pservers come first, then together trainers, heter trainers and mpirun.
    """
    if state.phase == "joining" and state.joined >= state.shape.nodes:
        roles = ("pserver",) if state.shape.pservers else state.shape.with_trainers
        again = state.attempt > state.shape.first
        return state._replace(phase=roles[0]), tuple(Start(role, state.attempt, again) for role in roles)
    if state.phase == "pserver" and state.listening >= state.shape.pservers:
        return state._replace(phase="trainer"), tuple(Start(role, state.attempt) for role in state.shape.with_trainers)
    return state, ()


def _on_exited(state: State, event: Exited) -> Step:
    """Add exits to the state, and decide whether the attempt fails, succeeds, or goes on.

    In an ending because of a failure, further failures become culprits. A supervisor that ended its processes unasked makes its
    node lost. With the policy continue, failed trainers do not stop the others. Returns (state, actions).
    """
    ended = state.trainers_ended + sum(exit.role == "trainer" for exit in event.exits)
    steps = state.steps.add([event.steps.highest], event.steps.steady)
    state = state._replace(exits=state.exits + event.exits, trainers_ended=ended, steps=steps)
    if state.ending or state.restart:
        if not is_failing(state):
            return state, ()
        # Those that failed by themselves while the job ends because of an earlier failure are culprits as well.
        return _blame(state, [exit for exit in event.exits if exit.failed], event.late), ()
    if any(exit.stopped for exit in event.exits):
        node = state.shape.node_of[event.exits[0].key]
        return _on_lost(state, Lost(node, "its supervisor ended its processes unasked"))
    bad = [exit for exit in event.exits if exit.failed or _left_early(state, exit)]
    if bad and not _only_daemons_failed(state, bad):
        state = _blame(state, bad)
        if state.shape.on_failure == "abort" or any(exit.role != "trainer" for exit in bad):
            return _fail(state)
    if state.trainers_ended == state.shape.trainers and not waits_for_launcher(state):
        state = _blame_mpirun(state)
        if state.culprits:
            return _fail(state)
        return end(state, Outcome(JobState.SUCCEEDED, 0, "job", "all trainers are done"))
    return state, ()


def _blame(state: State, exits: List[RankExit], late: bool = False) -> State:
    """Return the state with exits added to the culprits. Causes come before consequences, else in the order in which they came.

    late: these are no causes, and come last. Culprits of a higher order than the first one (see _failure_order) are left out.
    """
    found = list(state.culprits)
    for exit in sorted(exits, key=lambda exit: exit.key):
        effects = (place for place, known in enumerate(found) if _importance(exit) < _importance(known))
        found.insert(len(found) if late else next(effects, len(found)), exit)
    first = _failure_order(found[0]) if found else 0
    return state._replace(culprits=tuple(exit for exit in found if _failure_order(exit) == first))


def _importance(exit: RankExit) -> Tuple[int, bool]:
    """Return the key by which culprits are sorted: the order of the failure, then whether it is a consequence."""
    return _failure_order(exit), exit.consequence


def _failure_order(exit: RankExit) -> int:
    """Return the order of a failure, 0 to 4: one of a higher order is the effect of one of a lower order.

    0: a launcher that SIGKILL has ended. 1: ranks. 2: a launcher that another signal has ended, or that was not started. 3:
    mpirun. 4: its daemons.
    """
    if exit.role not in LAUNCHERS:
        return 1
    if exit.signal == signal.SIGKILL:
        return 0
    if exit.signal or exit.code in _NOT_STARTED:
        return 2
    return 3 if exit.role == MPIRUN else 4


def _only_daemons_failed(state: State, exits: List[RankExit]) -> bool:
    """Check whether all trainers have ended and only daemons of mpirun failed: then mpirun's own end decides."""
    return state.trainers_ended == state.shape.trainers and all(exit.role == MPI_DAEMON for exit in exits)


def _blame_mpirun(state: State) -> State:
    """Return the state, with mpirun as the culprit if there is none, and it has ended ranks with an error.

    It exits with 0 itself then.
    """
    if state.culprits or not any(exit.by_launcher and exit_code(exit.code, exit.signal) for exit in state.exits):
        return state
    found = [exit._replace(note="it has ended its ranks") for exit in state.exits if exit.role == MPIRUN]
    return _blame(state, found)


def waits_for_launcher(state: State) -> str:
    """Return which end the job waits for: MPIRUN if only that of mpirun is missing, "trainer" if only ranks are, else ""."""
    if not state.shape.launched or state.phase != "trainer":
        return ""
    mpirun = any(exit.role == MPIRUN for exit in state.exits)
    trainers = state.trainers_ended == state.shape.trainers
    return "" if mpirun == trainers else "trainer" if mpirun else MPIRUN


def _on_launcher_timeout(state: State, event: LauncherTimeout) -> Step:
    """Return (state, actions) that fail the job.

    Either mpirun does not end after its ranks, or it has ended before them, so that they are not the ranks of this job. Changes
    nothing if waits_for_launcher() is "" by now.
    """
    waits = waits_for_launcher(state)
    if not waits:
        return state, ()
    node = next(at for key, at in state.shape.place if key[0] == MPIRUN)
    name = state.shape.names[node]
    what = f"mpirun on {name} does not end" if waits == MPIRUN else f"mpirun on {name} has ended without an error"
    ranks = "all trainers exited 0" if waits == MPIRUN else "some trainers have not ended, or were not started by it"
    reason = f"{what}, but {ranks} ({event.seconds:g} s ago)"
    return end(state, Outcome(JobState.FAILED, 1, "job", reason, ((MPIRUN, 0),), node=node))


def _left_early(state: State, exit: RankExit) -> bool:
    """Check whether a pserver ended by itself before it listened: trainers would wait for it forever."""
    return exit.role == "pserver" and not exit.stopped and exit.key not in state.listening


def _fail(state: State) -> Step:
    """Return (state, actions) that stop the attempt for a restart, if any is left, else fail the job by its culprits."""
    if state.attempt - state.shape.first < state.shape.max_restarts:
        state = state._replace(phase="ending", restart=True)
        return state, (stop(state),)
    return end(state, failure(state))


def _on_hung(state: State, event: Hung) -> Step:
    """Return (state, actions) that stop the attempt for a restart, if that is wanted and any is left, else the job, with 124.

    Nothing changes if the job ends already.
    """
    if state.phase != "trainer":
        return state, ()
    state = state._replace(hang=event.text)
    return _fail(state) if event.restart else end(state, _hang(state))


def _hang(state: State) -> Outcome:
    """Build the outcome of a job that hangs."""
    return Outcome(JobState.TIMEOUT, 124, "tool", f"hang: {state.hang}", brief=f"hang: {state.hang}")


def stop(state: State) -> Stop:
    """Build the Stop of an attempt or a job that ends; after a failure its reason names all failures that are known now."""
    if state.ending is not None and (state.ending.state is not JobState.FAILED or not state.culprits):
        return Stop(state.ending.reason, state.grace)
    why = f"restart after attempt {state.attempt}: {reason(state)}" if state.restart else reason(state)
    return Stop(why, state.grace)


def may_fail(state: State) -> bool:
    """Check whether the job ends because of a failure, and has processes that have not ended and may fail of the same cause."""
    return state.phase == "ending" and is_failing(state) and len(state.exits) < len(state.shape.place)


def cause_known(state: State) -> bool:
    """Check whether a culprit has failed of its own error, not as a consequence."""
    return any(not exit.consequence for exit in state.culprits)


def is_failing(state: State) -> bool:
    """Check whether the attempt is to be restarted, or the job ends as failed."""
    return state.restart or (state.ending is not None and state.ending.state is JobState.FAILED)


def failure(state: State) -> Outcome:
    """Build the outcome FAILED from the culprits, with the exit code of the first one; without any, that of a hang.

    The reason names a node of several on which every attempt has failed first.
    """
    if not state.culprits:
        return _hang(state)
    first = state.culprits[0]
    code = exit_code(first.code, first.signal) or 1
    keys = tuple(exit.key for exit in state.culprits)
    followed = tuple(exit.key for exit in state.culprits if exit.consequence and not first.consequence)
    source = "tool" if first.of_runtime else "job"  # whose code it is
    node, attempts = state.shape.node_of[first.key], blamed_nodes(state)
    why = reason(state)
    if len(attempts) > 1 and {*attempts} == {node} and len(state.shape.nodes) > 1:
        why += f"; all {len(attempts)} attempts have failed first on {state.shape.names[node]}: it may be defective"
    if makes_no_progress(state):
        why += f"; {state.steps.describe()} (max_restarts_without_progress)"
    return Outcome(JobState.FAILED, code, source, why, keys, node=node, followed=followed)


def makes_no_progress(state: State) -> bool:
    """Check whether the limit of restarts in a row without a later step than before is reached, if this attempt fails."""
    return 0 < state.shape.most_idle <= state.steps.failures


def blamed_nodes(state: State) -> Tuple[int, ...]:
    """Return the nodes of State.blamed, and after them the node of this attempt's first culprit."""
    return (*state.blamed, *(state.shape.node_of[first.key] for first in state.culprits[:1]))


def reason(state: State) -> str:
    """Describe the culprits, the first one first: at most three sentences, and a count of the others.

    Those with the same error share a sentence; those whose failure is a consequence have one of their own.
    """
    if not state.culprits:
        return f"hang: {state.hang}"
    place, names = state.shape.node_of, state.shape.names
    groups = alike(exit._replace(node=names[place[exit.key]]) for exit in state.culprits)
    more = sum(map(len, groups[_NAMED:]))
    return "; ".join([*sentences(groups[:_NAMED]), *([f"{more} more failed"] if more else [])])


def end(state: State, outcome: Outcome) -> Step:
    """Return the state with the outcome of the job, and (Stop,), or () if the attempt ends already.

    In the latter case all nodes have a Stop, or get it when they join.
    """
    ends = state.phase == "ending"
    state = state._replace(phase="ending", ending=outcome, restart=False)
    return state, () if ends else (Stop(outcome.reason, state.grace),)


def _on_clean(state: State, event: Clean) -> Step:
    """Return (state, actions): in an ending, a node has no processes left but `survivors`; settles then."""
    if state.phase != "ending":
        return state, ()  # a supervisor that ended by itself: its connection or its exits will say why
    return settle(state._replace(gone=state.gone | {event.node}, survivors=state.survivors + event.survivors))


def _on_lost(state: State, event: Lost) -> Step:
    """Return (state, actions) that lose a node.

    The job's outcome is LOST, unless it has another one, and the node's processes are the culprits.
    """
    name = state.shape.names[event.node]
    culprits = tuple(sorted(state.shape.on(event.node)))
    brief = f"node {name} is lost"
    outcome = Outcome(JobState.LOST, 75, "tool", f"{brief}: {event.why}", culprits, node=event.node, brief=brief)
    return _lose(state, frozenset({event.node}), outcome)


def _on_absent(state: State, event: Absent) -> Step:
    """Return (state, actions) that lose the nodes that never joined.

    The outcome has a node at fault only if a single one is absent and others have joined. If no other node has joined, the
    connection to the coordinator is blocked.
    """
    all_others = len(event.nodes) == len(state.shape.nodes) - 1
    names = some([state.shape.names[node] for node in event.nodes])
    what = "no other node could connect" if all_others else f"no connection from {names}"
    node = event.nodes[0] if len(event.nodes) == 1 and not all_others else -1
    brief = f"{what} to {event.where}"
    outcome = Outcome(JobState.LOST, 75, "tool", f"{brief} within {event.seconds:g} s", node=node, brief=brief)
    return _lose(state, frozenset(event.nodes), outcome)


def _lose(state: State, nodes: FrozenSet[int], outcome: Outcome) -> Step:
    """Return (state, actions): nodes are lost and gone; the job ends with `outcome`, unless it ends already, and settles."""
    state = state._replace(lost=state.lost | nodes, gone=state.gone | nodes)
    if state.ending:
        return settle(state)
    state, actions = end(state, outcome)
    state, more = settle(state)
    return state, actions + more


def describe_wait(state: State, where: str) -> str:
    """Describe for which nodes or pservers the job waits; "" once its trainers have started. where: names the coordinator."""
    if state.phase == "joining":
        missing = [state.shape.names[node] for node in sorted(state.shape.nodes - state.joined)]
        return f"a connection from {some(missing)} to {where}"
    if state.phase == "pserver":
        closed = sorted(state.shape.pservers - state.listening)
        names, place = state.shape.names, state.shape.node_of
        return some([f"an open port of {role_name(key[0])} {key[1]} on {names[place[key]]}" for key in closed])
    return ""


def _on_stop_asked(state: State, event: StopAsked) -> Step:
    """End the job as the stop demands, unless it ends already, and order all nodes to stop, with the grace of the stop.

    Each node that a user stops reports it: in an ending, only a shorter grace gives another order. After a signal from outside,
    the engine is asked for the reason. Returns (state, actions).
    """
    known, wanted = (state.shape.grace if grace is None else grace for grace in (state.grace, event.grace))
    due = state.phase != "ending" or wanted < known
    state = state._replace(grace=event.grace) if due else state
    actions: Tuple[Action, ...] = (Stop(event.by, event.grace),) if due else ()
    if state.ending:
        return state, actions
    state, _ = end(state, Outcome(event.kind, event.code, "tool", event.by, brief=event.brief))
    return (state._replace(asked=True), (*actions, Ask(event.by, event.code))) if event.outside else (state, actions)


def _on_explained(state: State, event: Explained) -> Step:
    """Return (state, actions): the engine's answer is the outcome, and settles; nothing changes if it was not asked."""
    return settle(state._replace(asked=False, ending=event.outcome)) if state.asked else (state, ())


def settle(state: State) -> Step:
    """Return (state, actions): the job is over, or the next attempt begins.

    Nothing changes before all nodes are gone and the engine has answered: then it is known how far the ranks had come. After
    survivors no new attempt begins, nor after too many without a later step. The outcome gets the victims, and failures that
    came since.
    """
    if state.asked or not state.gone >= state.shape.nodes:
        return state, ()
    if state.restart and not state.survivors and not makes_no_progress(state):
        again = State(state.shape, attempt=state.attempt + 1, joined=state.joined, blamed=blamed_nodes(state))
        return _advance(again._replace(steps=state.steps.next_attempt(failed=True)))
    ending = state.ending
    if ending is None or (state.culprits and ending.state is JobState.FAILED):
        ending = failure(state)  # others may have failed since
    outcome = ending._replace(victims=_victims(state, ending))
    return state._replace(phase="over", ending=outcome), (Finish(outcome),)


def _victims(state: State, outcome: Outcome) -> Tuple[Key, ...]:
    """List the keys of processes that others have ended, without the culprits, sorted; none if the job has succeeded."""
    if outcome.state is JobState.SUCCEEDED:
        return ()
    last = {exit.key: exit for exit in state.exits}
    return tuple(sorted({key for key, exit in last.items() if exit.ended_by_others} - set(outcome.culprits)))


_OF_ONE_ATTEMPT = (Listening, Exited, Quiet, Clean)
_TABLE: Dict[type, Callable[..., Step]] = {
    Joined: _on_joined,
    Listening: _on_listening,
    Exited: _on_exited,
    Quiet: _on_quiet,
    Clean: _on_clean,
    Lost: _on_lost,
    Absent: _on_absent,
    StopAsked: _on_stop_asked,
    Explained: _on_explained,
    LauncherTimeout: _on_launcher_timeout,
    Hung: _on_hung,
}
