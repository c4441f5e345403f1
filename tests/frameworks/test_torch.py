"""PyTorch on real nodes: it learns together what it learns alone, and continues from its snapshots."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli import CLUSTERRUN, REPO, HereSite, LoopSite
from tests.frameworks.examples import TIMEOUT, activate, curve

PROGRAMS = Path(__file__).with_name("programs")
DIES = """
        if epoch == 3 and dist.get_rank() == 2 and os.environ["CLUSTERTOOL_ATTEMPT"] == "0":
            os._exit(3)
        loss = train("""


# What one trainer alone prints as its losses.
ALONE = "2.161822 1.311327 0.478531 0.253055 0.190526 0.151084 0.130232 0.126879 0.112937 0.095204"


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.frameworks)])
def test_trainers_learn_together_what_one_learns(example, each):
    """With 2 on each node, one trainer learns alone in this test, too."""
    digits = example("digits-torch")
    short = ("--script", "train.py --epochs 10")
    all_of_two = digits.run("--nproc-per-node", each, "--all-ranks", *short).ends(0)
    assert digits.outputs() == [["checkpoints", "model.pt"], ["checkpoints"]]
    curves = [curve(all_of_two, rank) for rank in range(2 * each)]
    assert len(curves[0]) == 10
    assert curves.count(curves[0]) == 2 * each, "all trainers know the loss of all"
    assert curve(all_of_two, 0, "accuracy")[-1] > 0.95
    assert curves[0] == pytest.approx([*map(float, ALONE.split())], rel=0.01)
    if each == 1:
        return
    one = digits.run("--only", digits.site.name(0), *short).ends(0)
    assert "1 trainer on 1 node" in one.err
    assert curve(one, 0) == pytest.approx(curves[0], rel=0.01)


@pytest.mark.frameworks
def test_rpc_workers_call_each_other(site, venv):
    two = site(2)
    two.conf(PRELUDE=activate(venv("digits-torch")))
    shutil.copy(PROGRAMS / "torch_rpc.py", two.workspace() / "train.py")
    done = two.inv("run", "-w", "job", "--mode", "rpc", "--all-ranks", timeout=TIMEOUT).ends(0)
    assert [re.findall(rf"^\[trainer {rank} .*\] answer (\d+)", done.out, re.M) for rank in (0, 1)] == [["40"], ["41"]]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.frameworks)])
def test_check_tries_it_on_all_nodes(site, venv, count):
    """Then the second node has none: it is named, and the first one, with a stand-in, waits no longer than for that.

    tests/lab/test_check_framework.py checks two nodes, with the stand-in.
    """
    two = site(2)
    two.conf(PRELUDE=activate(venv("digits-torch")))
    chosen = ("--only", two.name(0)) if count == 1 else ()
    done = two.inv("check", "--framework", "torch", "--json", *chosen, timeout=TIMEOUT).ends(0)
    assert [(rank["at"], rank["backend"]) for rank in done.json["framework"]["ranks"]] == [("done", "gloo")] * count
    names_the_node_without_it(two, f"export PYTHONPATH={REPO / 'tests' / 'data'}")


@pytest.mark.frameworks
def test_check_names_the_node_without_it(site, venv):
    names_the_node_without_it(site(2), activate(venv("digits-torch")))


def names_the_node_without_it(two: LoopSite, prelude: str) -> None:
    """prelude: of the first node."""
    two.conf(PRELUDE=f"case $HOME in {two.home(0)}) {prelude};; esac", CHECK_PACKAGES=[])
    done = two.inv("check", "--framework", "torch", timeout=TIMEOUT).ends(69)
    assert "FAIL no torch for the job's python3" in done.out
    assert f"waited for {two.name(1)}" in done.out
    assert f"fix framework on {two.name(1)}: install torch there" in done.out
    two.gone()
    assert not two.jobs(0) and not two.jobs(1)


@pytest.mark.frameworks
def test_two_machines_without_ssh_learn_the_same(example, venv, tmp_path):
    """The same command typed in two folders: the losses are those of two nodes with ssh."""
    digits, torch = example("digits-torch"), venv("digits-torch")
    over = digits.run("--nproc-per-node", 2).ends(0)
    home = tmp_path / "home"
    home.mkdir()
    sites = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sites.append(HereSite(tmp_path / name / "folder", home))
        shutil.copytree(digits.workspace, sites[-1].folder, dirs_exist_ok=True)
    env = {"VIRTUAL_ENV": str(torch), "PATH": f"{torch}/bin:/usr/bin:/bin"}
    line = ("--master", "127.0.0.1:18090", "--nnodes", 2, "--nproc-per-node", 2)
    running = [one.start(*line, "--rank", node, program=CLUSTERRUN, env=env) for node, one in enumerate(sites)]
    done = [one.wait(TIMEOUT).ends(0) for one in running]
    assert curve(done[0], 0) == curve(done[1], 2) == curve(over, 0) != []
    for one in sites:
        one.close()


@pytest.mark.frameworks
def test_a_trainer_that_dies_is_named_and_can_be_restarted(example):
    """The others die of it too, at their own pace and with codes of their own."""
    digits = example("digits-torch")
    digits.change("\n        loss = train(", DIES)
    failed = digits.run("--nproc-per-node", 2).ends(3)
    assert "Out of all 4 trainers, the trainer process with rank=[2] was aborted" in failed.err
    again = digits.run("--nproc-per-node", 2, "--max-restarts", 1).ends(0)
    assert "] resumed at step 24 (from rank 0)\n" in again.out
    assert len(curve(again, 0)) == 20, "no epoch is learned twice"
    assert curve(again, 0, "accuracy")[-1] > 0.95
    digits.site.gone()


@pytest.mark.frameworks
def test_a_script_continues_from_its_snapshot_as_under_torchrun(site, venv, scratch):
    """A rank fails after the third epoch. The next start begins there, and ends with the weights that torchrun's has."""
    torch, one = venv("digits-torch"), site(1)
    one.conf(PRELUDE=activate(torch))
    shutil.copy(PROGRAMS / "snapshots.py", one.workspace() / "train.py")
    (scratch / "work").mkdir()
    command = [torch / "bin" / "torchrun", "--standalone", "--nproc-per-node", "2", PROGRAMS / "snapshots.py"]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}

    def there(**more: str) -> list[str]:
        options = {"cwd": scratch / "work", "env": {**env, **more}, "text": True, "timeout": TIMEOUT}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options)
        assert (done.returncode == 0) is not bool(more)
        return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))

    def here(code: int, *more: str) -> list[str]:
        run = ("run", "-w", "job", "--nproc-per-node", 2, "--all-ranks", "--job-id", "snap", *more)
        done = one.inv(*run, timeout=TIMEOUT).ends(code)
        return sorted(line.partition("] ")[2] for line in done.lines("[trainer ") if "] rank " in line)

    first, again = there(STOP_AFTER="2"), there()
    assert first == [f"rank {rank} of 2 begins at epoch 0" for rank in (0, 1)]
    assert again[1::2] == [f"rank {rank} of 2 begins at epoch 3" for rank in (0, 1)]
    assert (here(3, "--env", "STOP_AFTER=2"), here(0, "--resume")) == (first, again)
