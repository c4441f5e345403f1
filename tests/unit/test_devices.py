"""Devices: who gets which card, under which variable of its kind; options and HOSTS speak of physical ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import IDENTITY, cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

from clustertool.errors import DeviceInUse, PreflightError, Several
from clustertool.model import cards
from clustertool.model.cards import VARIABLES
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.planning.plan import Plan, given_facts, needs_probe
from clustertool.model.planning.requests import spec

NAMES = (
    {visible for visible, _ in VARIABLES.values()}
    | {flag for _, flag in VARIABLES.values()}
    | {
        "PADDLE_DISTRI_BACKEND",
        "PADDLE_XCCL_BACKEND",
        "HETER_DEVICE_TYPE",
    }
)


def planned(
    cards: int = 0,
    kind: str = "gpu",
    entry: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    *,
    seen: bool = False,
    **options: Any,
) -> Plan:
    """One node whose probe found `cards` devices."""
    cluster: Cluster = cluster_of([{"host": "10.0.0.1", **(entry or {})}], **(keys or {}))
    found = facts_of(cluster, devices=tuple(range(cards)), device_kind=kind if cards else "cpu", devices_seen=seen)
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
def test_trainers_share_the_cards_of_their_node(
    cards: int, options: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    assert cards_of(planned(cards, **options)) == expected


def test_collective_starts_one_trainer_a_device_and_ps_one_a_node() -> None:
    assert len(cards_of(planned(4))) == 4
    assert cards_of(planned(4, mode="ps")) == [(0,)]


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
    assert [(p.node, p.rank, p.devices) for p in made.processes] == [
        (0, 0, (0,)),
        (0, 1, (1,)),
        (1, 2, ()),
        (2, 3, (3,)),
    ]
    assert [set_for(made, rank) for rank in (1, 2, 3)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1", "FLAGS_selected_gpus": "1"},
        {"PADDLE_DISTRI_BACKEND": "gloo"},
        {"CUDA_VISIBLE_DEVICES": "3", "FLAGS_selected_gpus": "0"},
    ]


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
    plug_in = {"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": "npu"} if kind == "npu" else {}
    assert set_for(made, 0) == {visible: "4,6", flag: "0,1", **plug_in}
    assert set_for(made, 1) == {visible: "7", flag: "0", **plug_in}
    served = planned(8, kind, keys={"DEVICE_KIND": kind}, devices="4,6,7", nproc_per_node="2", mode="ps")
    assert [set_for(served, rank) for rank in (0, 1)] == [{visible: "4", flag: "0"}, {visible: "6", flag: "0"}]
    assert set_for(served, 0, "pserver") == {visible: "-1"}


def seen_by(made: Plan, role: str = "trainer") -> list[tuple[str, str]]:
    """What each process sees, and where its own devices are in it."""
    found = [env_of(made, role, process.rank) for process in of_role(made, role)]
    return [(env["CUDA_VISIBLE_DEVICES"], env["FLAGS_selected_gpus"]) for env in found]


VISIBLE: list[tuple[int, str, dict[str, Any], list[tuple[str, str]]]] = [
    # cards found, DEVICE_VISIBILITY, options -> each trainer's
    (2, "", {}, [("0,1", "0"), ("0,1", "1")]),
    (2, "node", {}, [("0,1", "0"), ("0,1", "1")]),
    (2, "own", {}, [("0", "0"), ("1", "0")]),
    (8, "", {"devices": "6,2"}, [("6,2", "0"), ("6,2", "1")]),
    (8, "own", {"devices": "6,2"}, [("6", "0"), ("2", "0")]),
    # several devices each
    (4, "", {"nproc_per_node": "2"}, [("0,1", "0,1"), ("2,3", "0,1")]),
    (4, "node", {"nproc_per_node": "2"}, [("0,1,2,3", "0,1"), ("0,1,2,3", "2,3")]),
    (3, "", {"nproc_per_node": "2"}, [("0,1", "0,1"), ("2", "0")]),
    (4, "", {"nproc_per_node": "1"}, [("0,1,2,3", "0,1,2,3")]),
    # two ranks share a device
    (1, "", {"nproc_per_node": "2"}, [("0", "0"), ("0", "0")]),
    (2, "", {"nproc_per_node": "3"}, [("0", "0"), ("1", "0"), ("0", "0")]),
    (2, "node", {"nproc_per_node": "3"}, [("0,1", "0"), ("0,1", "1"), ("0,1", "0")]),
    # Paddle's launcher for parameter servers gives each worker one device, number 0
    (2, "", {"mode": "ps", "worker_num": "2"}, [("0", "0"), ("1", "0")]),
    (2, "node", {"mode": "ps", "worker_num": "2"}, [("0,1", "0"), ("0,1", "1")]),
]


@pytest.mark.parametrize("cards, visibility, options, expected", VISIBLE)
def test_visible_devices(cards: int, visibility: str, options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    keys = {"DEVICE_VISIBILITY": visibility} if visibility else {}
    assert seen_by(planned(cards, keys=keys, **options)) == expected


@pytest.mark.parametrize("workers", ["b,a,a,b", "a,b,b,a"])
def test_local_rank_is_a_position_in_the_visible_devices(workers: str) -> None:
    """In rank order also where a list gives the ranks, on each node by its own devices; two nodes may be one machine."""
    cluster = cluster_of([{"host": "a", "devices": "0,1,2,4,6,7"}, {"host": "b", "devices": "5,3"}])
    for machines in ((0, 1), (0, 0)):
        facts = facts_of(cluster, machines, devices=tuple(range(8)), device_kind="gpu")
        made = plan_of(cluster, facts=facts, devices="", workers=(workers,))
        assert len(of_role(made, "trainer")) == 4
        for process in of_role(made, "trainer"):
            env = dict(process.env)
            if process.node == 1:
                seen = [int(one) for one in env["CUDA_VISIBLE_DEVICES"].split(",")]
                assert seen == [5, 3]
                assert (seen[int(env["LOCAL_RANK"])],) == process.devices
                assert env["FLAGS_selected_gpus"] == env["LOCAL_RANK"] == env["PADDLE_RANK_IN_NODE"]
            else:  # six cards for two ranks: each sees its three
                assert env["FLAGS_selected_gpus"] == "0,1,2"
                assert env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, process.devices))


def test_each_rank_locks_its_own_devices_only() -> None:
    made = planned(2)
    assert [process["devices"] for process in spec(made, made.nodes[0], [], [])["processes"]] == [[0], [1]]


@pytest.mark.parametrize("kind", ["gpu", "xpu", "npu", "dcu"])
def test_the_kind_is_what_the_probe_found(kind: str) -> None:
    assert VARIABLES[kind][0] in set_for(planned(1, kind), 0)


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
    assert set_for(made, 0, "pserver") == {"CUDA_VISIBLE_DEVICES": "-1"}, "it sees none either"
    assert env_of(made, "pserver", 0)["PADDLE_INIT_USE_GPU"] == "False"
    assert env_of(made, "trainer", 0)["PADDLE_INIT_USE_GPU"] == "True"
    assert (
        env_of(planned(4, keys={"PADDLE_USE_GPU": "False"}, mode="ps"), "trainer", 0)["PADDLE_INIT_USE_GPU"] == "False"
    )


def test_parameter_servers_with_trainers_that_share_a_card() -> None:
    """More trainers than cards on one node, fewer on the other, none on the third."""
    cluster = cluster_of(["a", "b", "c"])
    facts = facts_of(cluster)
    facts[0], facts[1] = (
        facts_of(cluster, devices=tuple(range(n)), device_kind="gpu")[at] for at, n in ((0, 1), (1, 4))
    )
    made = plan_of(cluster, facts=facts, mode="ps", server_num="2", worker_num="2")
    assert [process.devices for process in of_role(made, "pserver")] == [()] * 6
    assert cards_of(made) == [(0,), (0,), (0,), (1,), (), ()]
    assert set_for(made, 1) == {"CUDA_VISIBLE_DEVICES": "0", "FLAGS_selected_gpus": "0"}
    assert set_for(made, 3) == {"CUDA_VISIBLE_DEVICES": "1", "FLAGS_selected_gpus": "0"}
    assert set_for(made, 5) == {}


# -- one machine as several nodes ---------------------------------------------------------------------------------------

ALIASES: list[tuple[list[Any], dict[str, Any], str]] = [
    # HOSTS, options -> the devices that the second node may not have, or "warn" (the names show that it is meant), or ""
    (["a", "b"], {}, "0,1"),
    (["a", "a:2222"], {}, "0,1"),
    (["ann@a", "bob@a"], {}, "0,1"),
    (["10.0.0.1", "127.0.0.1"], {}, "0,1"),
    (["a", "b"], {"devices": "1"}, "1"),
    (["a", "b"], {"devices": "auto"}, "0,1"),
    (["a", "b"], {"mode": "ps"}, "0"),
    (["a", "b"], {"mode": "ps-heter"}, "0"),
    ([{"host": "a", "devices": [0]}, "b"], {}, "0"),
    ([{"host": "a", "slots": 1}, {"host": "b", "slots": 1}], {}, "0"),
    ([{"host": "a", "devices": [0]}, {"host": "b", "devices": [1]}], {}, ""),
    ([{"host": "a", "devices": [0]}, {"host": "b", "devices": []}], {}, ""),
    ([{"host": "a", "roles": ["pserver"]}, {"host": "b", "roles": ["trainer"]}], {"mode": "ps"}, ""),
    (["a", "a"], {}, "warn"),
    (["127.0.0.1:2201", "127.0.0.2:2201"], {}, "warn"),
]


@pytest.mark.parametrize(("entries", "options", "expected"), ALIASES)
def test_two_names_of_one_machine(entries: list[Any], options: dict[str, Any], expected: str) -> None:
    cluster = cluster_of(entries)
    facts = facts_of(cluster, (0, 0), devices=(0, 1), device_kind="gpu", device_keys=("nvidia0", "nvidia1"))
    if expected in ("", "warn"):
        warnings = plan_of(cluster, facts=facts, **options).warnings
        assert [one.partition(" share ")[2] for one in warnings] == ["gpu 0,1: they are one machine"] * bool(expected)
        return
    with pytest.raises(PreflightError, match=f"is the same machine as .* gpu {expected} would be given") as caught:
        plan_of(cluster, facts=facts, **options)
    assert caught.value.node == cluster.hosts[1].name and caught.value.code == 69
    assert not plan_of(replace(cluster, checks_off=("devices",)), facts=facts, **options).warnings
    assert plan_of(replace(cluster, device_kind="cpu"), facts=facts, **options).warnings == ()
    assert plan_of(cluster, facts=facts_of(cluster, (0, 1), devices=(0, 1), device_kind="gpu"), **options)


def test_device_files_decide_which_devices_of_a_machine_are_the_same() -> None:
    """Each of two containers in the network of their machine has one of its devices, as number 0."""
    cluster = cluster_of(["a", "b"])
    facts = facts_of(cluster, (0, 0), devices=(0,), device_kind="gpu", device_keys=("nvidia0",))
    facts[1] = replace(facts[1], device_keys=("nvidia3",))
    assert plan_of(cluster, facts=facts).warnings == ()
    allocated = facts_of(cluster, (0, 0), devices=(0,), device_kind="gpu", allocated=("GPU-1",))
    assert plan_of(cluster, facts=allocated).warnings == (), "an engine has divided them"


def test_all_further_names_are_reported_together() -> None:
    cluster = cluster_of(hosts(3))
    with pytest.raises(Several) as caught:
        plan_of(cluster, facts=facts_of(cluster, (0, 0, 0), devices=(0,), device_kind="gpu"))
    assert str(caught.value).count("is the same machine as 10.0.0.1") == 2


def test_one_address_is_one_machine_without_a_probe() -> None:
    entries = [{"host": name, "address": "10.0.0.1", "devices": [0], "root_dir": "/r"} for name in ("a", "b")]
    cluster = cluster_of(entries, DEVICE_KIND="gpu", START_PORT=6000, LEAD_PORT=5000)
    assert not needs_probe(cluster, job_of(cluster))
    with pytest.raises(PreflightError, match="gpu 0 would be given to both"):
        plan_of(cluster, facts=given_facts(cluster))


# -- unequal nodes -------------------------------------------------------------------------------------------------------

UNEQUAL: list[tuple[list[list[str]], dict[str, Any], dict[str, Any], str]] = [
    # the models of each node's devices ("": not known), conf.py, options -> what the warning lists, or ""
    ([[""] * 2, [""]], {}, {}, "2 x gpu on 10.0.0.1; 1 x gpu on 10.0.0.2"),
    ([[""] * 2, [""], [""] * 2], {}, {}, "2 x gpu on 10.0.0.[1,3]; 1 x gpu on 10.0.0.2"),
    ([[""] * 8, []], {}, {}, "8 x gpu on 10.0.0.1; none on 10.0.0.2"),
    ([[""] * 8, [""] * 4], {}, {"nproc_per_node": "2"}, "8 x gpu on 10.0.0.1; 4 x gpu on 10.0.0.2"),
    ([["A", "A"], ["B", "B"]], {}, {}, "2 x A on 10.0.0.1; 2 x B on 10.0.0.2"),
    ([["A", "A"], ["B", "B"]], {}, {"devices": "0"}, "1 x A on 10.0.0.1; 1 x B on 10.0.0.2"),
    ([["A", "B"]], {}, {}, "1 x A, 1 x B on 10.0.0.1"),
    ([["A", "B"]], {}, {"devices": "1"}, ""),
    ([["A", "A"], ["", ""]], {}, {}, ""),
    ([["A", "A"], ["A", "A"]], {}, {}, ""),
    ([[], []], {}, {}, ""),
    ([[""] * 8, [""] * 4], {}, {"mode": "ps"}, ""),
    ([[""] * 8, []], {}, {"mode": "ps-heter"}, ""),
    ([[""] * 2, [""]], {"DEVICE_KIND": "cpu"}, {}, ""),
    ([[""] * 2, [""]], {"CHECKS_OFF": ["devices"]}, {}, ""),
    ([[""] * 2, [""]], {"HOSTS": ["10.0.0.1", {"host": "10.0.0.2", "devices": [0]}]}, {}, ""),
    ([[""] * 2, [""]], {"HOSTS": [{"host": "10.0.0.1", "slots": 2}, {"host": "10.0.0.2", "slots": 1}]}, {}, ""),
]


@pytest.mark.parametrize(("nodes", "keys", "options", "expected"), UNEQUAL)
def test_unequal_devices(nodes: list[list[str]], keys: dict[str, Any], options: dict[str, Any], expected: str) -> None:
    cluster = read_cluster({"HOSTS": hosts(len(nodes)), **keys})
    facts = facts_of(cluster)
    for node, models in enumerate(nodes):
        more = {"devices": tuple(range(len(models))), "device_kind": "gpu" if models else "cpu"}
        facts[node] = replace(facts[node], **more, device_models=tuple(models) if all(models) else ())
    warnings = plan_of(cluster, facts=facts, **options).warnings
    start = f"unequal devices: {expected} (the slowest"
    assert [one for one in warnings if "unequal" in one] == [one for one in warnings if one.startswith(start)]
    assert len(warnings) == bool(expected)


# -- heter trainers -----------------------------------------------------------------------------------------------------


def heter_cards(made: Plan) -> list[tuple[int, ...]]:
    return [process.devices for process in of_role(made, "heter")]


HETER: list[tuple[int, str, dict[str, Any], list[tuple[int, ...]], list[str]]] = [
    # cards of the node, their kind, options -> the card and HETER_DEVICE_TYPE of each heter trainer
    (4, "gpu", {}, [(0,)], ["gpu"]),
    (4, "gpu", {"heter_worker_num": "3"}, [(0,), (1,), (2,)], ["gpu"] * 3),
    (2, "gpu", {"heter_worker_num": "3"}, [(0,), (1,), (0,)], ["gpu"] * 3),
    (2, "dcu", {"heter_worker_num": "2"}, [(0,), (1,)], ["gpu"] * 2),
    (2, "xpu", {}, [(0,)], ["xpu"]),
    (2, "npu", {}, [()], ["cpu"]),
    (0, "cpu", {}, [()], ["cpu"]),
    (4, "gpu", {"heter_devices": "cpu"}, [()], ["cpu"]),
    (4, "gpu", {"heter_devices": "gpu;cpu;gpu"}, [(0,), (), (1,)], ["gpu", "cpu", "gpu"]),
    (4, "gpu", {"heter_devices": "gpu;gpu", "heter_worker_num": "1;2"}, [(0,), (1,), (2,)], ["gpu"] * 3),
    (8, "gpu", {"heter_devices": "gpu", "devices": "5,7", "heter_worker_num": "3"}, [(5,), (7,), (5,)], ["gpu"] * 3),
    (2, "xpu", {"heter_devices": "gpu;xpu"}, [(), (0,)], ["gpu", "xpu"]),
]


@pytest.mark.parametrize("cards, kind, options, expected, types", HETER)
def test_a_heter_trainer_has_one_card_of_its_stage(
    cards: int, kind: str, options: dict[str, Any], expected: list[tuple[int, ...]], types: list[str]
) -> None:
    made = planned(cards, kind, keys={"DEVICE_KIND": kind}, mode="ps-heter", **options)
    assert heter_cards(made) == expected
    assert [env_of(made, "heter", rank)["HETER_DEVICE_TYPE"] for rank in range(len(expected))] == types


@pytest.mark.parametrize("kind, visible, flag", KINDS[:3])
def test_variables_of_heter_trainers(kind: str, visible: str, flag: str) -> None:
    """One card, which Paddle reads as a number; the trainers, stage 1, are always on the cpu, as are pservers."""
    made = planned(8, kind, mode="ps-heter", devices="6,2", heter_worker_num="2")
    asked = "xpu" if kind == "xpu" else "gpu"
    assert set_for(made, 0, "heter") == {visible: "6", flag: "0", "HETER_DEVICE_TYPE": asked}
    assert set_for(made, 1, "heter") == {visible: "2", flag: "0", "HETER_DEVICE_TYPE": asked}
    assert set_for(made, 0) == {visible: "-1", "HETER_DEVICE_TYPE": "cpu"}
    assert set_for(made, 0, "pserver") == {visible: "-1"}
    assert [one(made, role, 0).devices for role in ("pserver", "trainer")] == [(), ()]


def test_without_an_option_each_heter_trainer_is_what_its_node_has() -> None:
    cluster = cluster_of(hosts(3))
    facts = facts_of(cluster)
    for node, kind in ((0, "gpu"), (2, "xpu")):
        facts[node] = facts_of(cluster, devices=(0, 1), device_kind=kind)[node]
    made = plan_of(cluster, facts=facts, mode="ps-heter", heter_worker_num="2")
    assert heter_cards(made) == [(0,), (1,), (), (), (0,), (1,)]
    types = [env_of(made, "heter", rank)["HETER_DEVICE_TYPE"] for rank in range(6)]
    assert types == ["gpu", "gpu", "cpu", "cpu", "xpu", "xpu"]


def test_a_stage_without_its_device_is_warned_of_once_on_each_node() -> None:
    made = planned(2, "gpu", mode="ps-heter", heter_devices="xpu;gpu", heter_worker_num="3")
    assert list(made.warnings) == [
        "10.0.0.1: stage 2 of heter trainers wants xpu (--heter-devices), none is known there"
    ]
    assert not planned(0, mode="ps-heter", heter_devices="cpu").warnings
    assert not planned(0, mode="ps-heter").warnings


@pytest.mark.parametrize(
    "cards, kind, options, entry, keys, reported",
    [
        (
            4,
            "gpu",
            {"devices": "0,4,7"},
            {},
            {},
            "there is no device 4, 7 (--devices)\n  fix: the node has gpu 0, 1, 2, 3",
        ),
        (4, "gpu", {}, {"devices": [3, 8]}, {}, "there is no device 8 (devices in HOSTS)\n  fix: the node has gpu"),
        (0, "gpu", {"devices": "0"}, {}, {}, "there is no device 0 (--devices)\n  fix: the node has no devices"),
        (0, "gpu", {"devices": "0"}, {}, {"DEVICE_KIND": "gpu"}, "there is no device 0"),
        (
            2,
            "gpu",
            {"devices": "0"},
            {},
            {"DEVICE_KIND": "xpu"},
            "(--devices)\n  fix: DEVICE_KIND is xpu, the node has gpu",
        ),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    cards: int, kind: str, options: dict[str, Any], entry: dict[str, Any], keys: dict[str, Any], reported: str
) -> None:
    with pytest.raises(PreflightError) as caught:
        planned(cards, kind, {**entry, "host": "10.0.0.1"}, keys, seen=True, **options)
    assert str(caught.value).startswith("10.0.0.1: there is no device ") and caught.value.code == 69
    assert reported in str(caught.value)


@pytest.mark.parametrize(
    "cards, options, entry, keys",
    [
        (4, {"devices": "3,0"}, {}, {}),
        (0, {"devices": "0,1"}, {}, {"DEVICE_KIND": "cpu"}),  # ids count trainers
        (4, {"devices": "8,9"}, {}, {"PADDLE_USE_GPU": False}),
        (0, {}, {"devices": [0, 1]}, {}),  # slots of a hostfile
    ],
)
def test_what_is_not_refused(cards: int, options: dict[str, Any], entry: dict[str, Any], keys: dict[str, Any]) -> None:
    planned(cards, entry=entry, keys=keys, seen=True, **options)


def test_all_nodes_are_reported_at_once_and_no_unprobed_node_is_refused() -> None:
    cluster = cluster_of(hosts(3))
    seen = facts_of(cluster, devices=(0, 1), device_kind="gpu", devices_seen=True)
    with pytest.raises(Several, match="(?s)there is no device 2.*there is no device 2.*there is no device 2"):
        plan_of(cluster, facts=seen, devices="2")
    plan_of(cluster, facts=facts_of(cluster, devices=(0, 1), device_kind="gpu"), devices="2")


# -- devices that others hold, and --devices auto

RESERVED = ((1, "other", "bob"), (2, "other", "bob"), (3, IDENTITY.job_id, "ann"))


def busy(cards: int = 4, count: int = 1, **options: Any) -> Plan:
    """One node or more whose cards 1 to 3 are held, and on whose card 0 somebody computes; card 3 is the job's own."""
    cluster = cluster_of(hosts(count))
    used = options.pop("used", ((0, "python3 (pid 7, user eve)"),))
    facts = facts_of(
        cluster,
        devices=tuple(range(cards)),
        device_kind="gpu" if cards else "cpu",
        devices_seen=True,
        locked=RESERVED,
        used=used,
    )
    return plan_of(cluster, facts=facts, **options)


