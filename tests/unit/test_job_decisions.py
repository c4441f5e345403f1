"""decide() replayed: histories of events and the coordinator's actions at each; the same table on every order, below."""

from __future__ import annotations

import pytest

from clustertool.model.job.job_steps import JobSteps
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.node.supervisor.coordinator.job_decisions import (
    Absent,
    Ask,
    Clean,
    Event,
    Exited,
    Explained,
    Finish,
    Hung,
    Joined,
    Listening,
    Lost,
    RankExit,
    Shape,
    Start,
    State,
    Stop,
    StopAsked,
    decide,
    describe_wait,
    may_fail,
    stop,
)

T0, T1, T2, T3 = (("trainer", rank) for rank in range(4))
P0, P1 = ("pserver", 0), ("pserver", 1)
COLLECTIVE = Shape(frozenset({0, 1}), ("n0", "n1"), ((T0, 0), (T1, 0), (T2, 1), (T3, 1)))
PS = Shape(frozenset({0, 1}), ("n0", "n1"), ((P0, 0), (T0, 0), (P1, 1), (T1, 1)))
H0, H1 = ("heter", 0), ("heter", 1)
HETER = Shape(frozenset({0, 1}), ("n0", "n1"), ((P0, 0), (T0, 0), (T1, 1), (H0, 0), (H1, 1)))


def with_policy(shape: Shape, on_failure: str = "abort", max_restarts: int = 0) -> Shape:
    return Shape(shape.nodes, shape.names, shape.place, on_failure, max_restarts)


def ended(
    key: tuple[str, int],
    code: int = 0,
    signal: int = 0,
    stopped: bool = False,
    note: str = "",
    error: int = 0,
    consequence: bool = False,
) -> RankExit:
    return RankExit(*key, code, signal, stopped, note, error, consequence)


def exits(*those: RankExit, attempt: int = 0) -> Exited:
    return Exited(those, attempt)


def stopped(*keys: tuple[str, int]) -> Exited:
    return Exited(tuple(ended(key, 143, stopped=True) for key in keys))


def replay(shape: Shape, *events: Event) -> tuple[State, list[str]]:
    """The last state, and what was done: `start trainer 0`, `stop`, `finish succeeded 0`; one word for each action."""
    state, done = State(shape), []
    for event in events:
        state, actions = decide(state, event)
        for action in actions:
            if isinstance(action, Start):
                done.append(f"start {action.role} {action.attempt}")
            elif isinstance(action, Finish):
                done.append(f"finish {action.outcome.state} {action.outcome.code}")
            elif isinstance(action, Ask):
                done.append("ask")
            elif isinstance(action, Stop):
                done.append("stop" if action.grace is None else f"stop {action.grace:g}")
    return state, done


def verdict(shape: Shape, *events: Event) -> Outcome:
    state, done = replay(shape, *events)
    assert state.phase == "over"
    assert state.ending is not None
    assert done[-1].startswith("finish ")
    return state.ending


JOINED = (Joined(0), Joined(1))
SIGNAL = StopAsked("the supervisor on n1 received SIGTERM", 143, outside=True)
LIMIT = Explained(Outcome(JobState.TIMEOUT, 124, "tool", "the time limit", brief="the time limit"))
THREE = Shape(frozenset({0, 1, 2}), ("n0", "n1", "n2"), ((T0, 0), (T1, 1), (T2, 2)))
WHERE = "the coordinator on n0 (10.0.0.1:9)"
SERVED = (*JOINED, Listening(P0), Listening(P1))
CLEAN = (Clean(0), Clean(1))
PIPED = (*JOINED, Listening(P0))
DONE = (exits(ended(T0), ended(T1)), exits(ended(T2), ended(T3)))

