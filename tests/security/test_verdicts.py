"""A hostile node that reports the end of a job, or the loss of another node: only the coordinator's node can know these."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.actions import read_status
from clustertool.actions.find_jobs import merge_answers
from clustertool.model.job.node_status import NodeTrouble
from clustertool.model.job.state import JobStatus
from clustertool.watch.job_view import JobView
from tests.folded import fold

Event = dict[str, Any]
HONEST: list[Event] = [
    {"type": "job", "id": "j", "nodes": ["honest", "evil"], "places": [["trainer", 0, 0, 1, 2]]},
    {"type": "supervisor", "pid": 7},
    {"type": "started", "role": "trainer", "rank": 0, "pid": 8},
]
LOST = {"type": "lost", "node": 0, "why": "a lie"}
ABSENT = {"type": "absent", "nodes": [0], "endpoint": "", "seconds": 1.0}


def decided(kind: str, state: str = "succeeded", code: int = 0) -> Event:
    return {"type": kind, "state": state, "code": code, "source": "job", "reason": "r"}


def at(events: list[Event]) -> list[Event]:
    return [{"t": 1.0, **event} for event in events]


LIES = [
    LOST,
    ABSENT,
    {"type": "phase", "name": "ending"},
    {"type": "restart", "attempt": 9, "pause": 0},
    decided("verdict"),
    decided("ended"),
]


@pytest.mark.parametrize("first", [0, 1])
def test_a_job_goes_on_whatever_a_node_without_the_coordinator_reports(first: int) -> None:
    sent = {0: at(HONEST), 1: at([HONEST[0], *LIES])}
    found = fold((node, event) for node in (first, 1 - first) for event in sent[node])
    assert (found.state, found.outcome, found.phase, found.attempt) == ("running", None, "", 0)
    assert (found.nodes[0].state, found.processes["trainer", 0].state) == ("running", "running")


def test_a_followed_job_goes_on() -> None:
    watch = JobView(frozenset({0, 1}), JobStatus(plan={("trainer", 0): 0, ("trainer", 1): 1}))
    watch.take(0, {"type": "events", "events": at(HONEST), "at": 1}, b"", 0.0)
    assert watch.take(1, {"type": "events", "events": at(LIES), "at": 1}, b"", 0.0) == []
    watch.take(1, {"type": "end"}, b"", 0.0)
    assert watch.status.outcome is None
    assert watch.status.nodes[0].state == "running"
    assert not watch.over


@pytest.mark.parametrize("type", ["other_address", "supervisor_lost", "of", "begin"])
def test_the_name_of_a_handler_is_no_type_of_an_event(type: str) -> None:
    """The fields of an event of an unknown type are not checked, and any node may send it."""
    lie = {"type": type, "role": "trainer", "rank": 0, "listens": "a lie", "why": "a lie"}
    found = fold([(0, event) for event in at(HONEST)] + [(1, event) for event in at([HONEST[0], lie, {"type": type}])])
    assert not found.processes["trainer", 0].listens
    assert found.nodes[1].trouble == NodeTrouble()


def test_status_shows_a_running_job() -> None:
    def answer(events: list[Event]) -> dict[str, Any]:
        return {"events": at(events), "heartbeat": 0.1, "supervised": True, "output": [], "metrics": [], "usage": {}}

    answers = {0: answer(HONEST), 1: answer([HONEST[0], *LIES])}
    assert read_status.as_dict(answers)["state"] == "running"
    del answers[0]
    assert read_status.as_dict(answers)["state"] == "succeeded"  # a node is missing, so the exit code is 69


def test_an_end_of_another_node_never_outranks_that_of_the_coordinator() -> None:
    for own in ("verdict", "ended"):
        for events in (
            [(0, own, "failed"), (1, "ended", "succeeded")],
            [(1, "ended", "succeeded"), (0, own, "failed")],
        ):
            found = fold((node, {"t": 1.0, **decided(kind, state, 3)}) for node, kind, state in events)
            assert found.outcome is not None
            assert found.outcome.state == "failed"


def test_where_the_coordinator_is_gone_a_node_that_knows_of_a_failure_counts_more() -> None:
    watch = JobView(frozenset({0, 1, 2}))
    for node, state in ((1, "succeeded"), (2, "failed")):
        watch.take(node, {"type": "events", "events": at([decided("ended", state)]), "at": 1}, b"", 0.0)
    assert watch.status.outcome is None
    watch.take(0, {"type": "closed", "why": "the connection broke"}, b"", 0.0)
    assert watch.status.outcome is not None
    assert watch.status.outcome.state == "failed"


def test_jobs_shows_how_the_job_ended_on_the_coordinators_node() -> None:
    about = {
        "id": "j",
        "owner": "",
        "created": 1.0,
        "mode": "",
        "command": "",
        "nodes": ["honest", "evil"],
        "reason": "",
    }
    honest, evil = (
        {**about, "node": node, "state": state, "code": 0} for node, state in ((0, "failed"), (1, "succeeded"))
    )
    assert merge_answers({0: {"jobs": [evil]}, 1: {"jobs": [honest]}})[0]["state"] == "failed"
    assert merge_answers({0: {"jobs": [{**evil, "node": 0}]}, 1: {"jobs": [honest]}})[0]["state"] == "failed"
