"""A bundle that sbatch starts: the nodes of the allocation join, and leave nothing when Slurm ends the job."""

from __future__ import annotations

import json

from clustertool.model.config.job import Options
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.slurm.slurm_settings import SlurmSettings
from clustertool.model.wire.record_lines import read_events
from tests.cli import HELLO
from tests.folded import fold
from tests.slurm import bundles
from tests.slurm.slurm_site import SlurmSite

ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
KEPT = "SLURM_CLUSTER_NAME SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_PARTITION".split()


def status(site: SlurmSite, job: str) -> JobStatus:
    """The state of a job by the records of its nodes."""
    lines = [(folder / ".clustertool/events.jsonl").read_bytes().splitlines() for folder in site.jobs_of_nodes(job)]
    return fold((node, event) for node, its in enumerate(lines) for event in read_events(its))


def test_the_nodes_of_an_allocation_run_a_job(queue: SlurmSite):
    """Ranks in the order of the nodes, records of each node below the shared ROOT_DIR, and no key left on disk.

    Ranks have the environment of the shell that submits, and five variables of Slurm, and no other one: frameworks would
    take the one task of a node for a rank.
    """
    shell = {
        "MINE": "of my shell",
        "PMIX_RANK": "7",
        "OMPI_COMM_WORLD_SIZE": "9",
        "WORLD_SIZE": "9",
        "https_proxy": "x",
    }
    workspace = queue.workspace(train_py=ENVIRONMENT)
    settings = SlurmSettings(nodes=2, cpus_per_node=2)
    number = bundles.submit(queue, workspace, "shell", Options(nproc_per_node="cpu"), settings, shell)
    assert queue.lab.over(number, 60) == "COMPLETED", bundles.output(queue, "shell")
    queue.gone()
    folders = queue.jobs_of_nodes("shell")
    assert [folder.parent.name for folder in folders] == ["node0", "node1"]
    for rank in range(4):
        env = json.loads((folders[rank // 2] / f"log/workerlog.{rank}").read_text())
        assert sorted(name for name in env if name.startswith(("SLURM_", "SRUN_", "PMI"))) == KEPT
        assert [env[name] for name in KEPT] == ["lab", number, "shell", "node[0-1]", "batch"]
        place = (str(rank), "4", str(rank // 2))
        assert (env["MINE"], env["RANK"], env["WORLD_SIZE"], env["NODE_RANK"]) == ("of my shell", *place)
        assert (env["OMPI_COMM_WORLD_SIZE"], env["MASTER_ADDR"]) == ("4", queue.lab.address(0))
        assert "https_proxy" not in env
    outcome = status(queue, "shell").outcome
    assert outcome is not None and (outcome.state, outcome.code) == (JobState.SUCCEEDED, 0)
    assert not (queue.shared / "shell/bundle.pyz").exists(), "the bundle has the job's key"


def test_a_second_task_on_a_node_is_refused(queue: SlurmSite):
    """Before any machine connects: each process ends with the fix."""
    settings = SlurmSettings(nodes=1, cpus_per_node=1, options=("--ntasks-per-node=2",))
    number = bundles.submit(queue, HELLO, "tasks", Options(), settings)
    assert queue.lab.over(number, 60) == "FAILED"
    text = bundles.output(queue, "tasks")
    assert text.count("clustertool join: srun has started 2 tasks on 1 node") == 2, text
    assert not queue.jobs_of_nodes("tasks") and (queue.shared / "tasks/bundle.pyz").exists()