HISTORIES: list[tuple[str, Shape, tuple[Event, ...], str]] = [
    ("nothing starts before all have joined", COLLECTIVE, (Joined(1), Joined(1)), ""),
    ("all joined", COLLECTIVE, JOINED, "start trainer 0"),
    ("servers first", PS, JOINED, "start pserver 0"),
    ("trainers wait for every pserver", PS, (*JOINED, Listening(P1), Listening(P1)), "start pserver 0"),
    ("all pservers listen", PS, SERVED, "start pserver 0, start trainer 0"),
    (
        "success",
        COLLECTIVE,
        (*JOINED, exits(ended(T0)), exits(ended(T2), ended(T3)), exits(ended(T1)), *CLEAN),
        "start trainer 0, stop, finish succeeded 0",
    ),
    (
        "one trainer is not yet done",
        COLLECTIVE,
        (*JOINED, exits(ended(T0), ended(T1)), exits(ended(T2))),
        "start trainer 0",
    ),
    (
        "a pserver's 143 after success is no failure",
        PS,
        (*SERVED, exits(ended(T0)), exits(ended(T1)), stopped(P0), stopped(P1), *CLEAN),
        "start pserver 0, start trainer 0, stop, finish succeeded 0",
    ),
    (
        "nor is its own bad end after success",
        PS,
        (*SERVED, exits(ended(T0)), exits(ended(T1)), exits(ended(P0, 1)), exits(ended(P1, signal=11)), *CLEAN),
        "start pserver 0, start trainer 0, stop, finish succeeded 0",
    ),
    (
        "a pserver that is done early is waited for by nobody",
        PS,
        (*SERVED, exits(ended(P0)), exits(ended(T0)), exits(ended(T1)), *CLEAN),
        "start pserver 0, start trainer 0, stop, finish succeeded 0",
    ),
    (
        "a failure ends all",
        COLLECTIVE,
        (*JOINED, exits(ended(T2, 7)), stopped(T0, T1), stopped(T3), *CLEAN),
        "start trainer 0, stop, finish failed 7",
    ),
    ("a signal", COLLECTIVE, (*JOINED, exits(ended(T2, signal=9)), *CLEAN), "start trainer 0, stop, finish failed 137"),
    (
        "a command that cannot start",
        COLLECTIVE,
        (*JOINED, exits(ended(T0, 127, note="no such file")), *CLEAN),
        "start trainer 0, stop, finish failed 127",
    ),
    (
        "a pserver fails",
        PS,
        (*SERVED, exits(ended(P1, 3)), *CLEAN),
        "start pserver 0, start trainer 0, stop, finish failed 3",
    ),
    (
        "a pserver that ends before it listens",
        PS,
        (*JOINED, exits(ended(P1, 0)), *CLEAN),
        "start pserver 0, stop, finish failed 1",
    ),
    (
        "a pserver that cannot start",
        PS,
        (*JOINED, exits(ended(P1, 126)), *CLEAN),
        "start pserver 0, stop, finish failed 126",
    ),
    (
        "the first failure counts",
        COLLECTIVE,
        (*JOINED, exits(ended(T2, 7)), exits(ended(T0, 1)), *CLEAN),
        "start trainer 0, stop, finish failed 7",
    ),
    ("a node is lost", COLLECTIVE, (*JOINED, Lost(1, "silent"), Clean(0)), "start trainer 0, stop, finish lost 75"),
    ("a node never joins", COLLECTIVE, (Joined(0), Lost(1, "silent"), Clean(0)), "stop, finish lost 75"),
    ("no other node joins", THREE, (Joined(0), Absent((1, 2), WHERE, 30), Clean(0)), "stop, finish lost 75"),
    (
        "one of two joins",
        THREE,
        (Joined(0), Joined(1), Absent((2,), WHERE, 30), Clean(0), Clean(1)),
        "stop, finish lost 75",
    ),
    (
        "a stop before all have joined",
        THREE,
        (Joined(0), StopAsked("x", 143), Absent((1, 2), WHERE, 2), Clean(0)),
        "stop, finish stopped 143",
    ),
    (
        "all nodes are lost",
        COLLECTIVE,
        (*JOINED, Lost(1, "silent"), Lost(0, "silent"), Lost(0, "silent")),
        "start trainer 0, stop, finish lost 75",
    ),
    (
        "a node is lost after a failure",
        COLLECTIVE,
        (*JOINED, exits(ended(T0, 7)), Lost(1, "silent"), Clean(0)),
        "start trainer 0, stop, finish failed 7",
    ),
    (
        "a node is lost after success",
        COLLECTIVE,
        (*JOINED, *DONE, Clean(0), Lost(1, "x")),
        "start trainer 0, stop, finish succeeded 0",
    ),
    (
        "a lost node that comes back changes nothing",
        COLLECTIVE,
        (*JOINED, Lost(1, "silent"), exits(ended(T2, 7)), Clean(1), Joined(1), Clean(0)),
        "start trainer 0, stop, finish lost 75",
    ),
    (
        "a node that ends its processes unasked is lost",
        COLLECTIVE,
        (*JOINED, stopped(T2, T3), Clean(1), Clean(0)),
        "start trainer 0, stop, finish lost 75",
    ),
    (
        "all trainers stopped unasked is no success",
        PS,
        (*SERVED, stopped(T0, P0), stopped(T1, P1), *CLEAN),
        "start pserver 0, start trainer 0, stop, finish lost 75",
    ),
    (
        "Ctrl+C",
        COLLECTIVE,
        (*JOINED, StopAsked("ann", 130), stopped(T0, T1), *CLEAN),
        "start trainer 0, stop, finish stopped 130",
    ),
    (
        "Ctrl+C twice",
        COLLECTIVE,
        (*JOINED, StopAsked("ann", 130), StopAsked("ann", 130), *CLEAN),
        "start trainer 0, stop, finish stopped 130",
    ),
    (
        "Ctrl+C twice: the second one has no grace",
        COLLECTIVE,
        (*JOINED, StopAsked("ann", 130), StopAsked("ann", 130, grace=0), StopAsked("ann", 130, grace=0), *CLEAN),
        "start trainer 0, stop, stop 0, finish stopped 130",
    ),
    (
        "a longer grace comes too late",
        COLLECTIVE,
        (*JOINED, StopAsked("ann", 130, grace=5), StopAsked("bob", 143, grace=60), StopAsked("eve", 143), *CLEAN),
        "start trainer 0, stop 5, finish stopped 130",
    ),
    (
        "the first stop may have a longer grace than the job",
        COLLECTIVE,
        (*JOINED, StopAsked("ann", 143, grace=60), StopAsked("timeout", 124, "timeout"), *CLEAN),
        "start trainer 0, stop 60, stop, finish stopped 143",
    ),
    (
        "a failure that is to end at once",
        COLLECTIVE,
        (*JOINED, exits(ended(T0, 7)), StopAsked("ann", 143, grace=0), *CLEAN),
        "start trainer 0, stop, stop 0, finish failed 7",
    ),
    (
        "stop before all have joined",
        COLLECTIVE,
        (Joined(0), StopAsked("ann", 143), Clean(0), Joined(1), Clean(1)),
        "stop, finish stopped 143",
    ),
    (
        "the time is over",
        COLLECTIVE,
        (*JOINED, StopAsked("timeout", 124, "timeout"), *CLEAN),
        "start trainer 0, stop, finish timeout 124",
    ),
    (
        "a signal to a job of an engine",
        COLLECTIVE,
        (*JOINED, SIGNAL, stopped(T0, T1), stopped(T2, T3), LIMIT, *CLEAN),
        "start trainer 0, stop, ask, finish timeout 124",
    ),
    (
        "the verdict waits for the engine",
        COLLECTIVE,
        (*JOINED, SIGNAL, SIGNAL, *CLEAN, LIMIT, LIMIT),
        "start trainer 0, stop, ask, finish timeout 124",
    ),
    ("no verdict before the engine has answered", COLLECTIVE, (*JOINED, SIGNAL, *CLEAN), "start trainer 0, stop, ask"),
    (
        "a lost node does not change what the engine states",
        COLLECTIVE,
        (*JOINED, SIGNAL, Lost(1, "silent"), Clean(0), LIMIT),
        "start trainer 0, stop, ask, finish timeout 124",
    ),
    (
        "a signal after a failure: the engine is not asked",
        COLLECTIVE,
        (*JOINED, exits(ended(T0, 7)), SIGNAL, *CLEAN),
        "start trainer 0, stop, finish failed 7",
    ),
    (
        "a signal after a lost node",
        COLLECTIVE,
        (*JOINED, Lost(1, "silent"), SIGNAL, Clean(0)),
        "start trainer 0, stop, finish lost 75",
    ),
    (
        "a signal between two attempts",
        with_policy(COLLECTIVE, max_restarts=1),
        (*JOINED, exits(ended(T2, 7)), SIGNAL, LIMIT, *CLEAN),
        "start trainer 0, stop, ask, finish timeout 124",
    ),
    (
        "Ctrl+C after a failure",
        COLLECTIVE,
        (*JOINED, exits(ended(T0, 7)), StopAsked("ann", 130), *CLEAN),
        "start trainer 0, stop, finish failed 7",
    ),
    (
        "Ctrl+C after success",
        COLLECTIVE,
        (*JOINED, *DONE, StopAsked("ann", 130), *CLEAN),
        "start trainer 0, stop, finish succeeded 0",
    ),
    (
        "a failure after a stop is a victim",
        COLLECTIVE,
        (*JOINED, StopAsked("ann", 130), exits(ended(T0, 7)), *CLEAN),
        "start trainer 0, stop, finish stopped 130",
    ),
    ("an old word of a clean node", COLLECTIVE, (*JOINED, Clean(0), Clean(1)), "start trainer 0"),
    ("heter trainers start with the trainers", HETER, PIPED, "start pserver 0, start trainer 0, start heter 0"),
    (
        "the end of trainers ends pservers and heter trainers",
        HETER,
        (*PIPED, exits(ended(T0)), exits(ended(T1)), stopped(P0, H0), stopped(H1), *CLEAN),
        "start pserver 0, start trainer 0, start heter 0, stop, finish succeeded 0",
    ),
    (
        "nor is a heter trainer's bad end after success a failure",
        HETER,
        (*PIPED, exits(ended(T0)), exits(ended(T1)), exits(ended(H0, 9)), exits(ended(H1, signal=11)), *CLEAN),
        "start pserver 0, start trainer 0, start heter 0, stop, finish succeeded 0",
    ),
    (
        "heter trainers that are done do not end the job",
        HETER,
        (*PIPED, exits(ended(H0)), exits(ended(H1)), exits(ended(T0))),
        "start pserver 0, start trainer 0, start heter 0",
    ),
    (
        "a heter trainer fails",
        HETER,
        (*PIPED, exits(ended(H1, 3)), stopped(P0, T0), stopped(T1), stopped(H0), *CLEAN),
        "start pserver 0, start trainer 0, start heter 0, stop, finish failed 3",
    ),
    (
        "a heter trainer that cannot start",
        HETER,
        (*PIPED, exits(ended(H0, 127, note="no such file")), *CLEAN),
        "start pserver 0, start trainer 0, start heter 0, stop, finish failed 127",
    ),
    (
        "a node with heter trainers is lost",
        HETER,
        (*PIPED, Lost(1, "silent"), Clean(0)),
        "start pserver 0, start trainer 0, start heter 0, stop, finish lost 75",
    ),
    (
        "after the end nothing happens",
        COLLECTIVE,
        (
            *JOINED,
            StopAsked("ann", 130),
            *CLEAN,
            Joined(1),
            exits(ended(T0, 1)),
            Lost(0, "x"),
            StopAsked("bob", 143),
            *CLEAN,
        ),
        "start trainer 0, stop, finish stopped 130",
    ),
]