@pytest.mark.parametrize(
    "devices, reported",
    [
        ("1", "gpu 1 is in use by job other of user bob"),
        ("3,2,1", "gpu 1,2 is in use by job other of user bob"),
    ],
)
def test_a_device_that_a_job_holds_is_refused(devices: str, reported: str) -> None:
    with pytest.raises(DeviceInUse) as caught:
        busy(devices=devices)
    assert caught.value.what == reported and caught.value.node == "10.0.0.1" and "--wait" in caught.value.fix
    with pytest.raises(Several, match="(?s)10.0.0.1: gpu 1.*10.0.0.2: gpu 1"):
        busy(count=2, devices="1")


def test_what_a_job_holds_itself_is_its_own() -> None:
    assert cards_of(busy(devices="3")) == [(3,)]


def test_a_process_on_a_device_is_in_the_way_of_auto_alone() -> None:
    """Without a lock it may be the user's own, or a desktop: asked for by name, a card is given."""
    assert cards_of(busy(used=(), devices="0")) == [(0,)]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [(3,), (4,), (5,)]),
        ({"nproc_per_node": "2"}, [(3,), (4,)]),
        ({"mode": "ps"}, [(3,)]),
        ({"mode": "ps", "worker_num": "2"}, [(3,), (4,)]),
    ],
)
def test_auto_takes_what_is_free(options: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    assert cards_of(busy(6, devices="auto", **options)) == expected


def test_auto_with_too_few() -> None:
    with pytest.raises(DeviceInUse) as caught:
        busy(4, devices="auto", nproc_per_node="2")
    assert caught.value.what == (
        "1 of 2 devices are free: gpu 0 is in use by python3 (pid 7, user eve); gpu 1,2 is in use by job other of user bob"
    )
    with pytest.raises(DeviceInUse, match="0 of 3 devices are free: gpu 0"):
        busy(3, devices="auto")


def test_auto_on_a_node_without_devices() -> None:
    with pytest.raises(PreflightError, match="the node has no devices") as caught:
        busy(0, devices="auto")
    assert not isinstance(caught.value, DeviceInUse)  # waiting would not help


def test_auto_needs_a_probe_of_the_nodes() -> None:
    entry = {"host": "a", "address": "10.0.0.1", "devices": [0, 1]}
    cluster = cluster_of([entry], ROOT_DIR="/j", START_PORT=6170, LEAD_PORT=6160, DEVICE_KIND="gpu")
    assert not needs_probe(cluster, job_of(cluster, devices="0"))
    assert needs_probe(cluster, job_of(cluster, devices="auto"))


# -- devices that an engine has allocated

UUIDS = ("GPU-8932f937", "GPU-1b2c3d4e")


@pytest.mark.parametrize(
    "kind, environ, names",
    [
        ("gpu", {"CUDA_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ("gpu", {"CUDA_VISIBLE_DEVICES": ",".join(UUIDS)}, [*UUIDS]),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8932f937/1/2"}, ["MIG-GPU-8932f937/1/2"]),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ("gpu", {"HIP_VISIBLE_DEVICES": "0"}, []),
        ("dcu", {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4,6"}, ["1"]),
        ("dcu", {"ROCR_VISIBLE_DEVICES": "4,6"}, ["0", "1"]),  # as HIP numbers what is visible
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "5"}, ["5"]),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, []),
    ],
)
def test_what_an_engine_allocates(kind: str, environ: dict[str, str], names: list[str]) -> None:
    assert cards.allocated_names(kind, environ) == names


