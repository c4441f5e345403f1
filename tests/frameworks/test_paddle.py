"""Paddle on real nodes: collective training with 3.3.1, parameter servers with 2.6.2."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.frameworks.examples import TIMEOUT, activate, curve

pytestmark = pytest.mark.frameworks
DIES = """
    if fleet.worker_index() == 1:
        os.kill(os.getpid(), 9)
    fleet.barrier_worker()"""


def test_collective_trainers_learn_what_one_learns(example):
    digits = example("digits-paddle")
    four = digits.run("--nproc-per-node", 2, "--all-ranks").ends(0)
    assert digits.outputs() == [["checkpoints", "model.pdparams"], ["checkpoints"]]
    curves = [curve(four, rank) for rank in range(4)]
    assert len(curves[0]) == 20
    assert curves.count(curves[0]) == 4, "all trainers know the loss of all"
    assert curve(four, 0, "accuracy")[-1] > 0.95
    one = digits.run("--only", digits.site.name(0)).ends(0)
    assert curve(one, 0) == pytest.approx(curves[0], rel=0.01)


@pytest.mark.parametrize("example", ["digits-paddle", "paddle-ps"])
def test_check_tries_it_on_all_nodes(site, venv, example):
    two = site(2)
    two.conf(PRELUDE=activate(venv(example)))
    done = two.inv("check", "--framework", "paddle", "--json", timeout=TIMEOUT).ends(0)
    assert {(rank["at"], rank["backend"]) for rank in done.json["framework"]["ranks"]} == {("done", "gloo")}
    two.gone()
    assert not two.jobs(0) and not two.jobs(1)


def test_check_of_the_embedded_cluster_names_the_python_that_it_uses(embedded):
    """It has no conf.py, so no PRELUDE. PyPI's `paddle` is another project."""
    done = embedded.clustertool("check", "--framework", "paddle").ends(69)
    assert "FAIL no paddle for the job's python3" in done.out
    assert "install paddlepaddle (with GPUs paddlepaddle-gpu) for the Python of clustertool, in " in done.out
    assert str(Path(sys.executable).parent) in done.out


def test_trainers_learn_on_parameter_servers(example):
    """Two of each. The pservers never end by themselves: they are ended, and that is no failure."""
    digits = example("paddle-ps")
    done = digits.run("--all-ranks").ends(0)
    assert "2 pservers, 2 trainers on 2 nodes" in done.err
    assert done.last == "clustertool: exit 0 (job): all trainers are done"
    for rank in (0, 1):
        assert curve(done, rank)[-1] < 0.3 < 1 < curve(done, rank)[0]
    assert curve(done, 0, "accuracy")[-1] > 0.9
    assert digits.outputs() == [["model.npz"], []]
    ended = {(its["role"], its["rank"]): its for its in digits.site.inv("status", "--json").ends(0).json["processes"]}
    assert all(ended["pserver", rank]["stopped"] for rank in (0, 1)), ended
    digits.site.gone()


def test_a_trainer_that_is_killed_ends_the_job(example):
    """Pservers would wait for it for ever. The other trainer may crash in Paddle's barrier (SIGSEGV) before it is stopped."""
    digits = example("paddle-ps")
    digits.change("\n    fleet.barrier_worker()", DIES)
    failed = digits.run().ends(137)
    assert re.search(r"the trainer process with rank=\[(0,)?1\] was aborted", failed.err)
    assert "trainer 1 on " in failed.last
    assert "pserver 0-1" in failed.err.partition("victims")[2]
    digits.site.gone()
