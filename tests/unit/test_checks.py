"""Checks: all findings of all nodes at once, each with the node, what is wrong and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import cluster_of, facts_of, hosts

from clustertool.model.checks.device_counts import CHECKS
from clustertool.model.checks.each_node import check, covers, disk, errors, unreachable
from clustertool.model.facts import ContainerFacts, Facts
from clustertool.model.finding import COLUMNS, Finding, Seen, cells
from clustertool.model.hints import PROGRAM

NOW = 1000.0
DOCKER = ContainerFacts("docker", image_id="1", digest="sha256:1", size=1)
GOOD: dict[str, Any] = {"user": "ann", "python": "3.9.2", "disk_free": 10**12, "time": NOW, "shm": 10**10}


def found(
    keys: dict[str, Any] | None = None, pings: dict[int, bool | None] | None = None, **each: Any
) -> dict[str, Finding]:
    """Column -> finding of one node."""
    cluster = cluster_of(hosts(1), **(keys or {}))
    findings = check(cluster, facts_of(cluster, **{**GOOD, **each}), seen(pings, 1))
    assert all(finding.fix for finding in findings if finding.level in ("warn", "error"))
    return cells(findings, 0)


def seen(pings: dict[int, bool | None] | None, nodes: int) -> Seen:
    return Seen(pings or {}, dict.fromkeys(range(nodes), (NOW, NOW)))


def test_stacks_of_containers_of_docker_need_more_than_others() -> None:
    """What docker starts is not below the supervisor, which yama's 1 requires."""
    podman = replace(DOCKER, runtime="podman")
    assert "stacks" not in found(ptrace_scope=1, examined=True, container=podman)
    assert found(ptrace_scope=1, examined=True, container=DOCKER)["stacks"].fix.endswith("ptrace_scope=0")
    assert found(ptrace_scope=2, examined=True, container=podman)["stacks"].fix.endswith("ptrace_scope=1")


def test_a_good_node_is_ok_in_every_column() -> None:
    columns = found(pings={0: True})
    assert {finding.level for finding in columns.values()} == {"ok"}
    assert set(columns) == set(COLUMNS) - {
        "queue",
        "workspace",
        "mesh",
        "jobs",
        "packages",
        "mpi",
        "container",
        "stacks",
        "framework",
    } - set(CHECKS)
    assert (columns["ssh"].text, columns["python"].text, columns["nic"].text) == ("ann", "3.9.2", "eth0")


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"disk_free": 0}, "disk", "error", "needed below /jobs"),
    ({"disk_free": 100 << 20}, "disk", "warn", "105 MB free"),
    ({"inodes": 9}, "disk", "warn", "9 inodes free"),
    ({"inodes": 0}, "disk", "error", "0 inodes free"),
    ({"ptrace_scope": 2, "examined": True}, "stacks", "warn", "ptrace_scope is 2"),
    ({"ptrace_scope": 3, "examined": True}, "stacks", "warn", "ptrace_scope is 3"),
    ({"ptrace_scope": 1, "examined": True, "container": DOCKER}, "stacks", "warn", "ptrace_scope is 1"),
    ({"memory": (64 << 30, 100 << 20)}, "memory", "warn", "105 MB of 68.7 GB left"),
    ({"load": 7.0, "cpus": 4}, "load", "warn", "7 on 4 cores"),
    ({"limits": (("nofile", 256, 512), ("nproc", -1, -1), ("memlock", 65536, 65536))}, "limits", "warn", "nofile 512"),
    ({"limits": (("nproc", 100, 100),)}, "limits", "warn", "nproc 100"),
    ({"limits": (("memlock", 65536, 65536),), "rdma": True}, "limits", "warn", "memlock 64 kB"),
    ({"shm": 64 << 20}, "shm", "warn", "67.1 MB free in /dev/shm"),
    ({"shm": -1}, "shm", "warn", "no /dev/shm"),
    ({"job_proxies": ("http_proxy",)}, "proxy", "warn", "http_proxy for 10.0.0.1"),
    ({"time": NOW + 60}, "clock", "warn", "+60 s"),
    ({"time": NOW - 6}, "clock", "warn", "-6 s"),
    (
        {"problems": (("root", "error", "ROOT_DIR /jobs is not writable", "choose another"),)},
        "root",
        "error",
        "not writable",
    ),
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
    cluster = cluster_of(hosts(1))
    for free, level in ((1 << 30, "error"), ((2 << 30) + 1, "warn"), (3 << 30, "ok")):
        facts = facts_of(cluster, **{**GOOD, "disk_free": free})
        assert disk(facts[0], 2 << 30).level == level


