"""Variables of the shell that other launchers take for options: they are options here, or each machine would train alone."""

from __future__ import annotations

import pytest

from tests.free_ports import free_port
from tests.here.test_clusterrun_here import starts

PROMPT = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sorted(os.environ), flush=True)"
NESTED = """
    import os, subprocess, sys
    program = [sys.executable, "-m", "clustertool.cli.launchers.rank_program", "inner.py"]
    os.environ["RANK"] == "0" and subprocess.run(program, check=True)
"""


@pytest.fixture
def folders(folders):
    """Two folders with a program that states its place."""
    for site in folders:
        site.workspace(".", train_py=PROMPT)
    return folders


@pytest.mark.parametrize("kind", ["torchrun", pytest.param("paddle", marks=pytest.mark.chaos)])
def test_two_machines_meet(folders, kind):
    """Kubeflow's operators and PaddleCloud give each machine its place so."""
    port = str(free_port())
    common = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    number = "PET_NODE_RANK"
    if kind == "paddle":
        common, number = {"PADDLE_NNODES": "2", "PADDLE_MASTER": f"127.0.0.1:{port}"}, "PADDLE_RANK"
    running = [starts(site, "train.py", env={**common, number: str(rank)}) for rank, site in enumerate(folders)]
    for rank, one in enumerate(running):
        done = one.wait().ends(0)
        assert f"rank {rank} of 2" in done.out
        assert "PET_" not in done.out, "a launcher in the rank must not take them a second time"
        lines = [line for line in done.err.splitlines() if "from this shell: " in line]
        assert len(lines) == 1 and all(name in lines[0] for name in (*common, number))


def test_several_machines_that_no_launcher_joins(folders):
    """The names of LLaMA-Factory and ms-swift."""
    environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    refused = starts(folders[0], "train.py", env=environ).wait().ends(64)
    assert "NNODES=2 of this shell names 2 machines" in refused.err
    assert "clusterrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 1234" in refused.err
    assert "rank 0 of 1" in starts(folders[0], "--standalone", "train.py", env=environ).wait().ends(0).out
    plan = folders[0].clusterrun("--nnodes", 1, "--dry", "--json", "train.py", env=environ).ends(0).json
    (process,) = [process for node in plan["nodes"] for process in node["processes"]]
    assert (process["env"]["RANK"], process["env"]["WORLD_SIZE"]) == ("0", "1")
    assert "this shell" not in folders[0].clusterrun("--dry", "train.py", env={**environ, "NNODES": "1"}).ends(0).err


def test_clusterrun_in_a_rank(folders):
    """The variables of its own job are no options of another one."""
    site = folders[0]
    site.workspace(".", train_py=NESTED, inner_py=PROMPT)
    done = starts(
        site, "--nproc-per-node", 2, "--rank", 0, "--env", "PET_NNODES=2", "--env", "NNODES=2", "train.py"
    ).wait()
    assert "rank 0 of 1" in done.ends(0).out
