"""inv check on nodes with cards: what is wrong with them stands in the matrix, in time to do something about it."""

from __future__ import annotations

import os

import pytest

from tests.cli import USER
from tests.nvml import SICK, give
from tests.ssh.test_cli_verbs import WAITS, detached


@pytest.fixture
def three(site, nvml):
    """Three nodes; the first two have eight cards each."""
    made = site(3)
    made.drivers = give(made, nvml, 0, 1)
    yield made
    if made.living():
        made.clustertool("stop", "--all", "--force")


def test_faulty_cards_and_the_jobs_on_them(three):
    three.drivers[0].runs((1, os.getpid(), 3072))
    done = three.clustertool("check", "--only", ",".join(map(three.name, (0, 1)))).ends(0)
    [first], [second] = (done.lines(three.name(node)) for node in (0, 1))
    memory = "7 uncorrected ECC errors, bad memory in use until it is reset"
    heat = "96 C, it slows down at 93 C, slowed down now: hardware slowdown, hardware thermal"
    for row in (first, second):
        assert "8 x NVIDIA Test 80GB" in row and "550.54.15 (CUDA 12.4)" in row
        assert f"warn gpu {SICK}: {memory}, {heat}  " in row
    assert f"(pid {os.getpid()}, user {USER}) 3.2 GB" in first and "none" in second
    assert done.lines(f"fix users on {three.name(0)}: wait for its end")


def test_a_node_without_cards_among_others_is_odd(three):
    found = three.clustertool("check", "--json").ends(0).json
    cells = {row["node"]: row["findings"] for row in found["nodes"]}
    assert cells[three.name(2)]["devices"]["text"] == "no devices, others 8"
    three.workspace(train_py=WAITS)
    err = three.clustertool("--dry", "run", "-w", "job").ends(0).err
    assert f"unequal devices: 8 x gpu on 127.0.0.[2-3]; none on {three.name(2)} (" in err and len(err.splitlines()) <= 6
    assert not {"driver", "health", "users"} & set(cells[three.name(2)])
    assert not list(three.home(2).rglob("pynvml.py"))


def test_a_lost_card_is_an_error_and_a_check_can_be_off(three):
    three.drivers[1].loses_a_card()
    cards = ("--only", ",".join(map(three.name, (0, 1))))
    done = three.clustertool("check", "--json", *cards).ends(69)
    assert done.json["exit"] == {"code": 69, "source": "tool", "reason": "gpu 6: GPU is lost"}
    three.conf(CHECKS_OFF=["health"])
    found = three.clustertool("check", "--json", *cards).ends(0).json["nodes"]
    assert len(found) == 2 and all("users" in row["findings"] and "health" not in row["findings"] for row in found)


def test_a_job_on_cards_is_known_by_its_lock(three):
    three.workspace(train_py=WAITS)
    job = detached(three, "--devices", "2,3", "--nproc-per-node", 1, "--only", three.name(0))
    found = three.clustertool("check", "--json", "--only", three.name(0)).ends(0).json["nodes"][0]["findings"]
    assert found["users"]["level"] == "warn"
    assert found["users"]["text"].endswith(f"gpu 2,3 is in use by job {job} of user {USER}")


def test_exclusive_mode_is_a_warning_where_ranks_would_share(three):
    folder = three.workspace(train_py=WAITS)
    (folder / "job.toml").write_text("[trainer]\nper_node = 10\n")
    arguments = ("check", "--json", "--workspace", folder)
    cell = three.clustertool(*arguments, "--only", three.name(0)).ends(0).json["nodes"][0]["findings"]["health"]
    assert "several ranks would share it" not in cell["text"]  # cards 0 and 1 are shared, the exclusive one is not
    (folder / "job.toml").write_text("[trainer]\nper_node = 16\n")
    cell = three.clustertool(*arguments, "--only", three.name(0)).ends(0).json["nodes"][0]["findings"]["health"]
    assert f"gpu {SICK}: exclusive process, and several ranks would share it, 7 uncorrected" in cell["text"]
