"""docs/mpi.md: its jobs run on two machines without ssh between them, with the commands of the page."""

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
def two(site: Callable[..., LabSite]) -> LabSite:
    """Two nodes with Open MPI and a stand-in for Paddle 0.10; the files of the page are in the folder of conf.py."""
    if not shutil.which(MPIRUN):
        why = f"no {MPIRUN} here: scripts/engine-packages.sh installs it"
        pytest.fail(why) if os.environ.get("DEMAND_ENGINES") == "1" else pytest.skip(why)
    made = site(2)
    for node in range(2):
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


def test_the_new_form_of_the_old_recipe(two: LabSite) -> None:
    folder = Path("old")
    shard = "print(open(os.environ['CLUSTERTOOL_SHARDS']).read().rpartition('/')[2].strip())"
    (two.folder / folder / "train.py").write_text(f"{TRAIN_V2}{shard}\n")
    for number in range(2):
        (two.folder / folder / f"train.txt-0000{number}").touch()
    assert "Open MPI 4" in two.clustertool("check", "--workspace", folder).ends(0).out
    plan = two.clustertool("--dry", "run", "--workspace", folder).ends(0).out
    assert "mpirun --allow-run-as-root --hostfile .clustertool/mpi-hosts" in plan
    done = two.clustertool("run", "--workspace", folder, "--all-ranks").ends(0)
    for node in range(2):
        prefix = f"[trainer {node} node{node}]"
        found = [line for line in done.lines() if line.startswith(prefix)]
        assert found == [f"{prefix} trainer {node} of 2 3 3", f"{prefix} train.txt-0000{node}"], done.out
    assert two.clustertool("logs", "--rank", 1).ends(0).lines() == found
    # Open MPI's own warning: its child has called setpgid, too, and has begun the daemon already
    own = [line for line in two.clustertool("logs", "--role", "mpirun").ends(0).lines() if "setpgid" not in line]
    assert not own
    assert "mpi, 2 pservers, 2 trainers" in done.err
    assert "stopped by clustertool" not in done.err, "a pserver that is ended after training is no victim"
    two.gone()


def test_the_first_run_stops(two: LabSite) -> None:
    """Without mpi4py: ranks that wait."""
    (two.folder / "sum/train.py").write_text(
        "import os, time\nprint(os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
    )
    running = two.start("run", "--workspace", "sum", "--nproc-per-node", 2, "--all-ranks")
    running.says(r"\[trainer 3 node1\] 3")
    assert "running" in two.clustertool("status").ends(0).out
    two.clustertool("stop").ends(0)
    running.wait().ends(143)
    two.gone()
