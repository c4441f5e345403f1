"""decide() of a job whose trainers mpirun starts: when it has succeeded, and who is to blame."""

from __future__ import annotations

import pytest

from clustertool.node.supervisor.coordinator.job_decisions import (
    Clean,
    Exited,
    Finish,
    Joined,
    LauncherTimeout,
    Lost,
    Quiet,
    RankExit,
    Release,
    Shape,
    Start,
    State,
    StopAsked,
    decide,
    waits_for_launcher,
)
from tests.unit.test_job_decisions import JOINED, ended, exits, replay, verdict, with_policy

T0, T1 = ("trainer", 0), ("trainer", 1)
M, D0, D1 = ("mpirun", 0), ("mpidaemon", 0), ("mpidaemon", 1)
MPI = Shape(frozenset({0, 1}), ("n0", "n1"), ((T0, 0), (T1, 1), (M, 0), (D0, 0), (D1, 1)))
CLEAN = (Clean(0), Clean(1))
DONE = exits(ended(T0), ended(T1))


def by_launcher(key: tuple[str, int], code: int = 0, signal: int = 15) -> RankExit:
    return ended(key, code, signal)._replace(by_launcher=True)


def stopped(*keys: tuple[str, int]) -> Exited:
    return Exited(tuple(ended(key, 0, 9, stopped=True) for key in keys))


def test_mpirun_starts_behind_the_order_to_expect_its_ranks() -> None:
    _, done = replay(MPI, *JOINED)
    assert done == ["start trainer 0", "start mpirun 0"]


def test_a_restart_starts_both_again() -> None:
    shape = with_policy(MPI, max_restarts=1)
    _, done = replay(shape, *JOINED, exits(ended(T0, 3)), stopped(T1, M, D0, D1), *CLEAN)
    assert done[-2:] == ["start trainer 1", "start mpirun 1"]


@pytest.mark.parametrize("last", [(DONE, exits(ended(M))), (exits(ended(M)), DONE)])
def test_success_needs_trainers_and_mpirun(last: tuple[Exited, Exited]) -> None:
    """In any order; the daemons need not have ended."""
    state, done = replay(MPI, *JOINED, last[0])
    assert state.phase == "trainer" and "stop" not in done
    found = verdict(MPI, *JOINED, *last, stopped(D0, D1), *CLEAN)
    assert (found.state, found.code, found.victims) == ("succeeded", 0, ())


def test_mpirun_that_fails_after_its_ranks() -> None:
    found = verdict(MPI, *JOINED, DONE, exits(ended(M, 1)), *CLEAN)
    assert (found.state, found.code, found.culprits) == ("failed", 1, (M,))


def test_a_daemon_that_fails_after_all_ranks_is_no_failure() -> None:
    found = verdict(MPI, *JOINED, DONE, exits(ended(D1, 7)), exits(ended(M)), *CLEAN)
    assert found.state == "succeeded"


def test_a_rank_that_fails_is_the_culprit() -> None:
    """What mpirun and its daemons do is an effect, also where the coordinator learns of it first."""
    found = verdict(MPI, *JOINED, exits(ended(M, 1)), exits(ended(D1, 1)), exits(ended(T1, 7)), *CLEAN)
    assert (found.code, found.culprits) == (7, (T1,))


@pytest.mark.parametrize("launcher", [M, D0])
def test_a_killed_launcher_is_no_effect_of_a_failed_rank(launcher: tuple[str, int]) -> None:
    """Its ranks fail if they are in MPI_Init then. The coordinator may learn of them first."""
    killed, failed = exits(ended(launcher, 0, 9)), exits(ended(T0, 15))
    for events in ((killed, failed), (failed, killed)):
        found = verdict(MPI, *JOINED, *events, *CLEAN)
        assert (found.code, found.culprits) == (137, (launcher,))


def test_ranks_that_mpirun_ends_are_victims() -> None:
    state, done = replay(MPI, *JOINED, exits(by_launcher(T0)))
    assert state.phase == "trainer" and "stop" not in done
    found = verdict(MPI, *JOINED, exits(by_launcher(T0)), exits(by_launcher(T1, 1, 0)), exits(ended(M, 5)), *CLEAN)
    assert (found.code, found.culprits, found.victims) == (5, (M,), (T0, T1))


