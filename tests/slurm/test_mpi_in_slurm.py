"""Jobs of mode mpi in Slurm: mpirun is a child of the tool's supervisor, and neither srun nor Slurm's variables reach it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import mpi
from tests.cli import CLUSTERTOOL, REPO, Done, until
from tests.mpi import Mpi
from tests.slurm.slurm_site import SlurmSite
from tests.slurm.test_job_in_allocation import ShellSite

EXAMPLE = REPO / "workspaces/mpi-allreduce"
NODES, EACH = 3, 2
WAITS = """
    import os, subprocess, time
    from mpi4py import MPI
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    MPI.COMM_WORLD.barrier()
    slurm = sorted(name for name in os.environ if name.startswith("SLURM_"))
    print("ready", MPI.COMM_WORLD.rank, *slurm, flush=True)
    while True:
        MPI.COMM_WORLD.barrier()
        time.sleep(0.1)
"""
KEPT = "SLURM_CLUSTER_NAME SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_PARTITION"


def prepared(site: SlurmSite, kind: Mpi) -> list[str]:
    """Put an implementation into the shared home; its PRELUDE."""
    mpi.demand(kind)
    kind.put_into(site.shared)
    return kind.prelude()


def logs(site: SlurmSite) -> list[dict[str, str]]:
    """For each node, the logs of the trainers of the only job, which is removed."""
    found = []
    for job in site.jobs_of_nodes():
        found.append({path.name: path.read_text() for path in sorted((job / "log").glob("workerlog.*"))})
        shutil.rmtree(job)
    return found


@pytest.mark.engines
@pytest.mark.parametrize("kind", mpi.each(*mpi.BOTH))
def test_the_same_as_by_ssh(queue: SlurmSite, kind: Mpi) -> None:
    """Ranks, hosts, sums and losses."""
    prelude = prepared(queue, kind)
    options = ("run", "-w", EXAMPLE, "--nproc-per-node", EACH)
    queue.conf_of_ssh(PRELUDE=prelude)
    queue.inv(*options).ends(0)
    by_ssh = logs(queue)
    before = [mpi.files(queue, node) for node in range(NODES)]
    queue.conf(PRELUDE=prelude)
    done: Done = queue.inv(*options).ends(0)
    assert "is Slurm job" in done.err
    assert logs(queue) == by_ssh
    assert [list(its) for its in by_ssh] == [
        [f"workerlog.{EACH * node + i}" for i in range(EACH)] for node in range(NODES)
    ]
    assert by_ssh[2]["workerlog.5"].startswith("rank=5 size=6 sum=21 host=node2\nepoch=1 loss=")
    queue.gone()
    mpi.no_new_files(queue, before, range(NODES))


@pytest.mark.engines
@pytest.mark.parametrize("kind", mpi.each(*mpi.BOTH))
def test_in_an_allocation_of_the_user(queue: SlurmSite, kind: Mpi) -> None:
    """salloc gives variables that mpirun would obey: eight tasks, four on a node. Its end by scancel leaves nothing."""
    shell = ShellSite(queue)
    shell.conf(PRELUDE=prepared(queue, kind))
    before = [mpi.files(queue, node) for node in range(2)]
    shell.workspace(train_py=WAITS)
    number = shell.allocate("-N2", "-n8", "--ntasks-per-node=4")
    env = {
        "SLURM_JOB_ID": number,
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_NTASKS": "8",
        "SLURM_NNODES": "2",
        "SLURM_TASKS_PER_NODE": "4(x2)",
    }
    running = shell.start("run", "-w", "job", "--mode", "mpi", "--all-ranks", program=CLUSTERTOOL, env=env)
    for rank in (0, 1):
        running.says(rf"ready {rank} {KEPT}$")
    for node in (0, 1):
        for process in queue.lab.processes(node):
            if process.argv and Path(process.argv[0]).name in (*mpi.MPIRUNS, *mpi.DAEMONS):
                assert not [name for name in process.environ if name.startswith(("SLURM_", "SRUN_"))], process.argv
    queue.lab.slurm("scancel", number)
    done = running.wait().ends(143)
    assert re.search(f"the allocation {number} of Slurm was ended", done.err)
    queue.lab.over(number)
    queue.gone()
    mpi.no_new_files(queue, before, range(2))
    until(lambda: not shell.sruns())
