"""Mode mpi in an allocation of Slurm: one mpirun, whose daemons start through the supervisors, and not through Slurm."""

from __future__ import annotations

import json
import shutil

import pytest

from clustertool.model.config.job import Options
from clustertool.model.job.state_names import JobState
from clustertool.model.slurm.slurm_settings import SlurmSettings
from tests.slurm import bundles
from tests.slurm.slurm_site import SlurmSite
from tests.slurm.test_bundle_in_slurm import ENVIRONMENT, KEPT, status


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun is installed")
def test_ranks_are_those_of_mpirun(queue: SlurmSite) -> None:
    """The order is that of the plan, mpirun has seen no variable of Slurm, and ranks have the five that they keep."""
    workspace = queue.workspace(train_py=ENVIRONMENT)
    options = Options(mode="mpi", nproc_per_node="2")
    number = bundles.submit(queue, workspace, "mpi", options, SlurmSettings(nodes=3, cpus_per_node=2))
    over = queue.lab.over(number, 120)
    assert over == "COMPLETED", bundles.output(queue, "mpi") + _logs(queue)
    queue.gone()
    outcome = status(queue, "mpi").outcome
    assert outcome is not None and (outcome.state, outcome.code) == (JobState.SUCCEEDED, 0)
    for node, folder in enumerate(queue.jobs_of_nodes("mpi")):
        for rank in (2 * node, 2 * node + 1):
            env = json.loads((folder / f"log/workerlog.{rank}").read_text())
            place = env.get("OMPI_COMM_WORLD_RANK", env.get("PMI_RANK"))
            assert (env["RANK"], place, env["WORLD_SIZE"], env["NODE_RANK"]) == (str(rank), str(rank), "6", str(node))
            assert sorted(name for name in env if name.startswith(("SLURM_", "SRUN_"))) == KEPT
        assert (folder / f"log/mpidaemonlog.{node}").exists(), "each daemon is a process of its node's supervisor"
    assert not [folder for folder in queue.jobs_of_nodes("mpi")[1:] if (folder / "log/mpirunlog.0").exists()]


def _logs(queue: SlurmSite) -> str:
    """What mpirun and its daemons have printed."""
    found = [log for folder in queue.jobs_of_nodes("mpi") for log in sorted(folder.glob("log/mpi*log.*"))]
    return "".join(f"\n{log.name}:\n{log.read_text()}" for log in found)
