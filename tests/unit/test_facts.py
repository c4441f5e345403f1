"""What probes answer becomes facts; what they would answer is not asked for when conf.py gives it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import IDENTITY, cluster_of, facts_of, hosts, job_of, plan_of

from clustertool.model.facts import Facts, nodes_sharing_root, read_facts
from clustertool.model.planning.plan import as_dict, given_facts, needs_probe, plan


def test_a_probes_answer_survives_json() -> None:
    there = facts_of(
        cluster_of(hosts(1)),
        busy=frozenset([22, 80]),
        listeners=((22, "sshd"),),
        devices=(0, 1),
        listing=("a", "b"),
        ephemeral=(1, 2),
        releases=("r",),
        problems=(("root", "error", "what", "fix"),),
    )[0]
    answer = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in vars(there).items()}
    assert read_facts(0, json.loads(json.dumps(answer))) == there


def test_nodes_may_know_more_or_less_than_we_do() -> None:
    assert read_facts(3, {"hostname": "h", "colour": "blue", "node": 7}) == Facts(3, hostname="h")
    assert read_facts(3, {}) == Facts(3)


def test_a_machine_is_a_boot_and_a_network_namespace() -> None:
    one, two = Facts(0, boot_id="b", netns="n"), Facts(1, boot_id="b", netns="n")
    assert one.machine == two.machine
    assert one.machine != Facts(1, boot_id="b", netns="m").machine
    assert Facts(0).machine != Facts(1).machine


def test_nodes_that_share_their_root() -> None:
    ids = ["x", "y", "x", "", ""]
    assert nodes_sharing_root({node: Facts(node, root_id=root) for node, root in enumerate(ids)}) == {0, 2}


def test_holders_as_text() -> None:
    fact = Facts(0, listeners=((80, "nginx (pid 1)"),))
    assert (fact.holder(80), fact.holder(81)) == ("nginx (pid 1)", "another process")


GIVEN: dict[str, Any] = {"ROOT_DIR": "/jobs", "DEVICE_KIND": "cpu", "START_PORT": 6170, "LEAD_PORT": 6160}


def test_a_cluster_that_says_everything_needs_no_probe() -> None:
    cluster = cluster_of(hosts(2), **GIVEN)
    assert not needs_probe(cluster, job_of(cluster))
    without = {**GIVEN, "DEVICE_KIND": "auto"}
    cluster = cluster_of(hosts(1), **without, PADDLE_USE_GPU="False")
    assert not needs_probe(cluster, job_of(cluster))
    cluster = cluster_of([{"host": "a", "address": "10.0.0.1", "devices": [0]}], **without, PADDLE_USE_GPU="True")
    assert not needs_probe(cluster, job_of(cluster))
    cluster = cluster_of(hosts(1), **{**GIVEN, "DEVICE_KIND": "npu"})
    assert not needs_probe(cluster, job_of(cluster, devices="0,1"))
    for mode in ("ps", "ps-heter"):
        cluster = cluster_of(hosts(1), ROOT_DIR="/jobs", DEVICE_KIND="cpu", LEAD_PORT=6160)
        assert not needs_probe(cluster, job_of(cluster, mode=mode))


MISSING: list[tuple[object, dict[str, Any], dict[str, Any]]] = [
    ("node1", {}, {}),
    ("10.0.0.1", {"ROOT_DIR": "~/jobs"}, {}),
    ("10.0.0.1", {"DEVICE_KIND": "auto"}, {}),
    ("10.0.0.1", {"DEVICE_KIND": "gpu"}, {}),
    ("10.0.0.1", {"DEVICE_KIND": "auto"}, {"devices": "0,1"}),
    ({"host": "10.0.0.1", "devices": [0]}, {"DEVICE_KIND": "auto"}, {}),
    ("10.0.0.1", {"START_PORT": None}, {}),
    ("10.0.0.1", {"LEAD_PORT": None}, {}),
    ("10.0.0.1", {"PADDLE_NIC": "eth0"}, {}),
    ("10.0.0.1", {}, {"job_workspace": "/data/job"}),
]


@pytest.mark.parametrize("entry, keys, options", MISSING)
def test_what_is_missing_needs_a_probe(entry: object, keys: dict[str, Any], options: dict[str, Any]) -> None:
    cluster = cluster_of([entry], **{key: value for key, value in {**GIVEN, **keys}.items() if value is not None})
    assert needs_probe(cluster, job_of(cluster, **options))


def test_without_a_probe_the_plan_is_the_one_that_a_probe_would_give() -> None:
    cluster = cluster_of(hosts(2), **GIVEN)
    job = job_of(cluster, nproc_per_node="2")
    blind = plan(cluster, job, given_facts(cluster), IDENTITY, ("train.py",))
    assert as_dict(blind) == as_dict(plan_of(cluster, facts=facts_of(cluster, nic=""), nproc_per_node="2"))


def test_without_a_probe_one_address_is_one_machine() -> None:
    cluster = cluster_of(["10.0.0.1:1", "10.0.0.1:2"], **GIVEN)
    made = plan(cluster, job_of(cluster), given_facts(cluster), IDENTITY, ("train.py",))
    assert [process.endpoint for process in made.processes] == ["10.0.0.1:6170", "10.0.0.1:6171"]
    assert [node.job_dir for node in made.nodes] == [f"/jobs/node{node}/JOB{IDENTITY.job_id}" for node in (0, 1)]
