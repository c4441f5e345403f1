"""PyTorch on real nodes: it learns together what it learns alone, and finds the environment that torchrun gives it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli import LoopSite
from tests.frameworks.examples import TIMEOUT, activate, curve

ENVIRON = Path(__file__).with_name("environ.py")
SAME = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# What torchrun sets besides: about itself as the one who watches the ranks, which here is somebody else.
ITS_OWN = {
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
}
DIES = """
        if epoch == 3 and dist.get_rank() == 2 and os.environ["CLUSTERTOOL_ATTEMPT"] == "0":
            os._exit(3)
        loss = train("""

Said = "dict[int, dict[str, Any]]"


def test_four_trainers_learn_what_one_learns(example):
    digits = example("digits-torch")
    four = digits.run("--nproc-per-node", 2, "--all-ranks").ends(0)
    assert digits.outputs() == [["model.pt"], []]
    curves = [curve(four, rank) for rank in range(4)]
    assert len(curves[0]) == 20
    assert curves.count(curves[0]) == 4, "all trainers know the loss of all"
    assert curve(four, 0, "accuracy")[-1] > 0.95
    one = digits.run("--only", digits.site.name(0)).ends(0)
    assert "1 trainer on 1 node" in one.err
    assert curve(one, 0) == pytest.approx(curves[0], rel=0.01)


@pytest.mark.parametrize("nodes, each", [(1, 2), pytest.param(2, 1, marks=pytest.mark.frameworks)])
def test_a_rank_finds_what_torchrun_gives_it(site, venv, scratch, nodes, each):
    torch = venv("digits-torch")
    here = inv(site(nodes).conf(PRELUDE=activate(torch)), each)
    there = torchrun(torch / "bin" / "torchrun", nodes, each, scratch)
    for rank in range(nodes * each):
        ours, theirs = here[rank]["env"], there[rank]["env"]
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        assert ours["NODE_RANK"] == theirs["GROUP_RANK"]
        assert set(theirs) - set(ours) <= ITS_OWN | {"TMPDIR", "LC_CTYPE"}  # which Python sets where LANG is not set
    for said in (here, there):  # MASTER_ADDR and MASTER_PORT mean one thing: where all ranks meet
        assert len({(its["env"]["MASTER_ADDR"], its["env"]["MASTER_PORT"]) for its in said.values()}) == 1
        assert {its["first"] for its in said.values()} == {said[0]["pid"]}
        assert all(its["ranks"] == [1.0] * nodes * each for its in said.values())


def test_check_tries_it_on_all_nodes(site, venv):
    """The second node has none: it is named, and the first one waits no longer than for that."""
    two, torch = site(2), venv("digits-torch")
    two.conf(PRELUDE=activate(torch))
    done = two.inv("check", "--framework", "torch", "--json", timeout=TIMEOUT).ends(0)
    assert {(rank["at"], rank["backend"]) for rank in done.json["framework"]["ranks"]} == {("done", "gloo")}
    two.conf(PRELUDE=f"case $HOME in {two.home(0)}) {activate(torch)};; esac", CHECK_PACKAGES=[])
    done = two.inv("check", "--framework", "torch", timeout=TIMEOUT).ends(69)
    assert "FAIL no torch for the job's python3" in done.out
    assert f"waited for {two.name(1)}" in done.out
    assert f"fix framework on {two.name(1)}: install torch there" in done.out
    assert not two.living() and not two.jobs(0) and not two.jobs(1)


@pytest.mark.frameworks
def test_a_trainer_that_dies_is_named_and_can_be_restarted(example):
    """The others die of it too, at their own pace and with codes of their own."""
    digits = example("digits-torch")
    digits.change("\n        loss = train(", DIES)
    failed = digits.run("--nproc-per-node", 2).ends(3)
    assert "Out of all 4 trainers, the trainer process with rank=[2] was aborted" in failed.err
    again = digits.run("--nproc-per-node", 2, "--max-restarts", 1).ends(0)
    assert curve(again, 0, "accuracy")[-1] > 0.95
    assert not digits.site.living()


def inv(site: LoopSite, each: int) -> Said:
    folder = site.workspace()
    shutil.copy(ENVIRON, folder / "train.py")
    done = site.inv("run", "-w", folder, "--nproc-per-node", each, "--all-ranks", timeout=TIMEOUT).ends(0)
    return spoken(line.partition("] ")[2] for line in done.lines("[trainer "))


def torchrun(program: Path, nodes: int, each: int, scratch: Path) -> Said:
    """One torchrun on each node, as its users start it by hand."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--nproc-per-node", each, "--nnodes", nodes, "--master-addr", "127.0.0.1", "--master-port", port]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TMPDIR": str(scratch), "GLOO_SOCKET_IFNAME": "lo"}
    launchers = [
        subprocess.Popen(
            [program, *map(str, options), "--node-rank", str(node), ENVIRON],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for node in range(nodes)
    ]
    try:
        outs = [launcher.communicate(timeout=TIMEOUT)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # it ends its ranks, if it has not ended
            launcher.wait(TIMEOUT)
    assert [launcher.returncode for launcher in launchers] == [0] * nodes
    return spoken(line for out in outs for line in out.splitlines())


def spoken(lines: Any) -> Said:
    """rank -> what environ.py has said."""
    said = [json.loads(line) for line in lines if line.startswith("{")]
    return {int(its["env"]["RANK"]): its for its in said}