def test_ports_that_conf_demands_are_checked() -> None:
    owner: dict[str, Any] = {"busy": frozenset([7165, 6160]), "listeners": ((7165, "nginx (pid 1)"),)}
    assert found(**owner)["ports"].level == "ok"  # the default port would only be avoided
    assert found({"PADDLE_PORT": 7164, "PADDLE_PORTS_NUM_FOR_SPARSE": 0}, **owner)["ports"].level == "ok"
    finding = found({"PADDLE_PORT": 7164, "LEAD_PORT": 6160, "START_PORT": 6170}, **owner)["ports"]
    assert finding.level == "error"
    assert (
        finding.text == "7165 (PADDLE_PORT) is in use by nginx (pid 1); 6160 (LEAD_PORT) is in use by another process"
    )
    assert found({"START_PORT": 6160}, **owner)["ports"].level == "error"


def test_the_coordinators_port_matters_on_the_first_node_only() -> None:
    cluster = cluster_of(hosts(2), LEAD_PORT=6160)
    facts = facts_of(cluster, **GOOD)
    facts[1] = replace(facts[1], busy=frozenset([6160]))
    assert not errors(check(cluster, facts, seen({}, 2)))


def test_a_ping_decides_nothing_for_a_node_that_answered() -> None:
    assert found(pings={0: False})["ping"].level == "warn"
    assert found(pings={0: None})["ping"] == Finding(0, "ping", "skip", "not measured")
    assert "ping" not in found()


def test_a_node_that_did_not_answer_at_all() -> None:
    silent = unreachable(3, {3: False}, "no route", "look")
    assert [(f.node, f.column, f.level) for f in silent] == [(3, "ssh", "error"), (3, "ping", "error")]
    up = unreachable(3, {3: True}, "refused", "start sshd")
    assert [(f.column, f.level) for f in up] == [("ssh", "error"), ("ping", "ok")]
    assert [f.column for f in unreachable(3, {}, "refused", "start sshd")] == ["ssh"]
    bare = unreachable(3, {3: False}, "there is no python3", "install it", "python")
    assert [(f.column, f.level) for f in bare] == [("python", "error"), ("ping", "warn")], "ssh reached it"


def test_checks_that_are_off_are_not_there() -> None:
    columns = found({"CHECKS_OFF": ["clock", "disk", "ping"]}, pings={0: False}, time=0.0, disk_free=0)
    assert not {"clock", "disk", "ping"} & set(columns)


@pytest.mark.parametrize(("carrier", "level", "text"), [("swarm", "ok", "no"), ("rsync", "error", "no rsync")])
def test_a_node_needs_rsync_only_if_it_is_the_carrier(carrier: str, level: str, text: str) -> None:
    finding = found({"DISPATCH": carrier}, rsync=False)["rsync"]
    assert (finding.level, finding.text) == (level, text)


def test_an_rsync_that_does_not_run_is_a_finding() -> None:
    for carrier, level in (("swarm", "warn"), ("rsync", "error")):
        finding = found({"DISPATCH": carrier}, rsync_error="libpopt.so.0: cannot open shared object file")["rsync"]
        assert (finding.level, finding.text[:24]) == (level, "does not run: libpopt.so")


