"""Jobs and the cards they are given: --devices auto, what is in use by whom, and --wait."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cli import REPO, USER
from tests.nvml import SICK, give, in_start_file
from tests.ssh.test_cli_verbs import WAITS, detached

SAYS = (
    WAITS
    + """
    seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    print("cards", seen[int(os.environ["LOCAL_RANK"])], ",".join(seen), os.environ["CUDA_DEVICE_ORDER"], flush=True)
"""
)


@pytest.fixture
def one(site, nvml):
    """A node with eight cards, and a workspace `job` that waits until one.go()."""
    made = site(1)
    [made.driver] = give(made, nvml, 0)
    made.workspace(train_py=SAYS)
    made.go = (made.home(0) / "go").touch
    yield made
    if made.living():
        made.clustertool("stop", "--all", "--force")


def cards(site, job):
    """The card of each rank, as a program finds it by LOCAL_RANK, and what each rank sees."""
    logs = sorted((site.job_dir(0, job) / "log").glob("workerlog.*"))
    assert all("PCI_BUS_ID" in log.read_text() for log in logs)
    reported = [line.split()[1:3] for log in logs for line in log.read_text().splitlines() if line.startswith("cards")]
    return [card for card, _ in reported], {seen for _, seen in reported}


def test_a_second_job_learns_which_job_has_its_card_and_waits_for_it(one):
    job = detached(one, "--devices", "0,1")
    done = one.clustertool("run", "-w", "job", "--devices", "1,2").ends(69)
    assert f"{one.name(0)}: gpu 1 is in use by job {job} of user {USER}" in done.err and "--wait" in done.err
    assert len(one.jobs(0)) == 1  # nothing was sent, nothing is left
    dry = one.clustertool("--dry", "run", "-w", "job", "--devices", "1,2").ends(69)
    assert f"job {job}" in dry.err
    rows = {row.split()[1]: row for row in one.clustertool("gpus").ends(0).lines(f"{one.name(0)} ")}
    assert f"job {job} ({USER})" in rows["0"] and f"job {job} ({USER})" in rows["1"] and "free" in rows["2"]
    # Ctrl+C ends the waiting.
    waiting = one.start("run", "-w", "job", "--devices", "1", "--wait")
    waiting.says("waiting for devices")
    waiting.signal(signal.SIGINT)
    waiting.wait().ends(130)
    assert len(one.jobs(0)) == 1
    assert one.clustertool("status", "--job", job, "--json").ends(0).json["state"] == "running"
    # It is reported once, and goes on by itself.
    waiting = one.start("run", "-w", "job", "--devices", "1,2", "--wait")
    waiting.says(f"waiting for devices: {one.name(0)}: gpu 1 is in use by job {job} of user {USER}")
    one.clustertool("stop", "--job", job).ends(0)
    one.go()
    done = waiting.wait()
    assert done.code == 0 and done.err.count("waiting for devices") == 1, done.err


def test_auto_takes_unused_devices(one):
    """Neither what a job has locked, nor what somebody computes on, nor a card that is broken."""
    one.driver.runs((2, os.getpid(), 100))
    one.driver.loses_a_card()  # number 6
    detached(one, "--devices", "0,1")
    few = detached(one, "--devices", "auto", "--nproc-per-node", 2)
    rest = detached(one, "--devices", "auto")
    one.go()
    one.gone()
    assert cards(one, few) == (["3", "4"], {"3,4"})
    assert cards(one, rest) == (["5", "7"], {"5,7"})


def test_auto_says_what_is_in_the_way(one):
    one.driver.runs(*((card, os.getpid(), 100) for card in range(8) if card != SICK))
    done = one.clustertool("run", "-w", "job", "--devices", "auto", "--nproc-per-node", 2).ends(69)
    assert "1 of 2 devices are free" in done.err and f"(pid {os.getpid()}, user {USER})" in done.err


def test_auto_says_what_is_wrong_with_the_devices_that_it_takes(one):
    done = one.clustertool("run", "-w", "job", "--devices", "auto", "--dry").ends(0)
    reported = [line for line in done.err.splitlines() if f"gpu {SICK}:" in line]
    assert any("7 uncorrected ECC errors (reset the device" in line for line in reported) and any(
        "96 C" in line for line in reported
    )
    assert "gpu 4:" not in done.err
    fit = one.clustertool("run", "-w", "job", "--devices", "auto", "--nproc-per-node", 2, "--dry").ends(0)
    assert f"gpu {SICK}" not in fit.err


def test_a_device_that_is_not_there(one):
    done = one.clustertool("run", "-w", "job", "--devices", "7,8").ends(69)
    assert f"{one.name(0)}: there is no device 8 (--devices)" in done.err and "the node has gpu 0, 1" in done.err


def test_a_node_without_devices(site):
    bare = site(1)
    bare.workspace(train_py="print('hello')")
    done = bare.clustertool("run", "-w", "job", "--gpus", "0").ends(69)
    assert "there is no device 0 (--devices)" in done.err and "--nproc-per-node" in done.err
    assert "the node has no devices" in bare.clustertool("run", "-w", "job", "--devices", "auto").ends(69).err


def stand_in(one):
    """For torch. Who else computes on this machine is no matter."""
    with open(one.folder / "conf.py", "a") as conf:
        conf.write(
            f"ENV = {{'PYTHONPATH': {str(REPO / 'tests' / 'data')!r}}}\nCHECKS_OFF = ['load', 'memory', 'shm']\n"
        )


def test_check_tries_a_framework_on_each_card(one):
    """One trainer a card, as a job has them; what is wrong is reported with the numbers that the node's cards have."""
    stand_in(one)
    done = one.clustertool("check", "--framework", "torch").ends(0)
    assert "testing torch on 1 node (8 ranks)" in done.err and "torch 0.1 on nccl" in done.out
    two_cards = ("check", "--framework", "torch", "--only", f"{one.name(0)}:4,5")
    (one.home(0) / "fault").write_text("5")
    done = one.clustertool(*two_cards).ends(69)
    assert "FAIL device 5: RuntimeError: CUDA error: an illegal memory access was encountered" in done.out
    (one.home(0) / "fault").write_text("blind")
    done = one.clustertool(*two_cards).ends(69)
    assert "FAIL device 4, device 5: RuntimeError: torch (built for 99.9) sees 0 of 2" in done.out
    one.gone()
    assert not one.jobs(0)


