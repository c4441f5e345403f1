"""inv gpus: the devices of the cluster, by node, with their users and jobs."""

from __future__ import annotations

import os
import re

import pytest

from tests.cli import USER
from tests.nvml import SICK, give
from tests.ssh.test_cli_verbs import WAITS, detached

MIB = 1 << 20


@pytest.fixture
def pair(site, nvml):
    """Two nodes; the first has eight cards."""
    made = site(2)
    made.drivers = give(made, nvml, 0)
    yield made
    if made.living():
        made.clustertool("stop", "--all", "--force")


def test_cards_and_their_users(pair):
    pair.drivers[0].runs((1, os.getpid(), 3072), (SICK, os.getpid(), 1024))
    done = pair.clustertool("gpus").ends(0)
    name = pair.name(0)
    assert f"{name}: 8 x NVIDIA Test 80GB, driver 550.54.15, CUDA 12.4" in done.out
    rows = {row.split()[1]: row for row in done.lines(f"{name} ")}
    assert sorted(rows) == [str(number) for number in range(8)]
    assert re.search(r"^\S+ +0 +NVIDIA Test 80GB +40 C +0 % +70/400 W +0.0/80 GiB +free +-$", rows["0"])
    assert re.search(rf"91 % .* 3.0/80 GiB +used +{USER} \S+ \(pid {os.getpid()}\) 3.0 GiB$", rows["1"])
    assert "96 C" in rows[str(SICK)]
    ill = "7 ECC errors, memory repair pending, hardware slowdown, hardware thermal, exclusive process, used"
    assert ill in rows[str(SICK)]
    assert done.out.rstrip().endswith(f"no devices: {pair.name(1)}")
    found = pair.clustertool("gpus", "--json").ends(0).json
    assert list(found["nodes"]) == [pair.name(node) for node in range(2)]
    first, second = (found["nodes"][pair.name(node)] for node in (0, 1))
    assert (first["kind"], first["ids"], first["cuda"]) == ("gpu", list(range(8)), "12.4")
    assert first["devices"][SICK]["ecc_uncorrected"] == 7
    assert (second["kind"], second["devices"]) == ("cpu", [])
    assert found["unreachable"] == {}


def test_a_job_on_a_card(pair):
    pair.workspace(train_py=WAITS)
    job = detached(pair, "--nproc-per-node", 1, "--only", pair.name(0))
    rank = next(process.pid for process in pair.living() if process.argv[-1:] == ("train.py",))
    pair.drivers[0].runs((2, rank, 100))
    row = next(row for row in pair.clustertool("gpus").ends(0).lines(pair.name(0)) if row.split()[1] == "2")
    assert f"(pid {rank}) job {job} trainer 0 0.1 GiB" in row
    found = pair.clustertool("gpus", "--json").ends(0).json
    [process] = found["nodes"][pair.name(0)]["devices"][2]["processes"]
    assert (process["job"], process["role"], process["rank"], process["user"]) == (job, "trainer", "0", USER)
    assert process["memory"] == 100 * MIB


def test_a_node_that_does_not_answer_is_named_and_the_others_are_shown_with_a_lost_card(pair):
    pair.drivers[0].loses_a_card()
    pair.servers[1].stop()
    done = pair.clustertool("gpus").ends(69)
    rows = {row.split()[1]: row for row in done.lines(f"{pair.name(0)} ")}
    assert len(rows) == 8 and pair.name(1) in done.err
    assert "GPU is lost" in rows["6"] and "free" in rows["7"]
    found = pair.clustertool("gpus", "--json").ends(69).json
    assert list(found["unreachable"]) == [pair.name(1)] and len(found["nodes"]) == 1


def test_on_a_terminal(pair):
    running = pair.start("gpus", terminal=True, columns=160)
    running.says("hardware thermal")
    assert running.wait().code == 0


def test_no_devices_anywhere(site):
    done = site(2).clustertool("gpus").ends(0)
    assert done.out == "no devices: 127.0.0.[2-3]\n"
