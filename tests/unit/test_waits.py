"""What a job waits for, and when it is reported again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_events import SUPERVISOR, header, record, started

from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import some
from clustertool.model.job.state import JobStatus
from clustertool.show.job_text import blocked_text, firewall_text, news_text, resume_text, wait_text
from clustertool.verbs.follow_session import error_of
from clustertool.watch.job_view import JobView
from clustertool.watch.waits import (
    ConnectWait,
    Firewall,
    ListenWait,
    Wait,
    count_due_reports,
    find_blocked,
    find_firewall,
    find_waits,
)
from tests.folded import fold

T = 1000.0
CONNECT = ConnectWait(["n1"], "n0", "10.0.0.1:9", "timed out", "ETIMEDOUT", False)
LISTEN = ListenWait([(0, "n0", "10.0.0.1:9")], 0.0)
END = {"state": "lost", "code": 75, "source": "tool", "reason": "R", "culprits": [], "victims": [], "node": -1}


def away(since: float = T, errno: str = "ETIMEDOUT", **fields: Any) -> dict[str, Any]:
    event = {"endpoint": "10.0.0.1:9", "errno": errno, "why": "timed out", "since": since, "again": False}
    return record("unconnected", **{**event, **fields})


def cluster(nodes: int, *events: tuple[int, dict[str, Any]]) -> JobStatus:
    names = {"nodes": [f"n{node}" for node in range(nodes)]}
    first = [(node, {**header(node, [("pserver", node)]), **names}) for node in range(nodes)]
    return fold([*first, *((node, SUPERVISOR) for node in range(nodes)), *events])


PSERVERS = [
    (0, record("phase", name="pserver")),
    *((node, started(node, T + node, role="pserver")) for node in range(2)),
]


def test_a_pserver_that_does_not_listen_is_reported_with_its_address() -> None:
    status = cluster(2, *PSERVERS)
    assert find_waits(status, T + 9) == []
    (wait,) = find_waits(status, T + 12)
    assert "pserver 0 on n0 at a0:1 and pserver 1 on n1 at a1:1; 12 s so far" in wait_text(wait)
    assert '[pserver] ready = "started"' in wait_text(wait)
    status.apply(0, record("listening", role="pserver", rank=0))
    (wait,) = find_waits(status, T + 12)
    assert "pserver 0" not in wait_text(wait) and "pserver 1 on n1" in wait_text(wait)


@pytest.mark.parametrize("over", [record("phase", name="trainer"), record("verdict", **END)])
def test_nothing_waits_after_that(over: dict[str, Any]) -> None:
    assert find_waits(cluster(2, *PSERVERS, (0, over)), T + 100) == []


def test_nodes_with_the_same_cause_are_one_sentence() -> None:
    status = cluster(4, (1, away()), (2, away(T + 1)), (3, away(errno="ECONNREFUSED", why="refused")))
    assert [wait_text(wait) for wait in find_waits(status, T + 5)] == [
        "n1 and n2 cannot connect to the coordinator on n0 (10.0.0.1:9): timed out (ETIMEDOUT); tried for 5 s",
        "n3 cannot connect to the coordinator on n0 (10.0.0.1:9): refused (ECONNREFUSED); tried for 5 s",
    ]
    status.apply(3, record("connected"))
    assert len(find_waits(status, T + 5)) == 1


def test_the_node_that_none_can_reach_is_the_suspect() -> None:
    def advice(status: JobStatus) -> str:
        return firewall_text(find_firewall(status))

    assert advice(cluster(4)) == ""
    assert advice(cluster(4, *((node, away()) for node in (1, 2, 3)))).startswith("a firewall on n0 may block incoming")
    assert advice(cluster(4, (2, away()))).startswith("a firewall on n0 or n2 may block the connections between them;")
    assert advice(cluster(2, (1, away(again=True)))) == "", "it had a connection: no firewall blocks it"


@pytest.mark.parametrize(("state", "code"), [("lost", 75), ("timeout", 124)])
def test_the_verdict_names_the_blocked_direction(state: str, code: int) -> None:
    status = cluster(3, (1, away()), (2, away()), (0, record("verdict", **{**END, "state": state})))
    error = error_of(status)
    assert error is not None and error.code == code
    assert error.what == "R; n1 and n2 cannot connect to the coordinator on n0 (10.0.0.1:9): timed out (ETIMEDOUT)"
    assert error.fix == (
        "a firewall on n0 may block incoming connections, or 10.0.0.1 is not its address (any more), or one of NAT; "
        f"run `{PROGRAM} check`, which names addresses and interfaces"
    )


def test_a_dead_coordinator_is_no_firewall() -> None:
    dead = (0, record("supervisor-lost", why="the supervisor died"))
    error = error_of(cluster(2, dead, (1, away(errno="ECONNREFUSED")), (1, record("ended", **END))))
    assert error is not None and error.what.startswith("n0: supervisor lost: the supervisor died; R; n1 cannot connect")
    assert "firewall" not in error.fix


@pytest.mark.parametrize(
    ("wait", "counts"),
    [
        (CONNECT, {3: 0, 4: 1, 9: 1, 10: 2, 20: 3, 65: 7}),
        (LISTEN, {9: 0, 10: 1, 29: 1, 30: 2, 60: 3, 119: 3, 120: 4, 180: 5}),
    ],
)
def test_when_a_report_is_due(wait: Wait, counts: dict[int, int]) -> None:
    assert {seconds: count_due_reports(replace(wait, seconds=seconds)) for seconds in counts} == counts


def test_each_report_comes_once_and_again_for_the_next_wait() -> None:
    watch = JobView(frozenset({0, 1}), cluster(2, *PSERVERS))
    times = [seconds for seconds in range(200) if watch.remind(T + seconds)]
    assert times == [10, 30, 60, 120, 180]
    item = watch.remind(T + 500)[0]
    assert isinstance(item, ListenWait) and news_text(item).startswith(
        "the trainers wait until a port is open: pserver 0"
    )
    watch.status.apply(0, record("phase", name="trainer"))
    assert watch.remind(T + 501) == []
    watch.status.apply(0, record("phase", name="pserver"))
    assert watch.remind(T + 502), "another attempt waits again"


@pytest.mark.parametrize("since", [float("nan"), float("inf"), -float("inf"), -1e300])
def test_a_time_that_is_none_breaks_nothing(since: float) -> None:
    status = cluster(2, (1, away(since)))
    assert len(find_waits(status, T)) == 1
    assert count_due_reports(find_waits(status, T)[0]) >= 0


def test_long_lists_are_shortened() -> None:
    names = [f"n{node}" for node in range(1, 7)]
    assert [some(names[:number]) for number in range(1, 4)] == ["n1", "n1 and n2", "n1, n2 and n3"]
    assert some(names) == "n1, n2, n3, n4 and 2 more"
    (wait,) = find_blocked(cluster(7, *((node, away()) for node in range(1, 7))))
    assert blocked_text(wait).startswith("n1, n2, n3, n4 and 2 more cannot")


def test_the_coordinator_of_a_later_epoch_is_named() -> None:
    def led_by_n1(*events: tuple[int, dict[str, Any]]) -> JobStatus:
        first = [(node, header(node, [("trainer", node)])) for node in range(3)]
        names = {"nodes": ["n0", "n1", "n2"], "lead": 1, "epoch": 2}
        later = [(node, {**header(node, [("trainer", node)]), **names}) for node in (1, 2)]
        return fold([*first, *later, *((node, SUPERVISOR) for node in (1, 2)), *events])

    (wait,) = find_waits(led_by_n1((2, away())), T + 5)
    assert wait_text(wait).startswith("n2 cannot connect to the coordinator on n1 ")
    assert find_firewall(led_by_n1((2, away()))) == Firewall(["n1", "n2"], False, "10.0.0.1")
    dead = led_by_n1((2, away()), (1, record("supervisor-lost", why="the supervisor died")))
    assert find_firewall(dead) is None, "its coordinator is gone, which is no firewall"
    ended = (2, record("ended", **{**END, "node": 1}))
    assert JobView(frozenset({1, 2}), led_by_n1(ended)).without_coordinator
    assert not JobView(frozenset({1, 2}), led_by_n1((1, record("ended", **{**END, "node": 1})))).without_coordinator


def test_an_elastic_job_that_has_lost_its_coordinator_is_started_again_without_it() -> None:
    def elastic(*events: tuple[int, dict[str, Any]]) -> JobStatus:
        names = {"nodes": ["n0", "n1", "n2"], "lead": 1, "epoch": 2}
        first = [(node, {**header(node, [("trainer", node)]), **names}) for node in range(3)]
        return fold([*first, *((node, SUPERVISOR) for node in range(3)), *events])

    ends = [(node, record("ended", **END)) for node in (0, 2)]
    gone = elastic(*ends)
    assert resume_text(gone) == "", "the coordinator may answer"
    gone.settle([0, 2])
    assert f"{PROGRAM} run --resume {gone.job} --skip n1" in resume_text(gone)
    error = error_of(gone)
    assert error is not None and error.code == 75 and "--skip n1" in error.fix
    below = elastic(*ends, (1, record("verdict", **END)), (1, record("ended", **END)))
    assert resume_text(below) == "", "it has ended the job itself: there were too few nodes"
    other = cluster(3, *ends)
    other.settle([0, 2])
    assert resume_text(other) == ""
