"""Folding the events of all nodes gives the job's status, whatever the order of the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from clustertool.model.job.node_status import NodeTrouble
from clustertool.model.job.outcome import Outcome, describe_exit, exit_code
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import NodeCause
from clustertool.model.shape import read
from clustertool.show.job_text import trouble_text
from clustertool.show.status_view import rank_note
from tests.folded import fold

Event = dict[str, Any]


def why(found: JobStatus, node: int = 0) -> str:
    return trouble_text(found.nodes[node].trouble)


def header(node: int, roles: Sequence[tuple[str, int]]) -> Event:
    processes = [
        {"role": role, "rank": rank, "local_rank": 0, "endpoint": f"a{node}:1", "log": f"log/{role}.{rank}"}
        for role, rank in roles
    ]
    return {
        "t": 1.0,
        "type": "job",
        "id": "J",
        "node": node,
        "name": f"n{node}",
        "nodes": ["n0", "n1"],
        "created": 1.0,
        "owner": "ann",
        "mode": "collective",
        "command": "python3 train.py",
        "processes": processes,
    }


def record(kind: str, t: float = 0.0, **fields: Any) -> Event:
    return {"t": t, "type": kind, **fields}


def started(rank: int, t: float = 2.0, attempt: int = 0, role: str = "trainer") -> Event:
    return record(
        "started", t, role=role, rank=rank, pid=100 + rank, start=7, attempt=attempt, log=f"log/a{attempt}.{rank}"
    )


def exited(rank: int, code: int = 0, signal: int = 0, stopped: bool = False, t: float = 3.0, **fields: Any) -> Event:
    fields = {"role": "trainer", "rank": rank, "attempt": 0, "note": "", **fields}
    return record("exited", t, code=code, signal=signal, stopped=stopped, **fields)


def outcome(state: str, code: int = 0, reason: str = "r") -> Event:
    return {"state": state, "code": code, "source": "job", "reason": reason, "culprits": [], "victims": [], "node": -1}


SUPERVISOR = record("supervisor", pid=50, start=1, boot="b")


def status_of(*events: Event, node: int = 0) -> JobStatus:
    return fold((node, event) for event in events)


def values(status: Any) -> Any:
    """All that a fold knows, as plain values."""
    if hasattr(status, "__dict__") and not isinstance(status, str):
        return {name: values(value) for name, value in vars(status).items()}
    return {key: values(value) for key, value in status.items()} if isinstance(status, dict) else status


def interleavings(one: Sequence[Event], two: Sequence[Event]) -> Iterator[list[tuple[int, Event]]]:
    """Every order of the events of two nodes that keeps each node's own."""
    if not one or not two:
        yield [*((0, event) for event in one), *((1, event) for event in two)]
        return
    for rest in interleavings(one[1:], two):
        yield [(0, one[0]), *rest]
    for rest in interleavings(one, two[1:]):
        yield [(1, two[0]), *rest]


# -- one job ------------------------------------------------------------------------------------------------------------


def test_the_header_tells_about_the_job_and_its_nodes() -> None:
    found = status_of(header(0, [("trainer", 0)]))
    assert (found.job, found.owner, found.created) == ("J", "ann", 1.0)
    assert (found.mode, found.command) == ("collective", "python3 train.py")
    assert [found.nodes[node].name for node in (0, 1)] == ["n0", "n1"]
    (process,) = found.of("trainer")
    assert (process.state, process.node, process.endpoint, process.log) == ("waiting", 0, "a0:1", "log/trainer.0")
    assert found.state == "starting"


def test_processes_are_found_by_role_in_rank_order() -> None:
    found = status_of(header(0, [("trainer", 2), ("trainer", 0), ("pserver", 0)]))
    assert [process.rank for process in found.of("trainer")] == [0, 2]
    assert [process.rank for process in found.of("pserver")] == [0]


ENDS: list[tuple[Event, str]] = [
    (exited(0), "done"),
    (exited(0, code=1), "failed"),
    (exited(0, signal=9), "failed"),
    (exited(0, code=0, signal=11), "failed"),
    (exited(0, code=143, stopped=True), "stopped"),
    (exited(0, signal=15, stopped=True), "stopped"),
    (exited(0, stopped=True), "stopped"),
]


@pytest.mark.parametrize("end, state", ENDS)
def test_how_a_process_ended(end: Event, state: str) -> None:
    (process,) = status_of(header(0, [("trainer", 0)]), started(0), end).of("trainer")
    assert (process.state, process.code, process.signal, process.since) == (state, end["code"], end["signal"], 3.0)


