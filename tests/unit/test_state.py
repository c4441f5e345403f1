"""Histories of a job's events, and the state that the fold makes of them: of the job, its attempts and its nodes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from clustertool.model.job.node_status import NodePart, NodeTrouble, read_part, record_of
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state import JobStatus, decide
from clustertool.model.job.state_names import (
    OUTCOMES,
    JobState,
    NodeCause,
    NodeState,
    RankState,
    StartReason,
    StopState,
)
from clustertool.model.job.stop_result import StopResult, last_result, read_result
from tests.folded import fold

Event = dict[str, Any]


def event(kind: str, t: float = 1.0, **fields: Any) -> Event:
    return {"t": t, "type": kind, **fields}


def job(node: int, nodes: int = 2) -> Event:
    names = [f"n{index}" for index in range(nodes)]
    ranks = [
        {"role": "trainer", "rank": node, "local_rank": 0, "endpoint": f"n{node}:1", "log": f"log/workerlog.{node}"}
    ]
    return event("job", id="J", node=node, nodes=names, places=[["trainer", 0, 0, 1, nodes]], processes=ranks)


def started(rank: int, t: float = 2.0, attempt: int = 0) -> Event:
    return event(
        "started", t, role="trainer", rank=rank, pid=100 + rank, start=7, attempt=attempt, log=f"log/{attempt}"
    )


def exited(rank: int, t: float = 3.0, attempt: int = 0, code: int = 0, stopped: bool = False) -> Event:
    return event("exited", t, role="trainer", rank=rank, code=code, signal=0, stopped=stopped, attempt=attempt, cpu=2.0)


def outcome(kind: str, state: JobState, t: float = 9.0) -> Event:
    return event(kind, t, state=state.value, code=CODES[state], source="tool", reason="why")


CODES = {JobState.SUCCEEDED: 0, JobState.FAILED: 3, JobState.LOST: 75, JobState.STOPPED: 143, JobState.TIMEOUT: 124}
SUPERVISOR = event("supervisor", pid=50, start=1, boot="b")
CLEAN = event("clean", 8.0, survivors=[])
RUNS = [job(0), SUPERVISOR, started(0)], [job(1), SUPERVISOR, started(1)]
GONE = event("supervisor-lost", 5.0, why="it died")


def ends(state: JobState) -> tuple[list[Event], list[Event]]:
    coordinator = [*RUNS[0], CLEAN, outcome("verdict", state), outcome("ended", state)]
    return coordinator, [*RUNS[1], CLEAN, outcome("ended", state)]


NONE = StartReason.NONE
HISTORIES: dict[str, tuple[JobState, StartReason, list[Event], list[Event]]] = {
    "placed on both nodes": (JobState.STARTING, StartReason.PLACED, [job(0)], [job(1)]),
    "one supervisor has started": (JobState.STARTING, StartReason.JOINING, [job(0), SUPERVISOR], [job(1)]),
    "both supervisors have": (JobState.STARTING, StartReason.JOINING, [job(0), SUPERVISOR], [job(1), SUPERVISOR]),
    "one rank has started": (JobState.RUNNING, NONE, RUNS[0], [job(1), SUPERVISOR]),
    "all ranks have": (JobState.RUNNING, NONE, *RUNS),
    "a rank has failed, and the others are not stopped yet": (
        JobState.RUNNING,
        NONE,
        RUNS[0],
        [*RUNS[1], exited(1, code=3)],
    ),
    "it starts again": (
        JobState.RUNNING,
        NONE,
        [*RUNS[0], exited(0, stopped=True), CLEAN, event("restart", 4.0, attempt=1, pause=1.0)],
        [*RUNS[1], exited(1, code=3), CLEAN],
    ),
    **{f"it ended: {state.value}": (state, NONE, *ends(state)) for state in sorted(OUTCOMES)},
    "the coordinator has ended, and the other node not yet": (
        JobState.RUNNING,
        NONE,
        ends(JobState.FAILED)[0],
        RUNS[1],
    ),
    "the coordinator gave the other node up, which was stopped then": (
        JobState.LOST,
        NONE,
        [*ends(JobState.LOST)[0]],
        [*RUNS[1], CLEAN, outcome("ended", JobState.STOPPED)],
    ),
    "the coordinator's node is gone, and the other one knows why the job ended": (
        JobState.FAILED,
        NONE,
        [*RUNS[0], GONE],
        [*RUNS[1], CLEAN, outcome("ended", JobState.FAILED)],
    ),
    "all supervisors are gone": (JobState.LOST, NONE, [*RUNS[0], GONE], [*RUNS[1], GONE]),
    "a supervisor is gone, and the other one was never started": (JobState.LOST, NONE, [*RUNS[0], GONE], [job(1)]),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_state_of_a_job(name: str) -> None:
    state, start, *nodes = HISTORIES[name]
    for order in ((0, 1), (1, 0)):
        found = fold((node, one) for node in order for one in nodes[node])
        assert (found.state, found.part.start) == (state, start)
        if found.outcome is not None and state is not JobState.RUNNING:
            assert found.outcome.state is state


@pytest.mark.parametrize("name", HISTORIES)
def test_the_summaries_of_the_nodes_give_the_same_state(name: str) -> None:
    """`inv jobs` has only these: each node's fold of its own events, and whether its supervisor lives."""
    state, start, *nodes = HISTORIES[name]
    parts = []
    for node, events in enumerate(nodes):
        own = record_of(events)
        part = own.part_of(node, bool(own.caretakers) and not own.supervisor_lost)
        names = ("node", "state", "code", "reason", "start", "final")
        summary = {key: getattr(part, key) for key in names}
        assert read_part({**summary, "state": part.state.value, "start": part.start.value}) == part._replace(ended=0.0)
        parts.append(part)
    for order in itertools.permutations(parts):
        assert decide(order)[1] is state
        assert decide(order).start is start