@pytest.mark.parametrize(
    ("exit", "others", "culprit", "code"),
    [
        (ended(D1, 0, 9), (ended(M, 137),), D1, 137),
        (ended(D1, 127), (ended(M, 1),), D1, 127),
        (ended(M, 0, 9), (ended(D0, 1), ended(D1, 1)), M, 137),
        (ended(M, 255), (ended(D0, 7), ended(D1, 7)), M, 255),
        (ended(D1, 1), (), D1, 1),
    ],
)
def test_the_cause_without_a_failed_rank(
    exit: RankExit, others: tuple[RankExit, ...], culprit: tuple[str, int], code: int
) -> None:
    """In any order: a daemon and mpirun end together, and their nodes report it."""
    for order in ((exit, *others), (*others, exit)):
        found = verdict(MPI, *JOINED, *map(exits, order), *CLEAN)
        assert (found.state, found.code, found.culprits) == ("failed", code, (culprit,))


def test_mpirun_that_ends_its_ranks_and_exits_with_0() -> None:
    found = verdict(MPI, *JOINED, exits(by_launcher(T0), by_launcher(T1)), exits(ended(M)), *CLEAN)
    assert (found.state, found.code, found.culprits) == ("failed", 1, (M,))
    assert "it has ended its ranks" in found.reason


@pytest.mark.parametrize(
    ("events", "text"), [((DONE,), "mpirun on n0 does not end"), ((exits(ended(M)),), "has ended without an error")]
)
def test_a_wait_for_the_other_has_a_limit(events: tuple[Exited, ...], text: str) -> None:
    state, _ = replay(MPI, *JOINED, *events)
    assert waits_for_launcher(state)
    found = verdict(MPI, *JOINED, *events, LauncherTimeout(10.0), *CLEAN)
    assert (found.state, found.code, found.culprits) == ("failed", 1, (M,)) and text in found.reason


def test_no_wait_otherwise() -> None:
    for events in ((), (DONE, exits(ended(M))), (StopAsked("user", 130),)):
        state, done = replay(MPI, *JOINED, *events)
        assert not waits_for_launcher(state)
        assert decide(state, LauncherTimeout(10.0)) == (state, ())


def test_a_lost_node_ends_the_job_as_in_other_modes() -> None:
    found = verdict(MPI, *JOINED, Lost(1, "no heartbeat for 10 s"), exits(ended(M, 1)), Clean(0))
    assert (found.state, found.code, found.node) == ("lost", 75, 1)


def test_mpirun_is_ended_when_no_rank_is_left() -> None:
    """On any node: the end of one daemon makes the others end their ranks."""
    state, _ = replay(MPI, *JOINED, StopAsked("user", 130))
    state, actions = decide(state, Quiet(1))
    assert actions == ()
    assert decide(state, Quiet(0))[1] == (Release(),)
    assert decide(state, Quiet(0, attempt=1))[1] == ()
    assert Release() in decide(state, Clean(0))[1]
    assert Release() in decide(state, Lost(0, "gone"))[1]
    state, _ = decide(state, Quiet(0))
    assert decide(state, Quiet(0))[1] == ()


def test_quiet_before_the_coordinator_knows_of_the_stop() -> None:
    state, _ = replay(MPI, *JOINED)
    for node in (0, 1):
        state, actions = decide(state, Quiet(node))
        assert actions == ()
    assert Release() in decide(state, StopAsked("user", 130))[1]


def test_a_job_without_mpirun_is_not_released() -> None:
    shape = Shape(frozenset({0}), ("n0",), ((T0, 0),))
    state, actions = decide(State(shape), Joined(0))
    assert actions == (Start("trainer", 0),)
    state, _ = decide(state, exits(ended(T0)))
    _, actions = decide(state, Clean(0))
    assert [type(action) for action in actions] == [Finish]
