"""`inv check --framework` on nodes whose framework is a stand-in: what is wrong with it is named, and nothing of it stays."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.cli import REPO, LabSite, until
from tests.node.harness import read

STAND_IN = str(REPO / "tests" / "data")
RULE = ["ip", "rule", "add", "pref", "9", "ipproto", "tcp"]


def with_torch(made: LabSite) -> Iterator[LabSite]:
    """Give nodes the stand-in for torch."""
    made.conf(ENV={"PYTHONPATH": STAND_IN}, CHECKS_OFF=["load"])
    yield made
    made.gone()
    assert not [made.jobs(node) for node in range(made.count) if made.jobs(node)], "the trial's directory is left"


@pytest.fixture
def three(site):
    yield from with_torch(site(3))


@pytest.fixture
def pair(site):
    yield from with_torch(site(2))


def spoil(site: LabSite, **faults: str) -> None:
    """spoil(site, node1="absent")"""
    for node, fault in faults.items():
        (site.home(int(node[4:])) / "fault").write_text(fault)


def cells(site: LabSite, *args: object, code: int = 69) -> list[tuple[str, str, str]]:
    """(level, text, fix) of each node."""
    done = site.inv("check", "--framework", "torch", "--json", *args).ends(code)
    found = [row["findings"]["framework"] for row in done.json["nodes"]]
    return [(finding["level"], finding["text"], finding["fix"]) for finding in found]


def test_a_framework_that_works_on_all_nodes(pair):
    done = pair.inv("check", "--framework", "torch").ends(0)
    assert re.search(r"^node\[0-1\] .* torch 0\.1 on gloo$", done.out, re.M), done.out
    assert "testing torch on 2 nodes (2 ranks); gives up after 60 s without progress" in done.err
    answer = pair.inv("check", "--framework", "torch", "--json").ends(0).json["framework"]
    assert answer["name"] == "torch"
    assert [(rank["rank"], rank["node"], rank["at"], rank["nic"]) for rank in answer["ranks"]] == [
        (0, "node0", "done", "eth0"),
        (1, "node1", "done", "eth0"),
    ]
    assert pair.inv("jobs", "--json").ends(0).json["jobs"] == []


@pytest.mark.chaos
def test_nodes_with_one_home(site):
    """Each has its part of the trial in a folder of its own, and nothing is left of any."""
    two = site(2, shared_home=True)
    two.conf(ENV={"PYTHONPATH": STAND_IN}, CHECKS_OFF=["load"], START_PORT=7700, LEAD_PORT=7800)
    assert [cell[:2] for cell in cells(two, code=0)] == [("ok", "torch 0.1 on gloo")] * 2
    two.gone()
    assert not two.jobs(0) and not two.jobs(1)


def test_all_nodes_faults_are_reported_at_once(three):
    spoil(three, node0="absent", node1="device", node2="crash")
    absent, device, crash = cells(three)
    assert absent[:2] == ("bad", "no torch for the job's python3")
    assert "PRELUDE" in absent[2]
    assert device[:2] == ("bad", "cpu: RuntimeError: CUDA error: an illegal memory access was encountered")
    assert crash[:2] == ("bad", "import torch: ended with signal 6 (abort): Illegal instruction, said the stand-in")


@pytest.mark.chaos
def test_a_rank_that_only_waits_is_not_to_blame(three):
    spoil(three, node1="absent")
    began = time.monotonic()
    first, second, third = cells(three)
    assert (first[:2], third[:2]) == (("skip", "torch 0.1 waited for node1"),) * 2
    assert second[0] == "bad"
    assert time.monotonic() - began < 50, "it was known long before the deadline"


@pytest.mark.chaos
def test_what_never_ends_is_ended_and_reported(three):
    spoil(three, node2="slow")
    assert [cell[:2] for cell in cells(three, "--timeout", 8)] == [
        *[("skip", "torch 0.1 waited for node2")] * 2,
        ("bad", "import torch: not done in 8 s"),
    ]
    spoil(three, node2="away")
    assert {cell[:2] for cell in cells(three, "--timeout", 8)} == {("bad", "init_process_group hangs, not done in 8 s")}


@pytest.mark.chaos
def test_a_sum_that_is_wrong(three):
    spoil(three, node1="wrong")
    assert {cell[:2] for cell in cells(three)} == {("bad", "all_reduce: RuntimeError: the sum is 7 to 7, not 6")}


@pytest.mark.parametrize(
    ("node", "text", "peers"),
    [
        pytest.param(
            2, "init_process_group: RuntimeError: connect to 10.77.0.1:", "node[0-1]", marks=pytest.mark.chaos
        ),  # which connects to the others, and says so
        (0, "init_process_group hangs, not done in 8 s", "node[1-2]"),  # to which the others connect, in vain
    ],
)
def test_a_firewall_that_knows_only_the_jobs_ports(three, node, text, peers):
    """The mesh is whole at the job's ports. Where the kernel chooses them, one node sends nothing."""
    assert three.lab.exec(node, [*RULE, "sport", "32768-60999", "dport", "32768-60999", "blackhole"]).returncode == 0
    done = three.inv("check", "--framework", "torch", "--timeout", 8, "--json").ends(69)
    rows = {row["node"]: row["findings"] for row in done.json["nodes"]}
    assert all(link["answer"] == "ok" for link in done.json["mesh"]["links"])
    cell = rows[f"node{node}"]["framework"]
    assert (cell["level"], cell["text"][: len(text)]) == ("bad", text)
    assert "from 32768 to 60999 (firewall)" in cell["fix"]
    reported = rows[f"node{node}"]["mesh"]["text"]
    assert f"{peers} -> node{node}: no answer" in reported and reported.endswith("(ports 32768 and up)"), reported


