"""Whole plans as `--dry` shows them, against files in tests/golden: a change of any of them must be meant.

After a change that is meant, examine `UPDATE_GOLDEN=1 pytest tests/unit/test_golden.py && git diff tests/golden`. The
variable writes the files anew; without it a file that is missing, or one that no case has, is a failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cluster_of, facts_of, hosts, plan_of

from clustertool.model.planning.plan import Plan, as_dict

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SECRET = "s3cr3t-value"


def collective_of_1_3_2() -> Plan:
    """Nodes of different size, fixed ports, no devices."""
    entries = [{"host": host, "nproc": size} for host, size in zip(hosts(3), (1, 3, 2))]
    return plan_of(cluster_of(entries, START_PORT=6170, LEAD_PORT=6160))


def collective_gpus() -> Plan:
    """Two nodes with four cards, two cards a trainer."""
    cluster = cluster_of(["gpu[01-02]"], START_PORT=6170, LEAD_PORT=6160)
    return plan_of(cluster, facts=facts_of(cluster, devices=(0, 1, 2, 3), device_kind="gpu"), nproc_per_node="2")


def ps_with_shards() -> Plan:
    """What the old tool did: conf.py with its keys only, one pserver and one trainer per node, data in shards."""
    cluster = cluster_of(
        ["root@10.0.0.1", "root@10.0.0.2"],
        ROOT_DIR="/home/paddle",
        PADDLE_NIC="eth0",
        PADDLE_PORT="7164",
        PADDLE_PORTS_NUM="2",
        PADDLE_PORTS_NUM_FOR_SPARSE="2",
        PADDLE_USE_GPU="False",
    )
    files = ["train.py", "pserver.py", *(f"train_data_dir/train.txt-{n:05d}" for n in range(5))]
    toml = {"mode": "ps", "shards": {"files": ["train_data_dir/*-[0-9]*"]}}
    return plan_of(cluster, toml, facts_of(cluster, root="/home/paddle"), files)


def ps_by_lists() -> Plan:
    """Explicit lists in an order of their own, a pserver command with placeholders, the gloo port given."""
    command = ["paddle", "pserver", "--port={port}", "--ports_num={ports_num}", "--num_gradient_servers={num_trainers}"]
    return plan_of(
        cluster_of(hosts(2), LEAD_PORT=6160),
        {"pserver": {"command": command}},
        servers=("10.0.0.2:7000,10.0.0.1:7000",),
        workers=("10.0.0.2:8000,10.0.0.1,10.0.0.2:8001",),
        http_port="9000",
    )


def one_machine() -> Plan:
    """Three nodes on one machine with one ROOT_DIR, the default pserver port busy."""
    cluster = cluster_of(["127.0.0.2", "127.0.0.3", "127.0.0.4"], LEAD_PORT=6160)
    busy = {"busy": frozenset([7164]), "listeners": ((7164, "nginx (pid 1, user www)"),)}
    return plan_of(cluster, {"mode": "ps"}, facts_of(cluster, (0, 0, 0), root_id="one", nic="lo", **busy))


def environments_and_secrets() -> Plan:
    """ENV, a host's env, PASS_ENV, [env], --env, SECRETS, a policy, and a workspace that lies on the node already."""
    cluster = cluster_of(
        [{"host": "node1", "address": "10.0.0.1", "env": {"A": "host"}}],
        START_PORT=6170,
        LEAD_PORT=6160,
        ENV={"A": "conf", "B": "conf"},
        PASS_ENV=["C"],
        SECRETS=["API_KEY"],
        LOSS_TIMEOUT=5,
        PRELUDE="module load cuda",
    )
    toml = {
        "env": {"B": "toml", "D": "toml"},
        "policy": {"timeout": 3600, "on_failure": "continue"},
        "trainer": {"command": ["sh", "-c", 'echo {rank} {"json": 1} {{']},
        "outputs": {"path": "model"},
    }
    return plan_of(
        cluster,
        toml,
        passed=[("C", "laptop"), ("API_KEY", SECRET)],
        env=("D=line",),
        max_restarts="2",
        job_workspace="~/job",
    )


def ps_heter_by_stages() -> Plan:
    """A pserver host, a host of trainers, two with cards: two stages of heter trainers, one on cards and one on cpus."""
    entries = [
        {"host": "10.0.0.1", "roles": ["pserver"]},
        {"host": "10.0.0.2", "roles": {"trainer": 2}},
        {"host": "10.0.0.3", "roles": {"heter": 2}},
        {"host": "10.0.0.4", "roles": ["heter"]},
    ]
    cluster = cluster_of(entries, LEAD_PORT=6160, DEVICE_KIND="gpu")
    facts = facts_of(cluster, devices=(0, 1), device_kind="gpu")
    toml = {"mode": "ps-heter", "heter_trainer": {"command": ["python3", "-u", "heter.py", "--port={port}"]}}
    return plan_of(cluster, toml, facts, heter_devices="gpu;cpu")


CASES: list[Callable[[], Plan]] = [
    collective_of_1_3_2,
    collective_gpus,
    ps_with_shards,
    ps_by_lists,
    one_machine,
    environments_and_secrets,
    ps_heter_by_stages,
]


def shown(case: Callable[[], Plan]) -> str:
    return json.dumps(as_dict(case()), indent=1) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_the_golden_one(case: Callable[[], Plan]) -> None:
    path = GOLDEN / f"{case.__name__}.json"
    text = shown(case)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run with UPDATE_GOLDEN=1, look at it and add it"
    assert json.loads(text) == json.loads(path.read_text())
    assert text == path.read_text()


def test_every_golden_file_has_its_case() -> None:
    assert {path.name for path in GOLDEN.glob("*.*")} == {f"{case.__name__}.json" for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_nothing_secret_is_shown(case: Callable[[], Plan]) -> None:
    made = case()
    text = shown(case)
    for secret in (SECRET, made.identity.token, made.identity.certificate, made.identity.key, "CLUSTERTOOL_MARK"):
        assert secret
        assert secret not in text
    for secret in (made.identity.certificate, made.identity.key):
        assert secret not in repr(made)


def test_secrets_are_three_stars() -> None:
    process: dict[str, Any] = as_dict(environments_and_secrets())["nodes"][0]["processes"][0]
    assert process["env"]["API_KEY"] == "***"
    assert [process["env"][name] for name in "ABCD"] == ["host", "toml", "laptop", "line"]


def test_a_secret_by_any_other_way_is_masked_too() -> None:
    cluster = cluster_of(hosts(1), ENV={"API_KEY": SECRET}, SECRETS=["API_KEY"])
    assert SECRET not in json.dumps(as_dict(plan_of(cluster, {"env": {"API_KEY": SECRET}}, env=(f"API_KEY={SECRET}",))))


def test_an_identity_changes_nothing_else() -> None:
    made = ps_by_lists()
    other = replace(
        made, identity=replace(made.identity, token="t", certificate="c", key="k", created=1.0, owner="bob")
    )
    assert as_dict(other) == as_dict(made)
