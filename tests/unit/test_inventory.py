"""Cards of all nodes in the preflight: what differs, what is sick, who is on them; each with node, cards and fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import cluster_of, facts_of, hosts, plan_of

from clustertool.model.cards import first_error
from clustertool.model.checks.device_counts import CHECKS, inventory, nodes_to_ask, shared_cards
from clustertool.model.finding import Finding, cells

GB = 10**9
CARD: dict[str, Any] = {
    "model": "NVIDIA H100",
    "memory_total": 80 * GB,
    "memory_free": 79 * GB,
    "temperature": 40,
    "slowdown": 93,
    "throttle": [],
    "ecc_uncorrected": 0,
    "repair": "",
    "compute_mode": "default",
    "persistence": True,
    "problem": "",
    "processes": [],
    "held": None,
}
Each = Mapping[int, Mapping[str, Any]]


def report(count: int = 4, each: Each | None = None, **more: Any) -> dict[str, Any]:
    """A node's answer; `each`: what is special about a card."""
    devices = [{**CARD, "index": index, **(each or {}).get(index, {})} for index in range(count)]
    plain = {
        "kind": "gpu",
        "ids": list(range(count)),
        "driver": "550.54.15",
        "cuda": "12.4",
        "problem": "",
        "devices": devices,
    }
    return {**plain, **more}


def sample(
    *reports: dict[str, Any] | None, keys: dict[str, Any] | None = None, entries: Any = None, twice: Any = None
) -> list[Finding]:
    """Findings of nodes with these answers, None for one without cards."""
    cluster = cluster_of(entries or hosts(len(reports)), **(keys or {}))
    facts = facts_of(cluster)
    found = inventory(cluster, facts, {node: one for node, one in enumerate(reports) if one}, twice or {})
    assert all(finding.fix for finding in found if finding.level in ("warn", "error"))
    return list(found)


def wrong(found: list[Finding]) -> list[tuple[int, str, str, str]]:
    return [(f.node, f.column, f.level, f.text) for f in found if f.level != "ok"]


def test_good_cards_are_ok_in_every_column() -> None:
    found = cells(sample(report(), report()), 1)
    assert {name: (cell.level, cell.text) for name, cell in found.items()} == {
        "devices": ("ok", "4 x NVIDIA H100"),
        "driver": ("ok", "550.54.15 (CUDA 12.4)"),
        "health": ("ok", "ok"),
        "users": ("ok", "none"),
    }
    assert tuple(found) == CHECKS


@pytest.mark.parametrize(("second", "level"), [("b", "error"), ("a", "warn"), ({"host": "b", "devices": [2]}, "")])
def test_two_names_of_one_machine(second: Any, level: str) -> None:
    cluster = cluster_of([{"host": "a", "devices": [0, 1]} if level != "warn" else "a", second])
    facts = facts_of(cluster, (0, 0), devices=(0, 1, 2), device_kind="gpu")
    found = inventory(cluster, facts, {0: report(3), 1: report(3)}, {})
    [cell] = [cells(found, 1)["devices"]]
    assert cell.level == (level or "ok") and cells(found, 0)["devices"].level == "ok"
    assert cell.text.startswith("is the same machine as a") == bool(level)


def test_nodes_without_cards_have_no_cells() -> None:
    assert sample(None, None) == []


# -- what they are


def test_a_node_with_fewer_cards() -> None:
    assert wrong(sample(report(8), report(7), report(8))) == [(1, "devices", "warn", "7 devices, others 8")]
    assert wrong(sample(report(2), report(1))) == [(1, "devices", "warn", "1 devices, others 2")]
    assert wrong(sample(report(8), None, report(8))) == [(1, "devices", "warn", "no devices, others 8")]


def test_what_conf_says_of_a_node_is_meant() -> None:
    few = [{"host": "a"}, {"host": "b", "devices": [0, 1]}, {"host": "c", "roles": {"pserver": 1}}]
    found = sample(report(8), report(4), None, entries=few)
    assert wrong(found) == []
    assert cells(found, 1)["devices"].text == "2 x NVIDIA H100"


