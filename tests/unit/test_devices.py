"""Devices: who gets which card, under which variable of its kind; options and HOSTS speak of physical ids."""

from __future__ import annotations

from typing import Any

import pytest
from cases import cluster_of, env_of, facts_of, of_role, one, plan_of

from clustertool.plan.cluster import Cluster
from clustertool.plan.environment import DEVICES
from clustertool.plan.plan import Plan

NAMES = {visible for visible, _ in DEVICES.values()} | {flag for _, flag in DEVICES.values()} | {"PADDLE_DISTRI_BACKEND"}


def planned(
    cards: int = 0, kind: str = "gpu", entry: dict[str, Any] | None = None, keys: dict[str, Any] | None = None, **options: Any
) -> Plan:
    """One node whose probe found `cards` devices."""
    cluster: Cluster = cluster_of([{"host": "10.0.0.1", **(entry or {})}], **(keys or {}))
    found = facts_of(cluster, devices=tuple(range(cards)), device_kind=kind if cards else "cpu")
    return plan_of(cluster, facts=found, **options)


def cards_of(made: Plan) -> list[tuple[int, ...]]:
    return [process.devices for process in of_role(made, "trainer")]


def set_for(made: Plan, rank: int, role: str = "trainer") -> dict[str, str]:
    return {name: value for name, value in env_of(made, role, rank).items() if name in NAMES}


SHARES: list[tuple[int, dict[str, Any], list[tuple[int, ...]]]] = [
    # cards found, options -> each trainer's
    (4, {}, [(0,), (1,), (2,), (3,)]),
    (4, {"nproc_per_node": "2"}, [(0, 1), (2, 3)]),
    (5, {"nproc_per_node": "2"}, [(0, 1, 2), (3, 4)]),
    (8, {"nproc_per_node": "3"}, [(0, 1, 2), (3, 4, 5), (6, 7)]),
    (4, {"nproc_per_node": "1"}, [(0, 1, 2, 3)]),
    (2, {"nproc_per_node": "5"}, [(0,), (1,), (0,), (1,), (0,)]),
    (8, {"devices": "6,2"}, [(6,), (2,)]),
    (8, {"devices": "1,3,5,7", "nproc_per_node": "2"}, [(1, 3), (5, 7)]),
    (8, {"devices": "5", "nproc_per_node": "2"}, [(5,), (5,)]),
    (0, {}, [()]),
    (0, {"nproc_per_node": "3"}, [(), (), ()]),
]


@pytest.mark.parametrize("cards, options, expected", SHARES)
def test_trainers_share_the_cards_of_their_node(cards: int, options: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    assert cards_of(planned(cards, **options)) == expected


def test_collective_starts_one_trainer_a_device_and_ps_one_a_node() -> None:
    assert len(cards_of(planned(4))) == 4
    assert cards_of(planned(4, mode="ps")) == [(0, 1, 2, 3)]


def test_hosts_say_which_devices_and_the_command_line_says_it_last() -> None:
    assert cards_of(planned(8, entry={"devices": [4, 5]})) == [(4,), (5,)]
    assert cards_of(planned(8, entry={"devices": [4, 5]}, devices="7")) == [(7,)]
    assert cards_of(planned(8, entry={"devices": []})) == [()]
    assert cards_of(planned(8, entry={"nproc": 2})) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_nodes_may_differ() -> None:
    cluster = cluster_of(["a", "b", {"host": "c", "devices": "3"}])
    facts = facts_of(cluster, devices=(0, 1), device_kind="gpu")
    facts[1] = facts_of(cluster)[1]
    made = plan_of(cluster, facts=facts)
    assert [(p.node, p.rank, p.devices) for p in made.processes] == [(0, 0, (0,)), (0, 1, (1,)), (1, 2, ()), (2, 3, (3,))]
    assert [set_for(made, rank) for rank in (1, 2)] == [
        {"CUDA_VISIBLE_DEVICES": "1", "FLAGS_selected_gpus": "0"}, {"PADDLE_DISTRI_BACKEND": "gloo"},
    ]  # fmt: skip


KINDS = [
    ("gpu", "CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"),
    ("dcu", "HIP_VISIBLE_DEVICES", "FLAGS_selected_gpus"),
    ("xpu", "XPU_VISIBLE_DEVICES", "FLAGS_selected_xpus"),
    ("npu", "ASCEND_RT_VISIBLE_DEVICES", "FLAGS_selected_npus"),
]


@pytest.mark.parametrize("kind, visible, flag", KINDS)
def test_variables_of_each_kind(kind: str, visible: str, flag: str) -> None:
    """Physical ids in the kind's own variable; Paddle's flag counts among the visible ones."""
    made = planned(8, kind, keys={"DEVICE_KIND": kind}, devices="4,6,7", nproc_per_node="2")
    assert set_for(made, 0) == {visible: "4,6", flag: "0,1"}
    assert set_for(made, 1) == {visible: "7", flag: "0"}


@pytest.mark.parametrize("kind", ["gpu", "xpu", "npu", "dcu"])
def test_the_kind_is_what_the_probe_found(kind: str) -> None:
    assert DEVICES[kind][0] in set_for(planned(1, kind), 0)


USES: list[tuple[dict[str, Any], str, list[tuple[int, ...]]]] = [
    # conf.py, what the probe found (2 cards of it) -> cards
    ({}, "gpu", [(0,), (1,)]),
    ({"PADDLE_USE_GPU": "True"}, "gpu", [(0,), (1,)]),
    ({"PADDLE_USE_GPU": "False"}, "gpu", [()]),
    ({"DEVICE_KIND": "cpu"}, "gpu", [()]),
    ({"DEVICE_KIND": "cpu", "PADDLE_USE_GPU": "True"}, "gpu", [()]),
    ({"DEVICE_KIND": "gpu", "PADDLE_USE_GPU": "False"}, "gpu", [(0,), (1,)]),
    ({"DEVICE_KIND": "npu"}, "gpu", [()]),
    ({"PADDLE_USE_GPU": "True"}, "xpu", [()]),
]


@pytest.mark.parametrize("keys, found, expected", USES)
def test_conf_decides_over_the_probe(keys: dict[str, Any], found: str, expected: list[tuple[int, ...]]) -> None:
    assert cards_of(planned(2, found, keys=keys)) == expected


def test_without_devices_paddle_talks_gloo() -> None:
    assert set_for(planned(0), 0) == {"PADDLE_DISTRI_BACKEND": "gloo"}
    assert set_for(planned(4, keys={"PADDLE_USE_GPU": "False"}), 0) == {"PADDLE_DISTRI_BACKEND": "gloo"}
    assert set_for(planned(4, keys={"DEVICE_KIND": "cpu"}, devices="0,1"), 0) == {"PADDLE_DISTRI_BACKEND": "gloo"}


def test_devices_of_a_cpu_job_still_count_its_processes() -> None:
    assert len(cards_of(planned(0, devices="0,1,2"))) == 3


def test_pservers_take_no_card() -> None:
    made = planned(4, mode="ps")
    assert one(made, "pserver", 0).devices == ()
    assert set_for(made, 0, "pserver") == {}
    assert env_of(made, "pserver", 0)["PADDLE_INIT_USE_GPU"] == "False"
    assert env_of(made, "trainer", 0)["PADDLE_INIT_USE_GPU"] == "True"
    assert env_of(planned(4, keys={"PADDLE_USE_GPU": "False"}, mode="ps"), "trainer", 0)["PADDLE_INIT_USE_GPU"] == "False"
