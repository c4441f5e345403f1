"""Elastic jobs of real frameworks on four machines: whatever is lost, the training ends with the losses of an undisturbed one.

Each rank writes when it lives (elastic_training.py). At the end of each test no two epochs had living ranks at the same time,
each epoch went on after the newest checkpoint, and nothing is left. `-s` shows the seconds from a loss to the next steps.
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli import CLUSTERTOOL, LabSite, until
from tests.frameworks.elastic_training import GOAL, LOSS, NODES, ElasticTraining, Resumed, kill_all
from tests.lab.conftest import lab, module_lab, site
from tests.lab.lab_store import LabStore

__all__ = ["lab", "module_lab", "site"]  # fixtures: nodes with networks of their own

pytestmark = pytest.mark.frameworks
BOTH = ["digits-torch", "digits-paddle"]
ALL = frozenset(range(NODES))
EPOCHS = 40
SLACK = 4.0  # seconds that other work on this machine may cost
RETURN = 'grow = "restart"'  # a node that comes back takes part at once
Undisturbed = Callable[[str], Mapping[int, tuple[float, float]]]


@pytest.fixture(scope="module")
def undisturbed(module_lab, tmp_path_factory, digits) -> Undisturbed:
    """undisturbed("digits-torch") -> loss and accuracy by step of a job that loses no node."""
    known: dict[str, Mapping[int, tuple[float, float]]] = {}

    def of(name: str) -> Mapping[int, tuple[float, float]]:
        if name not in known:
            site = LabSite(tmp_path_factory.mktemp("undisturbed"), module_lab(NODES))
            job = ElasticTraining(site, name, digits, EPOCHS, pause=0)
            job.ends(job.start())
            known[name] = {step: (loss, accuracy) for step, loss, accuracy in job.printed()}
            job.check(known[name])
            assert len(known[name]) == EPOCHS and max(accuracy for _, accuracy in known[name].values()) > 0.9
            site.close()
            site.lab.close()
        return known[name]

    return of


@pytest.fixture
def training(site, digits) -> Callable[..., ElasticTraining]:
    def make(name: str, elastic: str = "") -> ElasticTraining:
        return ElasticTraining(site(NODES), name, digits, EPOCHS, elastic=elastic)

    return make


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Callable[[ElasticTraining], LabStore]]:
    if not shutil.which("etcd"):
        pytest.skip("needs etcd (package etcd-server): scripts/engine-packages.sh installs it")
    yield lambda job: LabStore(job.lab, tmp_path / "etcd")


def report(name: str, event: str, found: Resumed, goal: float = GOAL) -> None:
    print(f"{name}, {event}: the next ranks began after {found.tool:.1f} s, and had a step {found.program:.1f} s later")
    assert found.tool < goal + SLACK


@pytest.mark.parametrize("name", BOTH)
def test_one_node_is_killed_and_one_is_cut_off_and_both_come_back(training, undisturbed, name):
    job = training(name, RETURN)
    run = job.start()
    begun = job.epoch_of(ALL, run)
    killed = kill_all(job.lab, 1)
    again = job.epoch_of(ALL, run, begun)
    report(name, "node killed", job.resumed(killed))
    cut = time.time()
    job.lab.cut(2)
    without = job.epoch_of(ALL - {2}, run, again)
    report(name, "node cut off", job.resumed(cut))
    assert not job.living_ranks(2), "they ended with the lease"
    job.lab.heal(2)
    job.epoch_of(ALL, run, without)
    job.hurry()
    job.ends(run)
    job.check(undisturbed(name))


@pytest.mark.parametrize("name", BOTH)
def test_a_machine_is_frozen_for_half_a_minute(training, undisturbed, name):
    job = training(name, RETURN)
    run = job.start()
    begun = job.epoch_of(ALL, run)
    frozen = time.time()
    job.lab.freeze(2)
    without = job.epoch_of(ALL - {2}, run, begun)
    report(name, "machine frozen", job.resumed(frozen))
    until(lambda: time.time() > frozen + 30, 60)
    thawed = time.time()
    job.lab.thaw(2)
    job.epoch_of(ALL, run, without)
    assert job.events(2, "lease-lost")
    job.hurry()
    job.ends(run)
    job.check(undisturbed(name), {2: thawed})


@pytest.mark.parametrize("name", BOTH)
def test_what_a_node_sends_is_lost_and_what_is_sent_to_another_one(training, undisturbed, name):
    """Each comes back, and waits for the next epoch."""
    job = training(name)
    run = job.start()
    begun = job.epoch_of(ALL, run)
    cut, others = time.time(), [*(ALL - {1}), "laptop"]
    job.lab.drop([1], others)
    without = job.epoch_of(ALL - {1}, run, begun)
    report(name, "node is not heard", job.resumed(cut))
    assert not job.living_ranks(1)
    job.lab.deliver([1], others)
    until(lambda: job.events(0, "standby"), 60, lambda: f"node 1 to come back\n{run.err}")
    cut, others = time.time(), [*(ALL - {2}), "laptop"]
    job.lab.drop(others, [2])
    last = job.epoch_of(ALL - {2}, run, without)
    report(name, "node hears nothing", job.resumed(cut))
    assert not job.living_ranks(2)
    job.lab.deliver(others, [2])
    until(lambda: [one for one in job.events(0, "standby") if one["name"] == "node2"], 60, lambda: run.err)
    job.hurry()
    job.ends(run)
    job.check(undisturbed(name))
    assert max(attempt for _, attempt in job.lives()) == last


@pytest.mark.parametrize("name", BOTH)
def test_the_machine_of_the_coordinator_crashes(training, undisturbed, name):
    """The job ends with 75 on all nodes, and the command that it prints continues the training."""
    job = training(name, "timeout = 8")
    run = job.start("--job-id", "first")
    job.epoch_of(ALL, run)
    job.lab.crash(0)
    job.hurry()
    done = job.ends(run, 75)
    for node in ALL - {0}:
        (ended,) = job.events(node, "ended")
        assert (ended["code"], ended["state"]) == (75, "lost")
    command = re.search(r"start it again on the other nodes, .*: clustertool (run .*--skip=node0 .*)$", done.err, re.M)
    assert command, done.err
    again = job.site.start(*shlex.split(command[1]), program=CLUSTERTOOL, cwd=job.folder)
    job.ends(again)
    job.check(undisturbed(name))


@pytest.mark.parametrize("name", BOTH)
def test_the_machine_of_the_coordinator_crashes_and_there_is_a_store(training, undisturbed, etcd, name):
    job = training(name)
    run = job.start(
        "--elastic-server", etcd(job).url, "--lease", "6"
    )  # run is attached, also without the first coordinator
    begun = job.epoch_of(ALL, run)
    crashed = time.time()
    job.lab.crash(0)
    job.epoch_of(ALL - {0}, run, begun)
    found = job.resumed(crashed)
    report(name, "coordinator crashed, etcd", found, 2 * LOSS + 1)
    (cost,) = {event["seconds"] for node in ALL - {0} for event in job.events(node, "epoch") if event["attempt"]}
    assert cost == pytest.approx(found.tool, abs=3), "what status shows as the cost"
    job.hurry()
    job.ends(run)
    job.check(undisturbed(name))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("store", ["nowhere", "other half", "both halves"])
def test_two_halves_of_the_cluster_do_not_reach_each_other(training, undisturbed, etcd, name, store):
    """The half of the coordinator continues, and with a store the half that reaches it. Both may, and one continues.

    The store is on the laptop's machine, which the half that ends does not reach either, unless both reach it.
    """
    job = training(name, RETURN)
    run = job.start(*(["--elastic-server", etcd(job).url] if store != "nowhere" else []))
    begun = job.epoch_of(ALL, run)
    alone = {0, 1} if store == "other half" else {2, 3}
    others = [*(ALL - alone), *(["laptop"] if store != "both halves" else [])]
    cut = time.time()
    job.lab.drop(alone, others)
    job.lab.drop(others, alone)
    half = job.epoch_of(ALL - alone, run, begun)
    report(name, f"two halves, store: {store}", job.resumed(cut), 4 * LOSS if store == "other half" else GOAL)
    until(
        lambda: not any(job.living_ranks(node) for node in alone), 10, lambda: f"the ranks of {alone} to end\n{run.err}"
    )
    time.sleep(2 * LOSS)  # an epoch of the other half would begin now
    assert {epoch.nodes for (_, number), epoch in job.lives().items() if number > begun} == {ALL - alone}
    job.lab.deliver(alone, others)
    job.lab.deliver(others, alone)
    job.epoch_of(ALL, run, half)
    job.hurry()
    job.ends(run)
    job.check(undisturbed(name))


@pytest.mark.parametrize("name", BOTH)
def test_the_store_is_killed_and_started_again(training, undisturbed, etcd, name):
    """Within LOSS_TIMEOUT that has no effect. Later all ranks have ended, and the training continues with the store."""
    job = training(name)
    server = etcd(job)
    run = job.start("--elastic-server", server.url)
    begun = job.epoch_of(ALL, run)
    killed = time.time()
    server.kill()
    server.start()
    assert time.time() - killed < LOSS
    until(lambda: job.latest_step() > killed + 2 * LOSS, 60, lambda: f"{job.summary()}\n{run.err}")
    assert len(job.lives()) == 1 and not any(job.events(node, "lease-lost") for node in ALL)
    killed = time.time()
    server.kill()
    until(lambda: not any(job.living_ranks(node) for node in ALL), 60, lambda: run.err)
    back = time.time()
    server.start()
    job.epoch_of(ALL, run, begun)
    report(name, "etcd back", job.resumed(back), 4 * LOSS)
    job.hurry()
    job.ends(run)
    job.check(undisturbed(name))
