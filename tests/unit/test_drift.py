"""Drift: the odd ones among many nodes are reported, with what the others have; where all are alike nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import cluster_of, facts_of, hosts

from clustertool.model.checks.across_nodes import SKEW, drift, skew
from clustertool.model.facts import Facts
from clustertool.model.finding import Finding

NOW = 1000.0


def odd(
    each: dict[int, dict[str, Any]], nodes: int = 4, machines: list[int] | None = None, **all_: Any
) -> list[Finding]:
    """What is not ok; `each`: what is special about a node."""
    facts = facts_of(cluster_of(hosts(nodes)), machines or [], **{"time": NOW, **all_})
    facts = {node: replace(fact, **each.get(node, {})) for node, fact in facts.items()}
    found = drift(facts, dict.fromkeys(facts, (NOW, NOW)))
    assert all(finding.fix for finding in found if finding.level != "ok")
    return [finding for finding in found if finding.level != "ok"]


def reported(findings: list[Finding]) -> list[tuple[int, str, str, str]]:
    return [(f.node, f.column, f.level, f.text) for f in findings]


def test_nodes_that_are_alike() -> None:
    assert not odd({}, mtu=1500, packages=(("torch", "2.1"),), own="10.0.0.1", examined=True)


# -- clocks


def test_the_clock_that_is_off() -> None:
    assert reported(odd({2: {"time": NOW + 90}})) == [(2, "clock", "warn", "+90 s")]
    assert reported(odd({2: {"time": NOW - 90}})) == [(2, "clock", "warn", "-90 s")]


def test_where_all_nodes_agree_the_laptops_clock_is_wrong() -> None:
    found = odd({}, time=NOW + 3600)
    assert {finding.text for finding in found} == {"+3600 s from this machine's"}
    assert {finding.node for finding in found} == {0, 1, 2, 3}
    assert "machine you type on" in found[0].fix


def test_of_two_nodes_the_one_that_agrees_with_the_laptop_is_right() -> None:
    assert reported(odd({1: {"time": NOW + 90}}, nodes=2)) == [(1, "clock", "warn", "+90 s")]
    assert reported(odd({0: {"time": NOW + 90}, 1: {"time": NOW + 90}}, nodes=3)) != []
    assert reported(odd({0: {"time": NOW - 90}}, nodes=1)) == [(0, "clock", "warn", "-90 s")]


@pytest.mark.parametrize("ahead", [-3600.0, -1.0, 0.0, 0.5, 3600.0])
@pytest.mark.parametrize("to, took, fro", [(0.0, 0.0, 0.0), (0.1, 0.3, 0.1), (2.0, 5.0, 0.0), (0.0, 5.0, 2.0)])
def test_the_way_to_a_node_and_its_work_are_no_skew(ahead: float, to: float, took: float, fro: float) -> None:
    """Whatever the way takes, the true difference is within the doubt that is reported."""
    fact = Facts(0, time=NOW + to + took + ahead, took=took)
    off, doubt = skew(fact, NOW, NOW + to + took + fro)
    assert abs(off - ahead) <= doubt + 1e-9
    assert doubt == pytest.approx((to + fro) / 2)


def test_a_slow_answer_is_no_wrong_clock() -> None:
    facts = {0: Facts(0, time=NOW + 20.0, took=0.1)}
    (clock,) = [f for f in drift(facts, {0: (NOW, NOW + 20.2)}) if f.column == "clock"]
    assert clock.level == "ok"
    assert SKEW < 20.0


# -- names and interfaces


def test_a_machine_that_takes_its_name_for_itself_alone() -> None:
    (found,) = odd({1: {"own": "127.0.1.1"}}, own="10.0.0.9", examined=True)
    assert reported([found]) == [(1, "host", "warn", "box1 is 127.0.1.1")]
    assert "write 10.0.0.2 box1" in found.fix


def test_one_machine_alone_may_call_itself_127() -> None:
    assert not odd({}, machines=[0, 0, 0, 0], own="127.0.1.1")


def test_a_training_address_that_means_every_node() -> None:
    assert reported(odd({0: {"address": "127.0.0.1"}}))[0][:3] == (0, "host", "error")


def test_an_unknown_name() -> None:
    assert reported(odd({3: {"own": ""}}, own="10.0.0.9", examined=True)) == [
        (3, "host", "warn", "box3 is not known there")
    ]
    assert reported(odd({3: {"own": None}}, own="10.0.0.9", examined=True))[0][3] == "its name server does not answer"
    assert not odd({}, own="")  # only /etc/hosts was read


def test_an_mtu_unlike_the_others() -> None:
    (found,) = odd({2: {"mtu": 9000}}, mtu=1500)
    assert reported([found]) == [(2, "mtu", "warn", "9000, others 1500")]
    assert "ip link set eth0 mtu 1500" in found.fix
    assert not odd({2: {"mtu": 0}}, mtu=1500)
    assert not odd({2: {"mtu": 65536, "nic": "lo"}}, mtu=1500)


# -- packages


def test_versions_that_differ() -> None:
    most = (("python", "3.11.2"), ("torch", "2.3.0"), ("paddle", ""))
    found = odd({1: {"packages": (("python", "3.11.2"), ("torch", "2.1.0"), ("paddle", ""))}}, packages=most)
    assert reported(found) == [(1, "packages", "warn", "torch 2.1.0, others 2.3.0")]


def test_a_package_that_a_node_lacks() -> None:
    most = (("torch", "2.3.0"),)
    found = odd({0: {"packages": (("torch", ""),)}}, packages=most)
    assert reported(found) == [(0, "packages", "error", "no torch, others have 2.3.0")]
    assert not odd({}, packages=(("torch", ""),))  # no node has it
    assert not odd({0: {"packages": ()}}, packages=most)  # its python failed, which is reported already


# -- the job's python3


def test_nodes_whose_jobs_have_another_python3() -> None:
    usual = ("/usr/bin/python3", "3.11.4")
    assert not odd({}, job_python=usual)
    assert not odd({1: {"job_python": ("/usr/bin/python3", "3.11.9")}, 2: {"job_python": ("", "")}}, job_python=usual)
    for other in (("/usr/bin/python3", "3.10.1"), ("/opt/conda/bin/python3", "3.11.4")):
        found = reported(odd({2: {"job_python": other}}, job_python=usual))
        assert found == [(2, "python", "warn", f"python3 of jobs is {' '.join(other)}, others /usr/bin/python3 3.11.4")]