def test_check_tries_no_framework_where_a_job_computes(one):
    stand_in(one)
    job = detached(one, "--devices", "2")
    done = one.clustertool("check", "--framework", "torch").ends(0)
    assert f"warn not tried: gpu 2 is in use by job {job} of user {USER}" in done.out
    assert [path.name for path in one.jobs(0)] == [f"JOB{job}"]


def test_two_names_of_one_machine(site, nvml):
    """Addresses of the loopback show that it is one machine; another name for it is an error."""
    pair = site(2)
    for node in (0, 1):
        in_start_file(pair.home(node), nvml.folder)
    pair.workspace(train_py=SAYS)
    entries = [f"{USER}@{server.entry}" for server in pair.servers]
    names = f"{pair.name(0)} and {pair.name(1)}"
    assert (
        f"{names} share gpu 0,1,2,3,4,5,6,7: they are one machine"
        in pair.clustertool("--dry", "run", "-w", "job").ends(0).err
    )
    two = [entries[0], {"host": entries[1], "address": "10.9.9.9"}]
    pair.conf(HOSTS=two)
    for done in (pair.clustertool("run", "-w", "job").ends(69), pair.clustertool("check").ends(69)):
        assert (
            f"is the same machine as {pair.name(0)}, and gpu 0,1,2,3,4,5,6,7 would be given to both"
            in done.out + done.err
        )
    assert not pair.jobs(0)
    parts = f"{pair.name(0)}:0,1@{pair.name(1)}:2,3"
    pair.clustertool("--dry", "run", "-w", "job", "--only", parts).ends(0)
    assert "same machine" not in pair.clustertool("check", "--only", parts).out