def test_another_model_and_another_driver() -> None:
    old = report(4, dict.fromkeys(range(4), {"model": "NVIDIA A100"}), driver="535.1", cuda="12.2")
    found = sample(report(), report(), old)
    assert wrong(found) == [
        (2, "devices", "warn", "NVIDIA A100, others NVIDIA H100"),
        (2, "driver", "warn", "535.1 (CUDA 12.2), others 550.54.15 (CUDA 12.4)"),
    ]
    assert "install driver 550.54.15 (CUDA 12.4) there" in cells(found, 2)["driver"].fix


def test_a_node_that_does_not_tell_is_not_compared() -> None:
    silent = {
        "devices": [{"index": index, "held": None, "processes": []} for index in range(4)],
        "driver": "",
        "cuda": "",
    }
    found = sample(report(), report(**silent, problem="NVML: Driver/library version mismatch"))
    assert wrong(found) == [(1, "health", "error", "NVML: Driver/library version mismatch")]
    assert cells(found, 1)["devices"].text == "4 x gpu"


def test_a_card_that_only_its_device_file_tells_of() -> None:
    short = report(3)
    short["devices"].append({"index": 3, "held": None, "processes": []})
    found = sample(report(4), {**short, "ids": [0, 1, 2, 3]})
    assert wrong(found) == [(1, "health", "error", "gpu 3: the driver does not know it")]


def test_a_makers_tool_that_is_missing_is_only_a_warning() -> None:
    bare = {
        "kind": "npu",
        "devices": [{"index": 0, "held": None, "processes": []}],
        "ids": [0],
        "driver": "",
        "cuda": "",
    }
    assert wrong(sample(report(1, **bare, problem="there is no npu-smi"))) == [
        (0, "health", "warn", "there is no npu-smi")
    ]


# -- how they are

ILL: list[tuple[dict[str, Any], str, str]] = [
    ({"problem": "GPU is lost"}, "error", "GPU is lost"),
    ({"problem": "health: Alarm"}, "error", "health: Alarm"),
    ({"problem": "health: Warning"}, "warn", "health: Warning"),
    ({"compute_mode": "prohibited"}, "error", "compute mode prohibited: no process can compute on it"),
    ({"repair": "failed"}, "error", "bad memory that it can't replace any more"),
    ({"repair": "pending"}, "warn", "bad memory in use until it is reset"),
    ({"ecc_uncorrected": 1}, "warn", "1 uncorrected ECC error"),
    ({"ecc_uncorrected": 7}, "warn", "7 uncorrected ECC errors"),
    ({"temperature": 93}, "warn", "93 C, it slows down at 93 C"),
    ({"temperature": 90, "slowdown": None}, "warn", "90 C"),
    (
        {"throttle": ["power cap", "hardware slowdown", "hardware thermal"]},
        "warn",
        "slowed down now: hardware slowdown, hardware thermal",
    ),
]


@pytest.mark.parametrize("card, level, text", ILL)
def test_a_sick_card(card: dict[str, Any], level: str, text: str) -> None:
    assert wrong(sample(report(8, {5: card}), report(8))) == [(0, "health", level, f"gpu 5: {text}")]
    assert bool(first_error(card)) == (level == "error")


def test_cards_with_the_same_fault_are_reported_together() -> None:
    found = sample(report(8, {1: {"repair": "pending"}, 3: {"repair": "pending", "compute_mode": "prohibited"}}))
    assert wrong(found) == [
        (0, "health", "warn", "gpu 1,3: bad memory in use until it is reset"),
        (0, "health", "error", "gpu 3: compute mode prohibited: no process can compute on it"),
    ]


FINE: list[dict[str, Any]] = [
    {"temperature": 92},
    {"temperature": 89, "slowdown": None},
    {"temperature": None},
    {"throttle": ["power cap"]},
    {"ecc_uncorrected": None},
    {"compute_mode": "exclusive process"},
    {"memory_free": 41 * GB},
    {"memory_total": None},
    {"processes": [{"pid": 7, "graphics": True}]},
]


@pytest.mark.parametrize("card", FINE)
def test_what_is_no_fault(card: dict[str, Any]) -> None:
    assert wrong(sample(report(2, {1: card}))) == []