@pytest.mark.parametrize("name, shape, events, done", HISTORIES, ids=[name for name, *_ in HISTORIES])
def test_histories(name: str, shape: Shape, events: tuple[Event, ...], done: str) -> None:
    assert ", ".join(replay(shape, *events)[1]) == done


MANY = Shape(
    frozenset(range(400)),
    tuple(f"n{node}" for node in range(400)),
    tuple((("trainer", node), node) for node in range(400)),
)
RUNS = tuple(map(Joined, range(400)))
AT_ONCE = tuple(StopAsked("ann", 143) for _ in range(400))
NO_GRACE = tuple(StopAsked("ann", 143, grace=0) for _ in range(400))
ALL_STOPPED = tuple(stopped(("trainer", node)) for node in range(400))
ALL_CLEAN = tuple(map(Clean, range(400)))


@pytest.mark.parametrize(
    "name, events, done",
    [
        ("each node reports the stop", (*RUNS, *AT_ONCE, *ALL_STOPPED, *ALL_CLEAN), "stop, finish stopped 143"),
        (
            "and the ends of its ranks between the stops of others",
            (*RUNS, *(event for node in range(400) for event in (AT_ONCE[node], ALL_STOPPED[node])), *ALL_CLEAN),
            "stop, finish stopped 143",
        ),
        ("and hurries", (*RUNS, *AT_ONCE, *NO_GRACE, *ALL_STOPPED, *ALL_CLEAN), "stop, stop 0, finish stopped 143"),
        (
            "a failure, and the same error everywhere",
            (*RUNS, *(exits(ended(("trainer", node), 1, error=5)) for node in range(400)), *AT_ONCE, *ALL_CLEAN),
            "stop, finish failed 1",
        ),
        (
            "half of them are lost",
            (*RUNS, *(Lost(n, "x") for n in range(200)), *AT_ONCE, *ALL_CLEAN[200:]),
            "stop, finish lost 75",
        ),
        (
            "stopped before they join",
            (*RUNS[:9], *AT_ONCE[:9], *RUNS[9:], *AT_ONCE, *ALL_CLEAN),
            "stop, finish stopped 143",
        ),
    ],
)
def test_each_of_400_nodes_gets_one_order_for_one_stop(name: str, events: tuple[Event, ...], done: str) -> None:
    found = replay(MANY, *events)[1]
    assert ", ".join(action for action in found if not action.startswith("start")) == done, name


