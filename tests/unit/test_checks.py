"""Checks: all findings of all nodes at once, each with the node, what is wrong and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import cluster_of, facts_of, hosts

from clustertool.plan.checks import COLUMNS, Finding, check, errors, unreachable
from clustertool.plan.facts import Facts

NOW = 1000.0
GOOD: dict[str, Any] = {"user": "ann", "python": "3.9.2", "disk_free": 10**12, "time": NOW}


def found(
    keys: dict[str, Any] | None = None, need: int = 0, pings: dict[int, float | None] | None = None, **each: Any
) -> dict[str, Finding]:
    """Column -> finding of one node."""
    cluster = cluster_of(hosts(1), **(keys or {}))
    findings = check(cluster, facts_of(cluster, **{**GOOD, **each}), pings or {}, NOW, need)
    assert len({finding.column for finding in findings}) == len(findings)
    assert all(finding.fix for finding in findings if finding.level in ("warn", "error"))
    return {finding.column: finding for finding in findings}


def test_a_good_node_is_ok_in_every_column() -> None:
    columns = found(pings={0: 0.001})
    assert {finding.level for finding in columns.values()} == {"ok"}
    assert set(columns) == set(COLUMNS) - {"workspace"}
    assert (columns["ssh"].text, columns["python"].text, columns["nic"].text) == ("ann", "3.9.2", "eth0")


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"rsync": False}, "rsync", "error", "no rsync"),
    ({"disk_free": 0}, "disk", "error", "needed below /jobs"),
    ({"disk_free": 100 << 20}, "disk", "warn", "105 MB free"),
    ({"time": NOW + 60}, "clock", "warn", "+60 s"),
    ({"time": NOW - 6}, "clock", "warn", "-6 s"),
    ({"problems": (("root", "error", "ROOT_DIR /jobs is not writable", "choose another"),)}, "root", "error", "not writable"),
    ({"problems": (("nic", "error", "there is no interface eth9", "this node has lo"),)}, "nic", "error", "eth9"),
    ({"problems": (("workspace", "error", "/x is not there", "copy it"),)}, "workspace", "error", "not there"),
]


@pytest.mark.parametrize("facts, column, level, text", WRONG)
def test_what_is_wrong(facts: dict[str, Any], column: str, level: str, text: str) -> None:
    columns = found(**facts)
    assert (columns[column].level, text in columns[column].text) == (level, True)
    assert {finding.level for name, finding in columns.items() if name != column} == {"ok"}


def test_a_small_difference_of_clocks_is_right() -> None:
    assert found(time=NOW + 4.9)["clock"].level == "ok"


def test_the_disk_must_hold_what_is_sent() -> None:
    assert found(disk_free=1 << 30, need=2 << 30)["disk"].level == "error"
    assert found(disk_free=(2 << 30) + 1, need=2 << 30)["disk"].level == "warn"
    assert found(disk_free=3 << 30, need=2 << 30)["disk"].level == "ok"


def test_ports_that_conf_demands_are_looked_at() -> None:
    who: dict[str, Any] = {"busy": frozenset([7165, 6160]), "listeners": ((7165, "nginx (pid 1)"),)}
    assert found(**who)["ports"].level == "ok"  # the default port would only be avoided
    assert found({"PADDLE_PORT": 7164, "PADDLE_PORTS_NUM_FOR_SPARSE": 0}, **who)["ports"].level == "ok"
    finding = found({"PADDLE_PORT": 7164, "LEAD_PORT": 6160, "START_PORT": 6170}, **who)["ports"]
    assert finding.level == "error"
    assert finding.text == "7165 (PADDLE_PORT) is held by nginx (pid 1); 6160 (LEAD_PORT) is held by another process"
    assert found({"START_PORT": 6160}, **who)["ports"].level == "error"


def test_the_leads_port_matters_on_the_first_node_only() -> None:
    cluster = cluster_of(hosts(2), LEAD_PORT=6160)
    facts = facts_of(cluster, **GOOD)
    facts[1] = replace(facts[1], busy=frozenset([6160]))
    assert not errors(check(cluster, facts, {}, NOW))


def test_a_ping_decides_nothing_for_a_node_that_answered() -> None:
    assert found(pings={0: None})["ping"].level == "warn"
    assert "ping" not in found()


def test_a_node_that_did_not_answer_at_all() -> None:
    silent = unreachable(3, {3: None}, "no route", "look")
    assert [(f.node, f.column, f.level) for f in silent] == [(3, "ssh", "error"), (3, "ping", "error")]
    up = unreachable(3, {3: 0.01}, "refused", "start sshd")
    assert [(f.column, f.level) for f in up] == [("ssh", "error"), ("ping", "ok")]
    assert [f.column for f in unreachable(3, {}, "refused", "start sshd")] == ["ssh"]


def test_checks_that_are_off_are_not_there() -> None:
    columns = found({"CHECKS_OFF": ["clock", "disk", "ping"]}, pings={0: None}, time=0.0, disk_free=0)
    assert not {"clock", "disk", "ping"} & set(columns)


def test_all_nodes_are_told_at_once_in_their_order() -> None:
    cluster = cluster_of(hosts(3))
    facts: dict[int, Facts] = facts_of(cluster, **{**GOOD, "rsync": False})
    assert [finding.node for finding in errors(check(cluster, dict(reversed(facts.items())), {}, NOW))] == [0, 1, 2]
