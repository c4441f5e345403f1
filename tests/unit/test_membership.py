"""The membership of an elastic job, as the records of one node have it."""

from __future__ import annotations

from typing import Any

from clustertool.model.elastic.membership import Membership


def header(epoch: int, places: list[list[object]]) -> dict[str, Any]:
    limits = {"minimum": 2, "maximum": 3, "coordinator": 0}
    return {"type": "job", "epoch": epoch, "nodes": ["a", "b", "", "d"], "places": places, **limits}


def change(attempt: int, nodes: list[int], **more: Any) -> dict[str, Any]:
    given = {"left": [], "joined": nodes, "cause": "", "seconds": 0.0, **more}
    return {"type": "epoch", "t": 7.0, "attempt": attempt, "nodes": nodes, **given}


def folded(*events: dict[str, Any]) -> dict[str, Any]:
    found = Membership()
    for event in events:
        found.apply(event)
    sample = found.sample()
    assert sample is not None
    return dict(sample)


FIRST = header(0, [["trainer", 0, 0, 2, 2]]), change(0, [0, 1])
WAITS = {"type": "standby", "name": "d", "address": "10.0.0.4"}


def test_a_node_that_does_not_coordinate_knows_the_number_of_the_epoch_and_the_limits() -> None:
    found = folded(FIRST[0])
    assert (found["epoch"], found["minimum"], found["maximum"]) == (0, 2, 3)
    assert not found["coordinates"] and not found["nodes"] and not found["began"]


def test_nodes_that_are_lost_do_not_take_part() -> None:
    assert folded(*FIRST, {"type": "lost", "node": 1})["nodes"] == ["a"]


def test_machines_on_standby_come_and_go_and_are_counted_once() -> None:
    assert folded(*FIRST, WAITS, WAITS)["standby"] == ["d"]
    assert folded(*FIRST, WAITS, {**WAITS, "type": "standby-left"})["standby"] == []


def test_the_newest_epoch_counts() -> None:
    later = change(3, [0, 2], left=[[1, "lost"]], joined=[2], cause="node b is lost")
    found = folded(*FIRST, WAITS, {"type": "lost", "node": 1}, header(3, []), later)
    assert (found["epoch"], found["nodes"], found["standby"]) == (3, ["a", "node 2"], [])
    assert (found["left"], found["joined"], found["cause"]) == ([("b", "lost")], ["node 2"], "node b is lost")


def test_names_of_earlier_epochs_are_known() -> None:
    later = {**header(1, []), "nodes": ["a"]}
    assert folded(*FIRST, later, change(1, [0], left=[[1, "lost"]]))["left"] == [("b", "lost")]


def test_the_first_epoch_is_no_change() -> None:
    assert folded(*FIRST)["joined"] == []


def test_another_job_has_none() -> None:
    found = Membership()
    found.apply({"type": "job", "nodes": ["a"]})
    assert found.sample() is None and not found.elastic