GO_ON = with_policy(COLLECTIVE, "continue")
AGAIN = with_policy(COLLECTIVE, max_restarts=1)
SERVED_AGAIN = with_policy(PS, max_restarts=1)
BOTH = with_policy(COLLECTIVE, "continue", 1)
FAILED = exits(ended(T2, 7))
CLEAN_1 = (Clean(0, attempt=1), Clean(1, attempt=1))
DONE_1 = (exits(ended(T0), ended(T1), attempt=1), exits(ended(T2), ended(T3), attempt=1))
SERVED_1 = (Listening(P0, 1), Listening(P1, 1))

POLICIES: list[tuple[str, Shape, tuple[Event, ...], str]] = [
    (
        "continue goes on to the end",
        GO_ON,
        (*JOINED, FAILED, exits(ended(T0), ended(T1)), exits(ended(T3)), *CLEAN),
        "start trainer 0, stop, finish failed 7",
    ),
    ("continue waits for the others", GO_ON, (*JOINED, FAILED, exits(ended(T0), ended(T1))), "start trainer 0"),
    (
        "continue never goes on without a pserver",
        with_policy(PS, "continue"),
        (*SERVED, exits(ended(P0, 1)), *CLEAN),
        "start pserver 0, start trainer 0, stop, finish failed 1",
    ),
    (
        "continue never goes on without a heter trainer",
        with_policy(HETER, "continue"),
        (*PIPED, exits(ended(H0, 1)), *CLEAN),
        "start pserver 0, start trainer 0, start heter 0, stop, finish failed 1",
    ),
    (
        "a restart begins with the pserver and ends with heter trainers",
        with_policy(HETER, max_restarts=1),
        (*PIPED, exits(ended(H1, 1)), stopped(P0, H0, T0), stopped(T1), *CLEAN, Listening(P0, 1)),
        "start pserver 0, start trainer 0, start heter 0, stop, start pserver 1, start trainer 1, start heter 1",
    ),
    (
        "continue ends with a lost node",
        GO_ON,
        (*JOINED, FAILED, Lost(1, "x"), Clean(0)),
        "start trainer 0, stop, finish lost 75",
    ),
    ("a restart starts when all are clean", AGAIN, (*JOINED, FAILED, Clean(0)), "start trainer 0, stop"),
    ("a restart", AGAIN, (*JOINED, FAILED, *CLEAN), "start trainer 0, stop, start trainer 1"),
    (
        "a restart begins with the pservers",
        SERVED_AGAIN,
        (*SERVED, exits(ended(T1, 1)), stopped(P0, T0), stopped(P1), *CLEAN, Listening(P0, 1)),
        "start pserver 0, start trainer 0, stop, start pserver 1",
    ),
    (
        "a restart that succeeds",
        AGAIN,
        (*JOINED, FAILED, *CLEAN, *DONE_1, *CLEAN_1),
        "start trainer 0, stop, start trainer 1, stop, finish succeeded 0",
    ),
    (
        "restarts are counted",
        AGAIN,
        (*JOINED, FAILED, *CLEAN, exits(ended(T0, 9), attempt=1), *CLEAN_1),
        "start trainer 0, stop, start trainer 1, stop, finish failed 9",
    ),
    (
        "what a node said of the last attempt does not count",
        AGAIN,
        (*JOINED, FAILED, *CLEAN, exits(ended(T0, 9), attempt=1), *CLEAN),
        "start trainer 0, stop, start trainer 1, stop",
    ),
    (
        "exits of the last attempt neither end nor fail this one",
        AGAIN,
        (*JOINED, FAILED, *CLEAN, exits(ended(T0, 9)), *DONE),
        "start trainer 0, stop, start trainer 1",
    ),
    (
        "a port of the last attempt starts no trainer of this one",
        SERVED_AGAIN,
        (*SERVED, exits(ended(T1, 1)), *CLEAN, Listening(P0), Listening(P1)),
        "start pserver 0, start trainer 0, stop, start pserver 1",
    ),
    (
        "the ports of this attempt start them",
        SERVED_AGAIN,
        (*SERVED, exits(ended(T1, 1)), *CLEAN, Listening(P0), *SERVED_1),
        "start pserver 0, start trainer 0, stop, start pserver 1, start trainer 1",
    ),
    (
        "reports of an attempt that has not begun do not count",
        AGAIN,
        (*JOINED, exits(ended(T0, 9), attempt=1), FAILED, *CLEAN_1, Clean(0)),
        "start trainer 0, stop",
    ),
    (
        "no restart past a lost node",
        AGAIN,
        (*JOINED, FAILED, Clean(0), Lost(1, "x")),
        "start trainer 0, stop, finish lost 75",
    ),
    ("no restart of a lost node", AGAIN, (*JOINED, Lost(1, "x"), Clean(0)), "start trainer 0, stop, finish lost 75"),
    (
        "no restart after Ctrl+C",
        AGAIN,
        (*JOINED, StopAsked("ann", 130), *CLEAN),
        "start trainer 0, stop, finish stopped 130",
    ),
    (
        "Ctrl+C while a restart is under way",
        AGAIN,
        (*JOINED, FAILED, Clean(0), StopAsked("ann", 130), Clean(1)),
        "start trainer 0, stop, finish stopped 130",
    ),
    (
        "the time is over while a restart is under way",
        AGAIN,
        (*JOINED, FAILED, StopAsked("t", 124, "timeout"), *CLEAN),
        "start trainer 0, stop, finish timeout 124",
    ),
    (
        "no restart beside survivors",
        AGAIN,
        (*JOINED, FAILED, Clean(0, ("sh (pid 5)",)), Clean(1)),
        "start trainer 0, stop, finish failed 7",
    ),
    (
        "continue restarts when all have ended",
        BOTH,
        (*JOINED, FAILED, exits(ended(T0), ended(T1)), exits(ended(T3)), *CLEAN),
        "start trainer 0, stop, start trainer 1",
    ),
    (
        "a failure during the end of an attempt is not the next one's",
        AGAIN,
        (*JOINED, FAILED, exits(ended(T0, 1)), *CLEAN, *DONE_1, *CLEAN_1),
        "start trainer 0, stop, start trainer 1, stop, finish succeeded 0",
    ),
]