def test_a_job_without_records_is_queued() -> None:
    assert (JobStatus().state, decide([]).state) == (JobState.QUEUED, JobState.QUEUED)


@pytest.mark.parametrize(
    "supervised, unknown, job_state, node_state, rank_state",
    [
        (True, "", JobState.RUNNING, NodeState.RUNNING, RankState.RUNNING),
        (False, "", JobState.LOST, NodeState.LOST, RankState.LOST),
        (False, "its records are damaged", JobState.UNKNOWN, NodeState.UNKNOWN, RankState.UNKNOWN),
    ],
)
def test_what_a_node_says_of_its_supervisor(
    supervised: bool, unknown: str, job_state: JobState, node_state: NodeState, rank_state: RankState
) -> None:
    found = fold((0, one) for one in [job(0, nodes=1), SUPERVISOR, started(0)])
    found.probed(found.nodes[0], supervised, unknown, None, 7.0)
    found.settle([0])
    assert (found.state, found.nodes[0].state, found.of("trainer")[0].state) == (job_state, node_state, rank_state)
    assert found.part.reason == unknown
    causes = {NodeState.RUNNING: NodeCause.NONE, NodeState.LOST: NodeCause.SUPERVISOR_GONE}
    assert found.nodes[0].trouble == NodeTrouble(causes.get(node_state, NodeCause.UNKNOWN), unknown)


def test_a_node_that_the_coordinator_gave_up_and_that_runs_on_decides() -> None:
    found = fold([(0, one) for one in ends(JobState.LOST)[0]] + [(1, one) for one in RUNS[1]])
    found.lose(1, 5.0, NodeTrouble(NodeCause.GIVEN_UP, "no heartbeat"))
    assert found.state is JobState.LOST
    found.probed(found.nodes[1], True, "", 0.1, 9.0)
    assert found.state is JobState.RUNNING