def test_all_nodes_are_reported_at_once_in_their_order() -> None:
    cluster = cluster_of(hosts(3))
    facts: dict[int, Facts] = facts_of(cluster, **{**GOOD, "disk_free": 0})
    assert [finding.node for finding in errors(check(cluster, dict(reversed(facts.items())), seen({}, 3)))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("hard", "shown"), [(4096, "4096 open files"), (-1, "1048576 open files"), (1 << 30, "1048576 open files")]
)
def test_the_limit_of_open_files_that_ranks_get_is_shown(hard: int, shown: str) -> None:
    assert found(limits=(("nofile", 256, hard),))["limits"].text == shown


def test_a_good_result_is_reported() -> None:
    fine: list[dict[str, Any]] = [
        {"inodes": -1},
        {"memory": (0, 0)},
        {"load": 5.9, "cpus": 4},
        {"load": 9.0, "cpus": 0},
        {"limits": (("nofile", 256, 4096), ("nproc", -1, -1), ("memlock", 65536, 65536))},
        {"limits": (("memlock", -1, -1),), "rdma": True},
        {"job_proxies": ("http_proxy",), "no_proxy": "example.com, 10.0.0.0/8"},
    ]
    for facts in fine:
        assert {finding.level for finding in found(**facts).values()} == {"ok"}, facts


def test_what_is_left_of_jobs() -> None:
    left = found(examined=True, own="10.0.0.1", leftovers=(("old", 3), ("older", 1)))["jobs"]
    assert (left.level, left.text) == ("warn", "3 left of job old, 1 left of job older")
    assert f"{PROGRAM} stop --job old; {PROGRAM} stop --job older" in left.fix
    assert found(examined=True)["jobs"].level == "ok"
    assert found(leftovers=(("old", 3),))["jobs"].level == "warn"  # `run` asks for these, too
    assert "jobs" not in found()


def test_the_slow_phase_of_a_login_is_reported_with_its_cause() -> None:
    cluster = cluster_of(hosts(1))
    slow = Seen(phases={0: {"connect": 0.1, "login": 6.2, "agent": 4.9}})
    ssh = cells(check(cluster, facts_of(cluster, **GOOD), slow), 0)["ssh"]
    assert (ssh.level, ssh.text) == ("warn", "login took 6 s")
    assert "GSSAPIAuthentication" in ssh.fix and "UseDNS" not in ssh.fix


def test_the_worst_of_a_column_is_its_cell() -> None:
    findings = [
        Finding(0, "nic", "ok", "eth0"),
        Finding(0, "disk", "warn", "little", "a"),
        Finding(0, "nic", "error", "one", "b"),
        Finding(0, "nic", "error", "two", "b"),
        Finding(1, "nic", "error", "three", "c"),
        Finding(0, "nic", "warn", "four", "d"),
    ]
    assert cells(findings, 0) == {
        "disk": Finding(0, "disk", "warn", "little", "a"),
        "nic": Finding(0, "nic", "error", "one; two", "b"),
    }


def test_nodes_of_one_machine_tell_its_load_alike() -> None:
    cluster = cluster_of(hosts(2))
    facts = facts_of(cluster, machines=[0, 0], **GOOD, cpus=1)
    facts = {node: replace(fact, load=8.0 + node) for node, fact in facts.items()}
    loads = [f.text for f in check(cluster, facts, seen({}, 2)) if f.column == "load"]
    assert loads == ["8 on 1 cores"] * 2


@pytest.mark.parametrize(
    "no_proxy, address, yes",
    [
        ("*", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.10", False),
        ("", "10.0.0.1", False),
        ("10.", "10.0.0.1", True),
        ("10.0.0.0/24", "10.0.1.1", False),
        ("10.0.0.0/16", "10.0.1.1", True),
        (".cluster", "node1.cluster", True),
        ("*.cluster", "node1.cluster", True),
        ("a/b", "10.0.0.1", False),
    ],
)
def test_whom_no_proxy_covers(no_proxy: str, address: str, yes: bool) -> None:
    assert covers(no_proxy, address) is yes