@pytest.mark.parametrize("name, shape, events, done", POLICIES, ids=[name for name, *_ in POLICIES])
def test_policies(name: str, shape: Shape, events: tuple[Event, ...], done: str) -> None:
    assert ", ".join(replay(shape, *events)[1]) == done


# -- the verdict --------------------------------------------------------------------------------------------------------


def test_the_culprits_are_those_that_failed_by_themselves_and_the_stopped_are_victims() -> None:
    found = verdict(
        COLLECTIVE, *JOINED, exits(ended(T3, 9), ended(T2, 7)), exits(ended(T1, signal=6)), stopped(T0), *CLEAN
    )
    assert (found.culprits, found.victims) == ((T2, T3, T1), (T0,))
    assert (found.code, found.source, found.node) == (7, "job", 1)
    assert found.reason == (
        "trainer 2 on n1 ended with exit code 7; trainer 3 on n1 ended with exit code 9; "
        "trainer 1 on n0 ended with signal 6 (abort)"
    )


def test_failures_with_the_same_error_are_one_sentence_and_none_is_a_victim() -> None:
    """Four processes fail of the same error: one before the job ends, two before the stop reaches them; one is stopped."""
    same = exits(ended(T0, 1, error=5)), exits(ended(T3, 1, error=5)), exits(ended(T1, 1, error=5)), stopped(T2)
    found = verdict(COLLECTIVE, *JOINED, *same, *CLEAN)
    assert (found.culprits, found.victims) == ((T0, T3, T1), (T2,))
    assert found.reason == "3 trainers failed with the same error, first trainer 0 on n0: exit code 1"
    other = verdict(COLLECTIVE, *JOINED, exits(ended(T0, 1, error=5), ended(T1, 1, error=6)), stopped(T2, T3), *CLEAN)
    assert other.reason == "trainer 0 on n0 ended with exit code 1; trainer 1 on n0 ended with exit code 1"


def test_after_a_signal_the_last_line_of_the_log_makes_no_difference() -> None:
    found = verdict(COLLECTIVE, *JOINED, exits(ended(T0, signal=11, error=5), ended(T1, signal=11, error=6)), *CLEAN)
    assert (
        found.reason == "2 trainers failed with the same error, first trainer 0 on n0: signal 11 (segmentation fault)"
    )