@pytest.mark.chaos
def test_a_node_that_dies_meanwhile(site):
    three = site(3)
    three.conf(ENV={"PYTHONPATH": STAND_IN}, CHECKS_OFF=["load"], LOSS_TIMEOUT=5)
    spoil(three, node1="slow")
    running = three.start("check", "--framework", "torch")
    running.says("waiting for import torch on node1, up to [0-9]+ s more")
    three.lab.crash(1)
    done = running.wait().ends(69)
    assert re.search(r"^node1 .* FAIL import torch: (node node1 is|the connection was) lost", done.out, re.M), done.out
    assert "node1: did not answer" in done.err
    assert not three.living() and not three.jobs(0) and not three.jobs(2)


def test_it_is_not_tried_where_something_else_is_wrong(pair):
    pair.conf(ENV={"PYTHONPATH": STAND_IN}, CHECKS_OFF=["load"], START_PORT=7777)
    hold = "import socket, time; s = socket.create_server(('', 7777)); print('on', flush=True); time.sleep(600)"
    pair.lab.exec(1, ["sh", "-c", f'setsid python3 -c "{hold}" >/tmp/out 2>&1 & echo $! > /tmp/pid'])
    until(lambda: read(str(pair.lab.tmp(1) / "out")) == b"on\n")
    try:
        done = pair.inv("check", "--framework", "torch").ends(69)
    finally:
        pair.lab.exec(1, ["sh", "-c", "kill -9 $(cat /tmp/pid)"])
        until(lambda: not pair.living())
    assert "torch is not tried: node1 must have no error, or be left out with --skip" in done.err
    assert "fix ports on node1" in done.out


def test_ctrl_c_ends_all_of_it_at_once(pair):
    spoil(pair, node1="slow")
    running = pair.start("check", "--framework", "torch")
    running.says("waiting for import torch on node1, up to [0-9]+ s more")
    running.signal()
    done = running.wait().ends(130)
    assert done.last == "clustertool: exit 130 (tool): Ctrl+C"
    assert not pair.living()


@pytest.mark.chaos
def test_it_ends_without_the_laptop(site):
    two = site(2)
    two.conf(ENV={"PYTHONPATH": STAND_IN}, CHECKS_OFF=["load"])
    spoil(two, node1="slow")
    running = two.start("check", "--framework", "torch")
    running.says("waiting for import torch on node1, up to [0-9]+ s more")
    assert two.living()
    running.signal(signal.SIGKILL)
    two.gone(60.0)


@pytest.mark.chaos
def test_the_jobs_environment_counts(three):
    """job.toml's, with as many trainers as it says; what else the job would do is no matter."""
    (three.workspace(train_py="") / "job.toml").write_text(
        'mode = "ps"\n[trainer]\ncommand = ["false"]\nper_node = 2\n[env]\nCUDA_VISIBLE_DEVICES = "3"\n'
    )
    answer = three.inv("check", "--framework", "torch", "-w", "job", "--json").ends(0).json
    ranks = [(rank["node"], rank["at"], rank["what"], rank["backend"]) for rank in answer["framework"]["ranks"]]
    assert sorted(ranks) == [(f"node{node}", "done", "device 3", "nccl") for node in (0, 0, 1, 1, 2, 2)]


def test_options(site):
    one = site(1)
    assert "--framework 'jax'" in one.inv("check", "--framework", "jax").ends(64).err
    assert "--timeout has no effect without --framework" in one.inv("check", "--timeout", 5).ends(64).err
    assert "--timeout 'soon'" in one.inv("check", "--framework", "torch", "--timeout", "soon").ends(64).err
    one.conf(CHECKS_OFF=["framework"])
    assert "CHECKS_OFF in conf.py names framework" in one.inv("check", "--framework", "torch").ends(64).err