def test_a_process_through_its_life() -> None:
    found = status_of(header(0, [("pserver", 0)]), SUPERVISOR, started(0, role="pserver"))
    (process,) = found.of("pserver")
    assert (process.state, process.pid, process.since, process.log, process.code) == (
        "running",
        100,
        2.0,
        "log/a0.0",
        None,
    )
    assert (found.state, found.nodes[0].state, found.nodes[0].supervisor) == ("running", "running", 50)
    for kind, state in (("listening", "running"), ("frozen", "frozen"), ("thawed", "running")):
        found.apply(0, record(kind, 4.0, role="pserver", rank=0))
        assert process.state == state
    assert rank_note(process) == "listening"


def test_that_it_listens_does_not_make_a_process_younger() -> None:
    found = status_of(started(0), record("listening", 9.0, role="trainer", rank=0))
    assert found.of("trainer")[0].since == 2.0


def test_a_restart_begins_anew() -> None:
    found = status_of(started(0), exited(0, code=1, stopped=True, note="x"), started(0, t=5.0, attempt=1))
    (process,) = found.of("trainer")
    assert (process.state, process.attempt, process.log, process.since) == ("running", 1, "log/a1.0", 5.0)
    assert (process.code, process.stopped, process.note) == (None, False, "")
    assert found.attempt == 1


def test_a_command_that_cannot_start_has_an_end_and_no_beginning() -> None:
    found = status_of(header(0, [("trainer", 0)]), exited(0, code=127, note="cannot start 'x'", attempt=2))
    (process,) = found.of("trainer")
    assert (process.state, process.code, process.note) == ("failed", 127, "cannot start 'x'")
    assert (process.attempt, process.pid) == (2, 0)
    assert (found.attempt, found.state) == (2, "running")


def test_states_of_a_node() -> None:
    found = status_of(header(0, []), SUPERVISOR)
    for event, state in (
        (record("stopping", why="x"), "stopping"),
        (record("clean", survivors=["sh (pid 5)"]), "stopping"),
        (record("ended", **outcome("failed", 1)), "ended"),
        (record("lost", node=0, why="x"), "ended"),
    ):
        found.apply(0, event)
        assert found.nodes[0].state == state
    assert found.nodes[0].survivors == ["sh (pid 5)"]


def test_the_guard_speaks_for_a_dead_supervisor() -> None:
    found = status_of(
        header(0, [("trainer", 0), ("trainer", 1)]),
        SUPERVISOR,
        started(0),
        started(1),
        exited(1),
        record("supervisor-lost", why="the supervisor died"),
    )
    assert (found.nodes[0].state, why(found)) == ("lost", "supervisor lost: the supervisor died")
    assert [(p.state, rank_note(p)) for p in found.of("trainer")] == [
        ("stopped", "its supervisor was lost"),
        ("done", ""),
    ]


def test_a_job_whose_nodes_all_ended_silently_is_lost() -> None:
    found = status_of(header(0, [("trainer", 0)]), started(0), record("supervisor-lost", why="x"))
    assert found.state == "running"
    found.apply(0, record("lost", node=1, why="x"))
    assert found.state == "lost"


# -- several nodes ------------------------------------------------------------------------------------------------------

VERDICT = record("verdict", **outcome("lost", 75, "node n1 is lost"))
HISTORIES: list[tuple[str, list[Event], list[Event]]] = [
    (
        "succeeded",
        [
            header(0, [("trainer", 0)]),
            SUPERVISOR,
            started(0),
            exited(0),
            record("verdict", **outcome("succeeded")),
            record("ended", **outcome("succeeded")),
        ],
        [header(1, [("trainer", 1)]), SUPERVISOR, started(1), exited(1), record("ended", **outcome("succeeded"))],
    ),
    (
        "lost",  # node 1 was stopped directly after the coordinator had given it up: the coordinator's verdict counts
        [
            header(0, [("trainer", 0)]),
            SUPERVISOR,
            started(0),
            record("lost", node=1, why="silent"),
            VERDICT,
            record("ended", **outcome("lost")),
        ],
        [
            header(1, [("trainer", 1)]),
            SUPERVISOR,
            started(1),
            record("stopping", why="x"),
            exited(1, stopped=True),
            record("ended", **outcome("stopped", 143)),
        ],
    ),
    (
        "lost",  # node 1 crashed: its own events end in the middle
        [header(0, [("trainer", 0)]), SUPERVISOR, started(0), record("lost", node=1, why="silent"), VERDICT],
        [header(1, [("trainer", 1)]), SUPERVISOR, started(1), record("stopping", why="x")],
    ),
    (
        "failed",  # the coordinator's node is gone with its verdict; node 1 knows it, and node 0 thinks it lost
        [header(0, [("trainer", 0)]), SUPERVISOR, record("ended", **outcome("lost", 75))],
        [header(1, [("trainer", 1)]), SUPERVISOR, record("ended", **outcome("failed", 7))],
    ),
    (
        "lost",  # two nodes gave the coordinator up, each in its own words
        [header(0, []), record("ended", **outcome("lost", 75, "zero"))],
        [header(1, []), record("ended", **outcome("lost", 75, "one"))],
    ),
]