def allocation(*names: str, count: int = 1, keys: dict[str, Any] | None = None, **options: Any) -> Plan:
    """Nodes with these devices of an engine."""
    cluster = cluster_of(hosts(count), **(keys or {}))
    positions = tuple(range(len(names)))
    found = facts_of(cluster, devices=positions, device_kind="gpu", devices_seen=True, allocated=names)
    return plan_of(cluster, facts=found, **options)


@pytest.mark.parametrize(
    "names, options, shown",
    [
        (("2", "5"), {}, [("2,5", "0"), ("2,5", "1")]),
        (UUIDS, {}, [(",".join(UUIDS), "0"), (",".join(UUIDS), "1")]),
        (("2", "5", "7"), {"devices": "2,0"}, [("7,2", "0"), ("7,2", "1")]),
        (("2", "5", "7", "9"), {"nproc_per_node": "2"}, [("2,5", "0,1"), ("7,9", "0,1")]),
        (("MIG-1", "MIG-2"), {}, [("MIG-1", "0"), ("MIG-2", "0")]),  # CUDA shows a process one MIG instance
        (UUIDS, {"mode": "ps", "worker_num": "2"}, [(UUIDS[0], "0"), (UUIDS[1], "0")]),
    ],
)
def test_ranks_get_the_devices_that_are_allocated(
    names: tuple[str, ...], options: dict[str, Any], shown: list[tuple[str, str]]
) -> None:
    """--devices and the devices of the plan are positions, what ranks see are the names."""
    made = allocation(*names, **options)
    envs = [dict(process.env) for process in of_role(made, "trainer")]
    assert [(env["CUDA_VISIBLE_DEVICES"], env["FLAGS_selected_gpus"]) for env in envs] == shown
    assert not made.warnings


