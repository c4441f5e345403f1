"""decide() of elastic jobs replayed: histories of events, the coordinator's actions, and how the epoch or the job ends."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.model.job.job_steps import JobSteps
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.spec_types import Spec
from clustertool.node.supervisor.coordinator import epoch_decisions as e
from clustertool.node.supervisor.coordinator import job_decisions as l
from clustertool.node.supervisor.coordinator.epoch_decisions import LeaseEnded, Leaves, OnStandby, Returned
from clustertool.node.supervisor.coordinator.job_decisions import (
    Absent,
    Clean,
    Exited,
    Explained,
    Joined,
    Listening,
    Lost,
    StopAsked,
)

# Three members of a job with gaps in their numbers, and a trainer on each.
T0, T1, T2 = (("trainer", rank) for rank in range(3))
NODE = {T0: 0, T1: 2, T2: 5}
LOST = Lost(5, "no heartbeat for 10 s")
ASKED = StopAsked("the user", 0)


def spec(**given: Any) -> Any:
    elastic = {
        "epoch": 4,
        "lease": 10.0,
        "grow": "next",
        "minimum": 2,
        "maximum": 4,
        "members": 3,
        "waiting": [],
        "absent": 0,
        "restarts": 0,
        "blamed": [],
        "steps": JobSteps(),
        "store": False,
    }
    elastic.update((name, given.pop(name)) for name in list(given) if name in elastic)
    shape = {
        "names": ["n0", "", "n2", "", "", "n5"],
        "nodes": [0, 2, 5],
        "place": [[role, rank, node] for (role, rank), node in NODE.items()],
    }
    policy = {"on_failure": "abort", "max_restarts": 0, "grace": 10.0, "max_restarts_without_progress": 3}
    policy.update(given.pop("policy", {}))
    return {"shape": {**shape, **given}, "policy": policy, "attempt": elastic["epoch"], "elastic": elastic}


def ended(
    key: tuple[str, int], code: int = 0, signal: int = 0, stopped: bool = False, consequence: bool = False
) -> l.RankExit:
    return l.RankExit(*key, code, signal, stopped, consequence=consequence)


def exits(*those: l.RankExit, attempt: int = 4) -> Exited:
    return Exited(those, attempt)


def stopped(*keys: tuple[str, int], attempt: int = 4) -> Exited:
    return Exited(tuple(ended(key, 143, stopped=True) for key in keys), attempt)


def clean(node: int, *survivors: str, attempt: int = 4) -> Clean:
    return Clean(node, survivors, attempt)


def replay(of: Spec, *events: e.Event) -> tuple[l.State, list[str]]:
    """The last state, and what was done: `start trainer 4`, `stop`, `finish next epoch 75`."""
    elastic = of["elastic"]
    begun = {"attempt": of["attempt"], "blamed": tuple(elastic["blamed"]), "steps": elastic["steps"]}
    state, done = l.State(e.shape_of(of), **begun), []
    for event in events:
        state, actions = e.decide(of["elastic"], state, event)
        for action in actions:
            if isinstance(action, l.Start):
                done.append(f"start {action.role} {action.attempt}")
            elif isinstance(action, l.Finish):
                done.append(f"finish {action.outcome.state} {action.outcome.code}")
            else:
                done.append(type(action).__name__.lower())
    return state, done


def outcome(of: Spec, *events: e.Event) -> tuple[l.State, Outcome]:
    state, done = replay(of, *events)
    assert state.phase == "over" and state.ending is not None, (state.phase, done)
    assert sum(one.startswith("finish") for one in done) == 1
    return state, state.ending


ALL = (Joined(0), Joined(2), Joined(5))
THOSE = (clean(0), clean(2))
ANY = THOSE + (clean(5),)
FAILED = (*ALL, exits(ended(T1, 1)))
AGAIN = (*ALL, exits(ended(T1, 101)))

SIGNAL = StopAsked("the supervisor received SIGTERM", 143, outside=True)
LIMIT = Explained(Outcome(JobState.TIMEOUT, 124, "tool", "the time limit"))
DOWN5, DOWN2 = (e.ShutDown(node, StopAsked(f"the supervisor on n{node} received SIGTERM", 143)) for node in (5, 2))

HISTORIES: list[tuple[str, dict[str, Any], tuple[e.Event, ...], str]] = [
    ("an epoch begins with its number", {}, ALL, "start trainer 4"),
    ("nothing starts before all have joined", {}, ALL[:2], ""),
    (
        "success is that of the job",
        {},
        (*ALL, exits(ended(T0), ended(T1)), exits(ended(T2)), *ANY),
        "start trainer 4, stop, finish succeeded 0",
    ),
    ("a failure is that of the job", {}, (*FAILED, *ANY), "start trainer 4, stop, finish failed 1"),
    ("a stop is that of the job", {}, (*ALL, ASKED, *ANY), "start trainer 4, stop, finish stopped 0"),
    (
        "a node is shut down",
        {},
        (*ALL, DOWN5, stopped(T2), clean(5), stopped(T0, T1), *THOSE),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "ranks of others fail because a node is shut down",
        {},
        (*FAILED, DOWN5, stopped(T2), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "nodes are shut down together, and too few are left",
        {},
        (*ALL, DOWN5, DOWN2, *ANY),
        "start trainer 4, stop, finish stopped 143",
    ),
    (
        "one is too many",
        {"minimum": 3},
        (*ALL, DOWN5, *ANY),
        "start trainer 4, stop, finish stopped 143",
    ),
    (
        "a machine on standby counts",
        {"minimum": 3},
        (*ALL, DOWN5._replace(standby=1), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "a lost one does not",
        {},
        (*ALL, LOST, DOWN2, *THOSE),
        "start trainer 4, stop, finish stopped 143",
    ),
    (
        "an engine ends them all",
        {},
        (*ALL, DOWN5, DOWN2._replace(stop=SIGNAL), *ANY, LIMIT),
        "start trainer 4, stop, ask, finish timeout 124",
    ),
    (
        "and the coordinator too",
        {"minimum": 1},
        (*ALL, DOWN5, SIGNAL, *ANY, LIMIT),
        "start trainer 4, stop, ask, finish timeout 124",
    ),
    (
        "a node is shut down during a stop",
        {},
        (*ALL, ASKED, DOWN5, *ANY),
        "start trainer 4, stop, finish stopped 0",
    ),
    ("a lost node ends the epoch", {}, (*ALL, LOST, *THOSE), "start trainer 4, stop, finish next epoch 75"),
    ("the epoch ends only with proof", {}, (*ALL, LOST, clean(2)), "start trainer 4, stop"),
    ("a node is lost before all have joined", {}, (*ALL[:2], LOST, *THOSE), "stop, finish next epoch 75"),
    (
        "nodes that never joined end the epoch",
        {},
        (Joined(0), Absent((2, 5), "the coordinator", 30.0), clean(0)),
        "stop, finish next epoch 75",
    ),
    (
        "two nodes are lost",
        {},
        (*ALL, LOST, Lost(2, "no heartbeat for 10 s"), clean(0)),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "the lease of the coordinator ends",
        {},
        (*ALL, LeaseEnded(0, "it slept"), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    ("a node leaves", {}, (*ALL, Leaves(2, "shrink"), *ANY), "start trainer 4, stop, finish next epoch 75"),
    (
        "a process offers itself again",
        {},
        (*ALL, Returned(5), *THOSE),
        "start trainer 4, stop, finish next epoch 75",
    ),
    ("a machine waits for the next epoch", {}, (*ALL, OnStandby("n9")), "start trainer 4"),
    (
        "a machine begins an epoch if the user wants that",
        {"grow": "restart"},
        (*ALL, OnStandby("n9"), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    ("but not beyond the maximum", {"grow": "restart", "maximum": 3}, (*ALL, OnStandby("n9")), "start trainer 4"),
    (
        "nor while the job fails",
        {"grow": "restart"},
        (*FAILED, OnStandby("n9"), *ANY),
        "start trainer 4, stop, finish failed 1",
    ),
    # A failure and a loss: the ranks may have failed because of the lost node.
    (
        "a rank fails, and then a node is lost",
        {},
        (*FAILED, LOST, stopped(T0), *THOSE),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "a node is lost, and then a rank fails",
        {},
        (*ALL, LOST, exits(ended(T1, 1)), *THOSE),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "a restart that is under way gives way",
        {"policy": {"max_restarts": 3}},
        (*FAILED, LOST, stopped(T0), *THOSE),
        "start trainer 4, stop, finish next epoch 75",
    ),
    # What has priority over the end of an epoch.
    (
        "a stop during the end of an epoch",
        {},
        (*ALL, LOST, ASKED, *THOSE),
        "start trainer 4, stop, finish stopped 0",
    ),
    (
        "the last trainers end well before the stop of the epoch",
        {},
        (*ALL, Leaves(2, "shrink"), exits(ended(T0), ended(T1)), exits(ended(T2)), *ANY),
        "start trainer 4, stop, finish succeeded 0",
    ),
    (
        "one of them was stopped",
        {},
        (*ALL, Leaves(2, "shrink"), exits(ended(T0), ended(T1)), stopped(T2), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "a node is lost after the success",
        {},
        (*ALL, exits(ended(T0), ended(T1), ended(T2)), LOST, *THOSE),
        "start trainer 4, stop, finish succeeded 0",
    ),
    # Restarts of ranks within an epoch.
    (
        "a failed rank starts all again, with the next number",
        {"policy": {"max_restarts": 1}},
        (*FAILED, *ANY),
        "start trainer 4, stop, start trainer 5",
    ),
    (
        "the second failure on the same node makes a restart an epoch",
        {"policy": {"max_restarts": 3}},
        (*FAILED, *ANY, exits(ended(T1, 1), attempt=5), *(clean(node, attempt=5) for node in (0, 2, 5))),
        "start trainer 4, stop, start trainer 5, stop, finish next epoch 75",
    ),
    (
        "one on another node does not",
        {"policy": {"max_restarts": 3}},
        (*FAILED, *ANY, exits(ended(T2, 1), attempt=5), *(clean(node, attempt=5) for node in (0, 2, 5))),
        "start trainer 4, stop, start trainer 5, stop, start trainer 6",
    ),
    (
        "an earlier epoch counts",
        {"policy": {"max_restarts": 3}, "restarts": 1, "blamed": [2]},
        (*FAILED, *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "restarts of earlier epochs count",
        {"policy": {"max_restarts": 1}, "restarts": 1},
        (*FAILED, *ANY),
        "start trainer 4, stop, finish failed 1",
    ),
    (
        "with a store a restart is an epoch",
        {"policy": {"max_restarts": 1}, "store": True},
        (*FAILED, *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "a node leaves during a restart",
        {"policy": {"max_restarts": 1}},
        (*FAILED, Leaves(5, "shrink"), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "a node leaves while the job fails",
        {},
        (*FAILED, Leaves(5, "shrink"), *ANY),
        "start trainer 4, stop, finish failed 1",
    ),
    # Ranks that ask to be started again.
    ("exit code 101", {}, (*AGAIN, stopped(T0, T2), *ANY), "start trainer 4, stop, finish next epoch 75"),
    (
        "exit code 101 with an effect on another rank",
        {},
        (*AGAIN, exits(ended(T0, 1, consequence=True)), stopped(T2), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "exit code 101 and a failure",
        {},
        (*AGAIN, exits(ended(T0, 1)), stopped(T2), *ANY),
        "start trainer 4, stop, finish failed 101",
    ),
    (
        "a failure and exit code 101",
        {},
        (*FAILED, exits(ended(T0, 101)), stopped(T2), *ANY),
        "start trainer 4, stop, finish failed 1",
    ),
    # What happens to nodes.
    (
        "a supervisor has ended its processes unasked",
        {},
        (*ALL, stopped(T1), *ANY),
        "start trainer 4, stop, finish next epoch 75",
    ),
    (
        "reports of an earlier epoch change nothing",
        {},
        (*ALL, exits(ended(T1, 1), attempt=3), clean(2, attempt=3)),
        "start trainer 4",
    ),
    (
        "processes that cannot be ended end the job",
        {},
        (*ALL, LOST, clean(0), clean(2, "rank 1 (pid 77)")),
        "start trainer 4, stop, finish lost 75",
    ),
]


@pytest.mark.parametrize(("given", "events", "done"), [one[1:] for one in HISTORIES], ids=[one[0] for one in HISTORIES])
def test_history(given: dict[str, Any], events: tuple[e.Event, ...], done: str) -> None:
    assert ", ".join(replay(spec(**given), *events)[1]) == done


def test_the_shape_of_an_epoch_has_the_numbers_of_its_members() -> None:
    made = e.shape_of(spec(restarts=2, policy={"max_restarts": 3}))
    assert made.nodes == {0, 2, 5} and made.names[5] == "n5" and made.node_of == NODE
    assert (made.first, made.max_restarts) == (4, 1)


def test_the_shape_of_another_job_has_all_nodes() -> None:
    given = spec()
    del given["elastic"], given["attempt"], given["shape"]["nodes"]
    made = e.shape_of(given)
    assert made.nodes == set(range(6)) and made.first == 0


def test_a_lost_node_that_proves_its_end_is_lost_no_more() -> None:
    """It had no connection for a while, and its supervisor was reached by the stop."""
    state, _ = replay(spec(), *ALL, LOST, clean(5))
    assert state.lost == frozenset() and state.gone == {5}
    state, end = outcome(spec(), *ALL, LOST, clean(5), *THOSE)
    assert end.state is JobState.NEXT_EPOCH and state.lost == frozenset()
    assert "n5 is lost" in end.reason


def test_a_lost_process_that_offers_itself_again_is_lost_no_more() -> None:
    state, end = outcome(spec(), *ALL, LOST, clean(0), Returned(5), clean(2))
    assert end.state is JobState.NEXT_EPOCH and state.lost == frozenset()


def test_only_lost_nodes_are_waited_for() -> None:
    state, _ = outcome(spec(), *ALL, LOST, Lost(2, "its supervisor died"), clean(0))
    assert state.lost == {2, 5}


def test_a_released_node_is_known_also_if_another_one_is_lost() -> None:
    state, end = outcome(spec(), *ALL, LOST, Leaves(2, "shrink"), *THOSE)
    assert state.left == {2} and "n5 is lost" in end.reason


@pytest.mark.parametrize(
    ("given", "events", "used"),
    [
        ({}, (*ALL, LOST, *THOSE), 0),
        ({"restarts": 2}, (*ALL, LOST, *THOSE), 2),
        ({"policy": {"max_restarts": 3}, "restarts": 1, "store": True}, (*FAILED, *ANY), 2),
        ({"policy": {"max_restarts": 3}}, (*FAILED, Leaves(5, "shrink"), *ANY), 1),
        ({"policy": {"max_restarts": 3}}, (*FAILED, LOST, *THOSE), 0),
        ({"policy": {"max_restarts": 3}}, (*AGAIN, *ANY), 0),
        (
            {"policy": {"max_restarts": 3}},
            (*FAILED, *ANY, LOST, clean(0, attempt=5), clean(2, attempt=5)),
            1,
        ),
    ],
    ids=["lost", "earlier epochs", "store", "leaves", "lost while it restarts", "101", "restarted, then lost"],
)
def test_restarts_that_count(given: dict[str, Any], events: tuple[e.Event, ...], used: int) -> None:
    of = spec(**given)
    state, end = outcome(of, *events)
    assert end.state is JobState.NEXT_EPOCH
    assert e.restarts_used(of["elastic"], state) == used


def test_reasons() -> None:
    def why(*events: e.Event, **given: Any) -> str:
        return outcome(spec(**given), *events)[1].reason

    assert why(*ALL, LOST, *THOSE) == "node n5 is lost: no heartbeat for 10 s"
    assert why(*ALL, Leaves(2, "inv shrink"), *ANY) == "node n2 leaves: inv shrink"
    assert why(*ALL, OnStandby("n9"), *ANY, grow="restart") == "n9 joins"
    assert why(*AGAIN, stopped(T0, T2), *ANY) == "trainer 1 on n2 asks to be started again (exit code 101)"
    assert why(*ALL, LeaseEnded(0, "it slept"), *ANY) == "n0 coordinates the job, and its lease has ended: it slept"
    assert why(*ALL, Returned(5), *THOSE) == "the lease of n5 has ended: it had no connection"
    restarted = why(*FAILED, *ANY, policy={"max_restarts": 1}, store=True)
    assert restarted.startswith("restart after attempt 4: ") and "exit code 1" in restarted


def test_an_epoch_of_servers_goes_on_to_the_trainers() -> None:
    """Lost servers begin an epoch, too."""
    place = [["pserver", 0, 2], ["trainer", 0, 0], ["trainer", 1, 5]]
    of = spec(place=place)
    _, done = replay(of, *ALL, Listening(("pserver", 0), 4))
    assert done == ["start pserver 4", "start trainer 4"]
    _, end = outcome(of, *ALL, Lost(2, "it is off"), clean(0), clean(5))
    assert end.state is JobState.NEXT_EPOCH


# -- restarts without progress


def reached(step: float, idle: int = 0) -> JobSteps:
    at = (None, step)
    return JobSteps(at, at, idle)


def prints(*those: l.RankExit, step: float) -> Exited:
    return Exited(those, 4, steps=JobSteps((None, step)))


STUCK = (*ALL, prints(ended(T1, 1), step=20))
NO_FAILURE = ((*ALL, LOST, *THOSE), (*AGAIN, *ANY), (*ALL, Leaves(5, "shrink"), *ANY))


@pytest.mark.parametrize("more", [{"store": True}, {"blamed": [2]}, {}])
def test_the_third_restart_without_a_later_step_is_no_epoch(more: dict[str, Any]) -> None:
    """Two of earlier epochs count."""
    given = {"policy": {"max_restarts": 9}, "restarts": 3, **more}
    for highest, state in ((20.0, JobState.FAILED), (19.0, JobState.NEXT_EPOCH)):
        done = replay(spec(**given, steps=reached(highest, 2)), *STUCK, stopped(T0, T2), *ANY)[1]
        assert done[:2] == ["start trainer 4", "stop"]
        goes_on = done[2] in ("finish next epoch 75", "start trainer 5")
        assert goes_on if state is JobState.NEXT_EPOCH else done[2:] == ["finish failed 1"]


def test_restarts_in_a_row_are_counted_over_epochs() -> None:
    of = spec(policy={"max_restarts": 9}, store=True, steps=reached(20, 1))
    state, _ = outcome(of, *STUCK, *ANY)
    assert state.steps.next_attempt(state.counted) == reached(20, 2)
    state, _ = outcome(of, *ALL, prints(ended(T1, 1), step=21), *ANY)
    assert state.steps.next_attempt(state.counted) == reached(21, 0)


@pytest.mark.parametrize("events", NO_FAILURE, ids=["lost", "101", "leaves"])
def test_a_change_of_nodes_is_no_restart_without_progress(events: tuple[e.Event, ...]) -> None:
    of = spec(policy={"max_restarts": 9}, steps=reached(20, 2))
    state, end = outcome(of, *events)
    assert end.state is JobState.NEXT_EPOCH
    assert state.steps.next_attempt(state.counted) == reached(20, 2)


def test_a_lost_node_is_the_cause_of_the_last_failure_without_progress() -> None:
    _, end = outcome(spec(policy={"max_restarts": 9}, steps=reached(20, 2)), *STUCK, LOST, *THOSE)
    assert end.state is JobState.NEXT_EPOCH