def test_causes_are_before_consequences() -> None:
    """Trainer 3 ends first, since trainer 0 closed its connection; trainer 0 is reaped a moment later."""
    lost = ended(T3, 1, error=8, consequence=True)
    found = verdict(COLLECTIVE, *JOINED, exits(lost), exits(ended(T0, 5, error=9)), stopped(T1, T2), *CLEAN)
    assert (found.culprits, found.code, found.node) == ((T0, T3), 5, 0)
    assert found.reason == "trainer 0 on n0 ended with exit code 5; trainer 3 on n1 failed after it (connection lost)"
    assert found.followed == (T3,)
    alone = verdict(COLLECTIVE, *JOINED, exits(lost), stopped(T0, T1, T2), *CLEAN)
    assert (alone.culprits, alone.code) == ((T3,), 1), "a consequence without a known cause"
    assert alone.followed == () and alone.reason == "trainer 3 on n1 ended with exit code 1"


def test_a_failure_that_is_late_is_no_cause_of_the_first_one() -> None:
    """A rank that fails by itself seconds after the stop, as its cleanup fails, is named last."""
    lost, later = exits(ended(T3, 1, error=8, consequence=True)), (ended(T0, 5, error=9),)
    found = verdict(COLLECTIVE, *JOINED, lost, Exited(later, 0, late=True), stopped(T1, T2), *CLEAN)
    assert (found.culprits, found.followed, found.code) == ((T3, T0), (), 1)


def test_ranks_that_follow_one_are_one_sentence_whatever_their_errors() -> None:
    """Ranks 1 and 3 die of the closed connection before the traceback of rank 2 is complete, with messages of their own."""
    lost = [exits(ended(key, 1, error=error, consequence=True)) for key, error in ((T1, 8), (T3, 9))]
    found = verdict(COLLECTIVE, *JOINED, *lost, exits(ended(T2, 1, error=5)._replace(note="KeyError: 'x'")), *CLEAN)
    assert (found.culprits, found.followed) == ((T2, T1, T3), (T1, T3))
    assert found.reason == (
        "trainer 2 on n1 ended with exit code 1: KeyError: 'x'; trainers 1 and 3 failed after it (connection lost)"
    )


def test_the_delayed_stop_names_all_failures_that_are_known_then() -> None:
    state, _ = replay(COLLECTIVE, *JOINED, exits(ended(T3, 1, error=5)))
    assert may_fail(state)
    for key in (T0, T1):
        state, actions = decide(state, exits(ended(key, 1, error=5)))
        assert actions == () and may_fail(state)
    state, actions = decide(state, exits(ended(T2, 1, error=5)))
    assert actions == () and not may_fail(state), "all have ended"
    assert stop(state) == Stop("4 trainers failed with the same error, first trainer 3 on n1: exit code 1")


def test_only_after_a_failure_others_may_fail_of_the_same_cause() -> None:
    assert not may_fail(replay(COLLECTIVE, *JOINED)[0])
    for ending in (StopAsked("ann", 130), StopAsked("t", 124, "timeout"), Lost(1, "silent")):
        assert not may_fail(replay(COLLECTIVE, *JOINED, ending)[0])
        assert not may_fail(replay(AGAIN, *JOINED, FAILED, ending)[0]), "it replaces the restart"
    assert not may_fail(replay(PS, *SERVED, exits(ended(T0)), exits(ended(T1)))[0]), "success"
    assert may_fail(replay(AGAIN, *JOINED, FAILED)[0])


def test_a_reason_names_three_errors_and_counts_the_rest() -> None:
    found = verdict(
        COLLECTIVE, *JOINED, exits(*(ended(key, code) for code, key in enumerate((T0, T1, T2, T3), 1))), *CLEAN
    )
    assert found.reason.endswith("; trainer 2 on n1 ended with exit code 3; 1 more failed")


def test_a_process_that_fails_while_the_user_stops_the_job_is_no_culprit() -> None:
    found = verdict(COLLECTIVE, *JOINED, StopAsked("ann", 130), exits(ended(T0, 1)), stopped(T1), *CLEAN)
    assert (found.state, found.culprits, found.victims) == ("stopped", (), (T1,))


def test_a_rank_that_was_done_before_is_no_victim() -> None:
    found = verdict(COLLECTIVE, *JOINED, exits(ended(T0)), exits(ended(T2, 7)), stopped(T1, T3), *CLEAN)
    assert found.victims == (T1, T3)


def test_a_pserver_goes_before_the_trainers_that_died_with_it() -> None:
    found = verdict(PS, *SERVED, exits(ended(T1, 1), ended(P1, signal=11)), stopped(P0, T0), *CLEAN)
    assert (found.culprits, found.code) == ((P1, T1), 139)
    assert found.reason.startswith(
        "pserver 1 on n1 ended with signal 11 (segmentation fault); trainer 1 on n1 ended with "
    )
    assert found.victims == (P0, T0)


def test_a_heter_trainer_is_a_culprit_and_a_victim_like_any_other() -> None:
    found = verdict(HETER, *PIPED, exits(ended(H1, 3)), stopped(P0, T0), exits(ended(T1, 1)), stopped(H0), *CLEAN)
    assert (found.culprits, found.victims) == ((H1, T1), (H0, P0, T0))
    assert found.reason == "heter trainer 1 on n1 ended with exit code 3; trainer 1 on n1 ended with exit code 1"
    found = verdict(HETER, *PIPED, exits(ended(T1, 3)), stopped(P0, T0, H0), stopped(H1), *CLEAN)
    assert (found.culprits, found.victims) == ((T1,), (H0, H1, P0, T0))


