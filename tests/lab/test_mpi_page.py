"""docs/mpi.md: its jobs run on three machines without ssh between them, with the commands of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import REPO, LabSite
from tests.lab.lab import HOME
from tests.lab.test_under_mpi import PADDLE, TRAIN_V2
from tests.pages import blocks_of

MPIRUN = "mpirun.openmpi"


@pytest.fixture
def three(site: Callable[..., LabSite]) -> LabSite:
    """Three nodes with Open MPI and a stand-in for Paddle 0.10; the files of the page are in the folder of conf.py."""
    if not shutil.which(MPIRUN):
        why = f"no {MPIRUN} here: scripts/engine-packages.sh installs it"
        pytest.fail(why) if os.environ.get("DEMAND_ENGINES") == "1" else pytest.skip(why)
    made = site(3)
    for node in range(3):
        programs = made.home(node) / "bin"
        programs.mkdir()
        (programs / "mpirun").symlink_to(shutil.which(MPIRUN) or "")
        (programs / "paddle").write_text(f"#!/usr/bin/env python3{PADDLE}")
        (programs / "paddle").chmod(0o755)
    made.conf(PRELUDE=[f"export PATH={HOME}/bin:$PATH"])
    for block in blocks_of(REPO / "docs/mpi.md"):
        if block.title:
            path = made.folder / block.title
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
    return made


def test_the_new_form_of_the_old_recipe(three: LabSite) -> None:
    folder = Path("old")
    shard = "print(open(os.environ['CLUSTERTOOL_SHARDS']).read().rpartition('/')[2].strip())"
    (three.folder / folder / "train.py").write_text(f"{TRAIN_V2}{shard}\n")
    for number in range(3):
        (three.folder / folder / f"train.txt-0000{number}").touch()
    assert "Open MPI 4" in three.clustertool("check", "--workspace", folder).ends(0).out
    plan = three.clustertool("--dry", "run", "--workspace", folder).ends(0).out
    assert "mpirun --allow-run-as-root --hostfile .clustertool/mpi-hosts" in plan
    done = three.clustertool("run", "--workspace", folder, "--all-ranks").ends(0)
    for node in range(3):
        prefix = f"[trainer {node} node{node}]"
        found = [line for line in done.lines() if line.startswith(prefix)]
        assert found == [f"{prefix} trainer {node} of 3 6 6 6", f"{prefix} train.txt-0000{node}"], done.out
    assert three.clustertool("logs", "--rank", 2).ends(0).lines() == found
    # Open MPI's own warning: its child has called setpgid, too, and has begun the daemon already
    own = [line for line in three.clustertool("logs", "--role", "mpirun").ends(0).lines() if "setpgid" not in line]
    assert not own
    assert "mpi, 3 pservers, 3 trainers" in done.err
    assert "stopped by clustertool" not in done.err, "a pserver that is ended after training is no victim"
    three.gone()


def test_the_first_run_stops(three: LabSite) -> None:
    """Without mpi4py: ranks that wait."""
    (three.folder / "sum/train.py").write_text(
        "import os, time\nprint(os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
    )
    running = three.start("run", "--workspace", "sum", "--nproc-per-node", 2, "--all-ranks")
    running.says(r"\[trainer 5 node2\] 5")
    assert "running" in three.clustertool("status").ends(0).out
    three.clustertool("stop").ends(0)
    running.wait().ends(143)
    three.gone()