@pytest.mark.parametrize("state, one, two", HISTORIES)
def test_the_order_of_nodes_does_not_matter(state: str, one: list[Event], two: list[Event]) -> None:
    first = fold([*((0, event) for event in one), *((1, event) for event in two)])
    assert first.state == state
    for history in interleavings(one, two):
        assert values(fold(history)) == values(first)


def test_a_node_that_the_coordinator_gave_up_is_lost_until_it_says_how_it_ended() -> None:
    _, one, two = HISTORIES[2]
    assert fold([*((0, e) for e in one), *((1, e) for e in two)]).nodes[1].state == "lost"
    _, one, two = HISTORIES[1]
    assert fold([*((0, e) for e in one), *((1, e) for e in two)]).nodes[1].state == "ended"


# -- ranks of lost nodes --------------------------------------------------------------------------------------------------


def placed(node: int) -> Event:
    """The header of one of two nodes with one trainer each. It names the places of both."""
    return {**header(node, [("trainer", node)]), "places": [["trainer", 0, 0, 1, 2]]}


LOST = record("lost", 40.0, node=1, why="no heartbeat for 10 s", ranks=[["trainer", 1, None, 54.0, 28.0]])


def states(found: JobStatus) -> list[str]:
    return [process.state for process in found.of("trainer")]


def test_the_ranks_of_all_nodes_are_known_from_the_records_of_any_node() -> None:
    for node in range(2):
        found = status_of(placed(node), node=node)
        assert [(process.rank, process.node, process.state) for process in found.of("trainer")] == [
            (0, 0, "waiting"),
            (1, 1, "waiting"),
        ]


def test_a_rank_of_a_node_that_was_given_up_is_lost_with_what_the_coordinator_knew_of_it() -> None:
    found = status_of(placed(0), SUPERVISOR, started(0), LOST)
    found.settle([0])
    assert states(found) == ["running", "lost"]
    lost = found.of("trainer")[1]
    assert (lost.since, lost.step, lost.epoch, lost.output) == (40.0, 54.0, None, 28.0)
    assert (found.nodes[1].state, why(found, 1)) == ("lost", "no heartbeat for 10 s")


CRASHED = [placed(1), SUPERVISOR, started(1)]
HEALED = [
    *CRASHED,
    record("stopping", why="x"),
    exited(1, signal=15, stopped=True),
    record("ended", **outcome("lost", 75)),
]
GUARDED = [*CRASHED, record("supervisor-lost", why="it died")]
NEVER_STARTED = [placed(1), SUPERVISOR]


@pytest.mark.parametrize(
    "two, state", [(CRASHED, "lost"), (HEALED, "stopped"), (GUARDED, "stopped"), (NEVER_STARTED, "lost")]
)
def test_the_records_of_the_lost_node_itself_in_any_order(two: list[Event], state: str) -> None:
    one = [placed(0), SUPERVISOR, started(0), LOST]
    first = fold([*((0, event) for event in one), *((1, event) for event in two)])
    assert states(first) == ["running", state]
    for history in interleavings(one, two):
        assert states(fold(history)) == ["running", state]


def test_nothing_is_known_of_the_ranks_of_a_node_that_does_not_answer() -> None:
    found = status_of(placed(0), SUPERVISOR, started(0))
    found.settle([0])
    assert states(found) == ["running", "unknown"]


def test_a_rank_that_never_started_does_not_wait_after_the_end() -> None:
    found = status_of(placed(0), SUPERVISOR, record("ended", **outcome("stopped", 143)))
    found.settle([0])
    assert states(found) == ["not started", "unknown"]