def test_a_pserver_that_never_listened_is_named() -> None:
    found = verdict(PS, *JOINED, exits(ended(P1, 0)), stopped(P0), *CLEAN)
    early = 'before it listened on its port (one that opens none: [pserver] ready = "started" in job.toml)'
    assert found.reason == f"pserver 1 on n1 ended with exit code 0 {early}"


def test_after_success_there_are_no_victims() -> None:
    found = verdict(PS, *SERVED, exits(ended(T0)), exits(ended(T1)), stopped(P0), exits(ended(P1, 1)), *CLEAN)
    assert (found.culprits, found.victims, found.reason) == ((), (), "all trainers are done")


def test_of_a_lost_node_the_reason_is_the_node() -> None:
    found = verdict(COLLECTIVE, *JOINED, Lost(1, "no heartbeat for 10 s"), exits(ended(T1, 1)), stopped(T0), Clean(0))
    assert (found.source, found.node, found.reason) == ("tool", 1, "node n1 is lost: no heartbeat for 10 s")
    assert (found.culprits, found.victims) == ((T2, T3), (T0,)), "trainer 1 failed by itself"


def test_under_continue_all_failures_are_culprits_and_the_first_gives_the_code() -> None:
    found = verdict(
        GO_ON, *JOINED, exits(ended(T3, 9)), exits(ended(T0, 1)), exits(ended(T1)), exits(ended(T2)), *CLEAN
    )
    assert (found.culprits, found.victims, found.code, found.node) == ((T3, T0), (), 9, 1)


def test_survivors_of_all_nodes_are_gathered() -> None:
    state, _ = replay(COLLECTIVE, *JOINED, StopAsked("ann", 130), Clean(0, ("a",)), Clean(1, ("b", "c")))
    assert state.survivors == ("a", "b", "c")


def test_the_reason_of_a_stop_names_its_sender() -> None:
    found = verdict(COLLECTIVE, *JOINED, StopAsked("ann at laptop", 130), stopped(T0, T1), stopped(T2, T3), *CLEAN)
    assert (found.reason, found.source, found.culprits, found.victims) == (
        "ann at laptop",
        "tool",
        (),
        (T0, T1, T2, T3),
    )


def test_a_node_on_which_all_attempts_have_failed_is_named() -> None:
    again = (*JOINED, FAILED, *CLEAN)
    found = verdict(AGAIN, *again, exits(ended(T3, 9), attempt=1), *CLEAN_1)
    assert found.reason.endswith("exit code 9; all 2 attempts have failed first on n1: it may be defective")
    found = verdict(AGAIN, *again, exits(ended(T0, 9), attempt=1), *CLEAN_1)
    assert found.reason.endswith("exit code 9")
    assert verdict(COLLECTIVE, *JOINED, FAILED, *CLEAN).reason.endswith("exit code 7"), "one attempt"


def test_the_reason_of_a_restart_is_sent_to_the_nodes_that_stop() -> None:
    state, _ = replay(AGAIN, *JOINED)
    _, (stop,) = decide(state, FAILED)
    assert stop == Stop("restart after attempt 0: trainer 2 on n1 ended with exit code 7")


def test_a_state_is_a_value() -> None:
    before, _ = replay(COLLECTIVE, *JOINED)
    assert decide(before, FAILED) == decide(before, FAILED)
    assert before == replay(COLLECTIVE, *JOINED)[0]
    assert hash(before) == hash(replay(COLLECTIVE, *JOINED)[0])


@pytest.mark.parametrize(
    ("joined", "absent", "reason", "node"),
    [
        ((0,), (1, 2), "no other node could connect to", -1),
        ((0, 1), (2,), "no connection from n2 to", 2),
    ],
)
def test_no_node_is_blamed_if_none_could_connect(
    joined: tuple[int, ...], absent: tuple[int, ...], reason: str, node: int
) -> None:
    found = verdict(THREE, *map(Joined, joined), Absent(absent, WHERE, 30.0), *map(Clean, joined))
    assert found.reason == f"{reason} {WHERE} within 30 s"
    assert (found.node, found.culprits) == (node, ()), "its ranks never ran"


def test_what_a_job_waits_for() -> None:
    def after(shape: Shape, *events: Event) -> str:
        return describe_wait(replay(shape, *events)[0], WHERE)

    assert after(THREE, Joined(0)) == f"a connection from n1 and n2 to {WHERE}"
    assert after(PS, *JOINED, Listening(P0)) == "an open port of pserver 1 on n1"
    assert after(PS, *SERVED) == after(COLLECTIVE, *JOINED) == ""


def test_a_job_that_an_engine_starts_again_begins_with_a_later_attempt() -> None:
    """Without a pause, and with all of its restarts."""
    later = Shape(COLLECTIVE.nodes, COLLECTIVE.names, COLLECTIVE.place, max_restarts=1, first=3)
    state, _ = decide(State(later, attempt=3), Joined(0))
    state, actions = decide(state, Joined(1))
    assert actions == (Start("trainer", 3),)
    for event in (exits(ended(T2, 7), attempt=3), Clean(0, attempt=3), Clean(1, attempt=3)):
        state, actions = decide(state, event)
    assert actions == (Start("trainer", 4, again=True),)
    for event in (exits(ended(T2, 7), attempt=4), Clean(0, attempt=4), Clean(1, attempt=4)):
        state, actions = decide(state, event)
    assert isinstance(actions[0], Finish) and actions[0].outcome.code == 7