def test_no_persistence_mode_is_shown_and_no_warning() -> None:
    cell = cells(sample(report(2, {1: {"persistence": False}})), 0)["health"]
    assert (cell.level, cell.text) == ("ok", "persistence mode off")


def test_exclusive_mode_matters_where_ranks_share_a_card() -> None:
    cluster = cluster_of(hosts(2))
    facts = facts_of(cluster, devices=(0, 1), device_kind="gpu", devices_seen=True)
    assert shared_cards(plan_of(cluster, facts=facts, nproc_per_node="2")) == {0: frozenset(), 1: frozenset()}
    twice = shared_cards(plan_of(cluster, facts=facts, nproc_per_node="3"))
    assert twice == {0: frozenset([0]), 1: frozenset([0])}
    assert shared_cards(None) == {}
    alone = {0: {"compute_mode": "exclusive process"}}
    found = sample(report(2, alone), report(2), twice=twice)
    assert wrong(found) == [(0, "health", "warn", "gpu 0: exclusive process, and several ranks would share it")]


# -- who is on them

ANNA = {"pid": 12, "user": "anna", "name": "python3", "memory": 3 * GB}


def test_a_process_on_some_cards_is_reported_once() -> None:
    found = sample(report(4, {1: {"processes": [ANNA]}, 2: {"processes": [ANNA, {"pid": 9, "memory": None}]}}))
    assert wrong(found) == [
        (0, "users", "warn", "gpu 1,2: python3 (pid 12, user anna) 6.0 GB"),
        (0, "users", "warn", "gpu 2: a process (pid 9)"),
    ]


def test_a_job_is_named_by_its_lock_and_its_processes_are_not() -> None:
    reserved = {"held": {"job": "J1", "user": "anna"}, "processes": [ANNA], "memory_free": GB}
    assert wrong(sample(report(4, {0: reserved, 1: reserved}))) == [
        (0, "users", "warn", "gpu 0,1 is in use by job J1 of user anna")
    ]
    for other in ({"user": "bob"}, {"job": "J2"}):
        found = sample(report(1, {0: {**reserved, "processes": [{**ANNA, **other}]}}))
        assert len(wrong(found)) == 2, other


def test_a_process_on_an_exclusive_device_is_an_error() -> None:
    found = sample(report(1, {0: {"processes": [{**ANNA, "job": "J9"}], "compute_mode": "exclusive process"}}))
    assert wrong(found) == [
        (0, "users", "error", "gpu 0: python3 of job J9 (pid 12, user anna) 3.0 GB, and only one may compute there")
    ]


def test_memory_that_is_gone_without_a_user() -> None:
    found = sample(report(2, {1: {"memory_free": 10 * GB}}))
    assert wrong(found) == [(0, "users", "warn", "gpu 1: 10.0 GB of 80.0 GB free, without a visible process")]


# -- which cards count


def test_cards_that_no_job_of_this_conf_gets_are_not_read() -> None:
    sick = report(8, {5: {"problem": "GPU is lost", "processes": [ANNA]}})
    assert wrong(sample(sick, entries=[{"host": "a", "devices": [0, 1]}])) == []


def test_checks_that_are_off_are_not_there() -> None:
    sick = report(8, {5: {"problem": "GPU is lost"}, 6: {"processes": [ANNA]}})
    assert {finding.column for finding in sample(sick, keys={"CHECKS_OFF": ["health", "driver"]})} == {
        "devices",
        "users",
    }


def test_only_nodes_whose_cards_are_used_are_asked() -> None:
    def asked(**keys: Any) -> list[int]:
        cluster = cluster_of(keys.pop("HOSTS", hosts(2)), **keys)
        facts = facts_of(cluster)
        facts.update({1: facts_of(cluster, devices=(0,), device_kind="gpu")[1]})
        return nodes_to_ask(cluster, facts)

    assert asked() == [1]
    assert asked(CHECKS_OFF=["health", "users"]) == [1]
    assert asked(CHECKS_OFF=list(CHECKS)) == []
    assert asked(HOSTS=["a", {"host": "b", "devices": []}]) == []
    assert asked(DEVICE_KIND="cpu") == asked(PADDLE_USE_GPU=False) == []