def test_the_ranks_of_the_coordinators_node_are_lost_if_the_others_gave_it_up() -> None:
    lost = {**outcome("lost", 75, "node n0 is lost: it coordinates the job"), "node": 0}
    events = [placed(1), SUPERVISOR, started(1), exited(1, signal=15, stopped=True), record("ended", 50.0, **lost)]
    found = status_of(*events, node=1)
    found.settle([1])
    assert states(found) == ["lost", "stopped"]
    assert (found.nodes[0].state, found.of("trainer")[0].since) == ("lost", 50.0)


def test_what_a_node_reports_of_ranks_of_another_node_is_not_believed() -> None:
    claims = {**header(1, [("trainer", 0)]), "places": [["trainer", 0, 0, 1, 2]]}
    found = fold([(0, placed(0)), (1, claims), (0, LOST | {"ranks": [["trainer", 0, None, 9.0, 1.0]]})])
    assert (found.of("trainer")[0].node, found.of("trainer")[0].endpoint, found.of("trainer")[0].step) == (
        0,
        "a0:1",
        None,
    )


# -- lines --------------------------------------------------------------------------------------------------------------


def test_an_outcome_survives_json() -> None:
    there = Outcome("failed", 7, "job", "why", (("trainer", 2), ("trainer", 3)), (("pserver", 0),), 1)
    assert read(Outcome, json.loads(json.dumps(there.as_dict()))) == there


def test_events_of_a_later_version_are_no_trouble() -> None:
    found = status_of(record("process"), record("process", role="x"), record("anything", node=3), {"type": 5}, {})
    assert found.state == "starting"
    assert not found.processes


@pytest.mark.parametrize(
    "code, signal, note, text, shell",
    [
        (0, 0, "", "exit code 0", 0),
        (7, 0, "", "exit code 7", 7),
        (0, 9, "", "signal 9 (killed)", 137),
        (0, 15, "", "signal 15 (terminated)", 143),
        (0, 64, "", "signal 64 (unknown)", 192),
        (127, 0, "cannot start 'x'", "exit code 127: cannot start 'x'", 127),
    ],
)
def test_an_end_as_text_and_as_a_shell_counts_it(code: int, signal: int, note: str, text: str, shell: int) -> None:
    assert describe_exit(code, signal, note) == text
    assert exit_code(code, signal) == shell


def test_times_are_shown_in_the_clock_of_the_laptop() -> None:
    """A node whose clock was an hour ahead, and one whose clock was right; attempts and ends as well."""
    wrong = [{**header(1, [("trainer", 1)]), "skew": 3600.0}, started(1, t=3602.0), exited(1, 3, t=3610.0)]
    right = [header(0, [("trainer", 0)]), started(0, t=2.0)]
    for events in interleavings(right, wrong[:2]):
        status = fold(events)
        assert [process.since for process in status.of("trainer")] == [2.0, 2.0]
        assert [status.nodes[node].skew for node in (0, 1)] == [0.0, 3600.0]
    assert fold((1, event) for event in wrong).of("trainer")[0].since == 10.0


def test_a_disk_is_full_until_it_has_room() -> None:
    events = [header(0, [("trainer", 0)]), SUPERVISOR, record("disk", full=True, root="/jobs")]
    assert why(status_of(*events)) == "the disk of /jobs is full"
    assert why(status_of(*events, record("disk", full=False, root="/jobs"))) == ""


@pytest.mark.parametrize("cause", NodeCause)
def test_each_cause_has_a_sentence(cause: NodeCause) -> None:
    text = trouble_text(NodeTrouble(cause, "{detail}", 30.0))
    assert bool(text) is (cause is not NodeCause.NONE)
    assert cause is not NodeCause.NEVER_CONNECTED or text == "no connection to the coordinator within 30 s"


def test_a_pserver_that_listens_at_another_address_and_then_where_it_should() -> None:
    server = {"role": "pserver", "rank": 0}
    events = [header(0, [("pserver", 0)]), started(0, role="pserver")]

    def note(*more: Event) -> str:
        return rank_note(status_of(*events, *more).processes["pserver", 0])

    events.append(record("elsewhere", **server, listens="127.0.1.1 port 80", endpoint="a0:1"))
    assert note() == "listens on 127.0.1.1 port 80, not on a0:1"
    assert note(record("listening", **server)) == "listening"