# -- restarts without progress


def steps_of(*printed: float, epoch: float | None = None, steady: bool = True) -> JobSteps:
    return JobSteps().add([(epoch, step) for step in printed])._replace(steady=steady)


def attempts(shape: Shape, reached: list[JobSteps]) -> tuple[int, State]:
    """Fail each attempt; a rank that is stopped then has printed these steps. Return how many attempts began."""
    state, began = State(shape), 0
    actions: tuple[object, ...] = ()
    for event in JOINED:
        state, actions = decide(state, event)
    for number, steps in enumerate(reached):
        if not isinstance(actions[0], Start):
            break
        began += 1
        victims = Exited((ended(T0, 143, stopped=True),), number, steps=steps)
        for event in (exits(ended(T2, 7), attempt=number), victims, Clean(0, attempt=number), Clean(1, attempt=number)):
            state, actions = decide(state, event)
    return began, state


NONE = JobSteps()
REACHED: list[tuple[str, int, list[JobSteps], int]] = [
    ("no step was ever read", 3, [NONE] * 8, 8),
    ("the first failure is no restart, three restarts are not later", 3, [steps_of(150), *[steps_of(150)] * 7], 4),
    ("steps that are repeated after a checkpoint", 3, [steps_of(150), *[steps_of(101, 140)] * 7], 4),
    ("the third one passes them", 3, [*[steps_of(150)] * 3, steps_of(151), *[steps_of(151)] * 4], 7),
    ("no step is reached any more", 3, [steps_of(150), *[NONE] * 7], 4),
    ("the first step comes late", 3, [NONE, NONE, *[steps_of(10)] * 6], 6),
    ("a later epoch with a lower step", 1, [steps_of(900, epoch=1), *[steps_of(5, epoch=2)] * 7], 3),
    ("a counter that begins again shows nothing", 3, [steps_of(150, steady=False)] * 8, 8),
    ("the limit is off", 0, [steps_of(150)] * 8, 8),
    ("one is allowed", 1, [steps_of(150)] * 8, 2),
]


@pytest.mark.parametrize(("limit", "reached", "began"), [one[1:] for one in REACHED], ids=[one[0] for one in REACHED])
def test_restarts_without_a_later_step_end_the_job(limit: int, reached: list[JobSteps], began: int) -> None:
    shape = Shape(COLLECTIVE.nodes, COLLECTIVE.names, COLLECTIVE.place, max_restarts=9, most_idle=limit)
    found, state = attempts(shape, reached)
    assert (found, state.phase == "over") == (began, began < len(reached))
    if state.phase == "over":
        assert state.ending is not None and (state.ending.state, state.ending.code) == (JobState.FAILED, 7)


def test_the_verdict_names_the_step_that_was_not_passed() -> None:
    shape = Shape(COLLECTIVE.nodes, COLLECTIVE.names, COLLECTIVE.place, max_restarts=9, most_idle=2)
    _, state = attempts(shape, [steps_of(20, epoch=3)] * 3)
    assert state.ending is not None
    assert "exit code 7" in state.ending.reason
    assert state.ending.reason.endswith(
        "; 2 restarts in a row without a later step than step 20 of epoch 3 (max_restarts_without_progress)"
    )


# -- a job that hangs


def that_runs(max_restarts: int = 0) -> State:
    shape = Shape(COLLECTIVE.nodes, COLLECTIVE.names, COLLECTIVE.place, max_restarts=max_restarts)
    state = State(shape)
    for node in sorted(shape.nodes):
        state, _ = decide(state, Joined(node))
    assert state.phase == "trainer"
    return state


def after_clean(state: State) -> State:
    for node in sorted(state.shape.nodes):
        state, _ = decide(state, Clean(node, attempt=state.attempt))
    return state


@pytest.mark.parametrize(("restart", "left"), [(False, 3), (True, 0)])
def test_a_hang_ends_the_job(restart: bool, left: int) -> None:
    state, actions = decide(that_runs(left), Hung("trainer 1 is in load", restart))
    assert actions == (Stop("hang: trainer 1 is in load"),)
    state = after_clean(state)
    assert state.phase == "over" and state.ending is not None
    assert (state.ending.state, state.ending.code, state.ending.source) == (JobState.TIMEOUT, 124, "tool")
    assert state.ending.reason == "hang: trainer 1 is in load"


def test_a_hang_begins_another_attempt() -> None:
    state, actions = decide(that_runs(1), Hung("trainer 1 is in load", True))
    assert actions == (Stop("restart after attempt 0: hang: trainer 1 is in load"),)
    state = after_clean(state)
    assert (state.phase, state.attempt, state.hang) == ("trainer", 1, "")
    state, _ = decide(state, Hung("trainer 1 is in load", True))
    state = after_clean(state)
    assert state.phase == "over" and state.ending is not None and state.ending.code == 124


def test_a_job_that_ends_cannot_hang() -> None:
    state, _ = decide(that_runs(), StopAsked("Ctrl+C", 130))
    assert decide(state, Hung("trainer 1 is in load", True)) == (state, ())