@pytest.mark.parametrize(
    "part, may_run",
    [
        (NodePart(0, JobState.RUNNING), True),
        (NodePart(0, JobState.STARTING, start=StartReason.JOINING), True),
        (NodePart(0, JobState.STARTING, start=StartReason.PLACED), False),
        (NodePart(0, JobState.UNKNOWN), True),
        (NodePart(0, JobState.LOST), False),
        (NodePart(0, JobState.FAILED, 3), False),
    ],
)
def test_which_jobs_a_stop_without_a_name_is_about(part: NodePart, may_run: bool) -> None:
    assert part.may_run is may_run


# -- attempts -----------------------------------------------------------------------------------------------------------


def test_ranks_and_times_belong_to_an_attempt() -> None:
    one = [*RUNS[0], exited(0, 3.0, stopped=True), event("restart", 4.0, attempt=1, pause=1.0), started(0, 6.0, 1)]
    two = [*RUNS[1], exited(1, 2.5, code=3), started(1, 5.0, 1), exited(1, 7.0, 1)]
    found = fold([*((0, e) for e in one), *((1, e) for e in two)])
    assert [(a.number, a.began, a.ended) for a in found.attempts.values()] == [(0, 2.0, 3.0), (1, 5.0, 7.0)]
    first, second = found.attempts[0].ranks, found.attempts[1].ranks
    assert [first["trainer", rank].state for rank in (0, 1)] == [RankState.STOPPED, RankState.FAILED]
    assert [second["trainer", rank].state for rank in (0, 1)] == [RankState.RUNNING, RankState.DONE]
    assert (first["trainer", 1].code, second["trainer", 1].code, first["trainer", 1].log) == (3, 0, "log/0")
    assert found.processes["trainer", 1] is second["trainer", 1]
    assert second["trainer", 1].states == [(5.0, RankState.RUNNING), (7.0, RankState.DONE)]
    assert (second["trainer", 1].cpu, second["trainer", 1].endpoint) == (2.0, "n1:1")


def test_a_phase_belongs_to_the_attempt_that_the_coordinator_has_begun() -> None:
    """Another node's ranks of the next attempt may be known before the coordinator's word of it."""
    found = fold([(0, job(0)), (0, event("phase", name="ending")), (1, job(1)), (1, started(1, 5.0, attempt=1))])
    assert (found.attempt, found.phase, found.attempts[1].phase) == (1, "ending", "")
    found.apply(0, event("restart", attempt=1, pause=0.0))
    found.apply(0, event("phase", name="trainer"))
    assert (found.phase, found.attempts[0].phase) == ("trainer", "ending")


def test_a_hang_is_known_until_a_trainer_prints_or_the_attempt_ends() -> None:
    verdict = event("hang", 20.0, text="all 2 ranks wait in recv", ranks=[])
    found = fold([*((0, one) for one in RUNS[0]), *((1, one) for one in RUNS[1]), (0, verdict)])
    assert found.hang == "all 2 ranks wait in recv"
    found.processes["trainer", 1].output = 21.0
    assert found.hang == ""
    found.processes["trainer", 1].output = 19.0
    found.apply(0, event("restart", 30.0, attempt=1, pause=0.0))
    assert found.hang == ""


def test_a_node_that_does_not_coordinate_reports_no_hang() -> None:
    found = fold([*((0, one) for one in RUNS[0]), *((1, one) for one in RUNS[1])])
    found.apply(1, event("hang", 20.0, text="of node 1", ranks=[]))
    assert found.hang == ""