def test_paddle_gets_the_names_of_all_ranks() -> None:
    env = env_of(allocation("2", "5", count=2), "trainer", 3)
    assert (env["PADDLE_LOCAL_DEVICE_IDS"], env["PADDLE_WORLD_DEVICE_IDS"]) == ("5", "2,5,2,5")


@pytest.mark.parametrize("names, there", [((), "none"), (("2", "5"), "2, numbered from 0")])
def test_devices_count_within_the_allocation(names: tuple[str, ...], there: str) -> None:
    with pytest.raises(PreflightError, match=r"there is no device 5 \(--devices\)") as caught:
        allocation(*names, devices="5")
    assert f"the job's allocation has {there}" in caught.value.fix


def test_an_allocation_without_devices() -> None:
    """Forgotten more often than intended: the devices of the node are not taken, and a warning names the nodes."""
    made = allocation(count=2)
    assert cards_of(made) == [(), ()] and env_of(made, "trainer", 0)["PADDLE_DISTRI_BACKEND"] == "gloo"
    (warning,) = made.warnings
    assert "10.0.0.1" in warning and "10.0.0.2" in warning and "the job's allocation has no gpu" in warning
    for keys in ({"DEVICE_KIND": "cpu"}, {"PADDLE_USE_GPU": "False"}, {"CHECKS_OFF": ["devices"]}):
        assert not allocation(keys=keys).warnings