def test_two_attempts_with_different_members() -> None:
    """Node 1 is lost, and the next attempt has its rank on node 2."""
    plan = {("trainer", 0): 0, ("trainer", 1): 1}
    found = JobStatus(plan=plan)
    for node in range(3):
        found.apply(node, {**job(node, nodes=3), "places": [["trainer", 0, 0, 1, 2]], "processes": []})
    found.apply(0, started(0))
    found.apply(1, started(1))
    found.apply(0, event("lost", 4.0, node=1, why="silent"))
    assert not found.runs(2, ("trainer", 1))
    moved = [["trainer", 0, 0, 1, 1], ["trainer", 1, 2, 1, 1]]
    found.apply(0, event("restart", 5.0, attempt=1, pause=0.0, places=moved))
    assert found.runs(2, ("trainer", 1)) and not found.runs(1, ("trainer", 1))
    assert found.runs(1, ("trainer", 1), attempt=0), "its log of the first attempt is still its own"
    found.apply(2, started(1, 6.0, attempt=1))
    found.apply(1, exited(1, 6.5, attempt=1))
    assert [sorted(found.attempts[number].nodes) for number in (0, 1)] == [[0, 1], [0, 2]]
    before, now = found.attempts[0].ranks["trainer", 1], found.attempts[1].ranks["trainer", 1]
    assert (before.node, before.state, now.node, now.state) == (1, RankState.LOST, 2, RankState.RUNNING)


def test_an_attempt_with_fewer_ranks() -> None:
    found = fold([*((0, one) for one in RUNS[0]), *((1, one) for one in RUNS[1])])
    found.apply(0, event("restart", 5.0, attempt=1, pause=0.0, places=[["trainer", 0, 0, 1, 1]]))
    assert list(found.processes) == [("trainer", 0)]
    assert sorted(found.attempts[0].ranks) == [("trainer", 0), ("trainer", 1)]


# -- a node's own record ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events, clean",
    [
        ([SUPERVISOR], False),
        ([SUPERVISOR, CLEAN], False),  # between two attempts it is no end
        ([SUPERVISOR, CLEAN, outcome("ended", JobState.FAILED)], True),
        ([SUPERVISOR, GONE, CLEAN], True),
        ([SUPERVISOR, GONE, event("clean", survivors=["sh (pid 5)"])], False),
        ([SUPERVISOR, GONE, CLEAN, SUPERVISOR], False),
    ],
)
def test_whether_a_node_has_proven_that_nothing_lives(events: list[Event], clean: bool) -> None:
    assert record_of(events).clean is clean


def test_damaged_events_of_a_node_are_left_out() -> None:
    found = record_of([event("supervisor"), event("guard", pid="x"), event("ended", state="great"), started(0)])
    assert (found.caretakers, found.ended, found.entered, found.damaged) == ({}, None, True, True)
    assert [found.part_of(0, alive).state for alive in (True, False)] == [JobState.RUNNING, JobState.UNKNOWN]


# -- the result of a stop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, result, over",
    [
        (None, StopResult(StopState.NO_ANSWER), False),
        ({"jobs": {}}, StopResult(StopState.NEVER_STARTED), True),
        ({"jobs": {"J": {"state": "clean", "survivors": []}}}, StopResult(StopState.CLEAN), True),
        (
            {"jobs": {"J": {"state": "clean", "survivors": [], "waits": True}}},
            StopResult(StopState.CLEAN, waits=True),
            True,
        ),
        (
            {"jobs": {"J": {"state": "unknown", "survivors": ["sh"], "why": "w"}}},
            StopResult(StopState.SURVIVORS, ("sh",), why="w"),
            False,
        ),
        (
            {"jobs": {"J": {"state": "unknown", "survivors": [], "why": "clean?"}}},
            StopResult(StopState.UNKNOWN, why="clean?"),
            False,
        ),
    ],
)
def test_a_nodes_answer_to_a_stop(answer: Any, result: StopResult, over: bool) -> None:
    assert read_result(answer, "J") == result
    assert result.over is over


def test_the_result_of_a_node_that_has_recorded_its_end() -> None:
    assert last_result(()).state is StopState.CLEAN
    assert last_result(("sh",)) == StopResult(StopState.SURVIVORS, ("sh",))


def test_a_short_reason_is_in_records_and_not_in_json() -> None:
    made = Outcome(JobState.LOST, 75, "tool", "node n1 is lost: silent", brief="node n1 is lost")
    assert made.as_record()["brief"] == "node n1 is lost"
    assert "brief" not in made.as_dict()
