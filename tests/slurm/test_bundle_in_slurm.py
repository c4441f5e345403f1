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
    """Ranks in the order of the nodes, records of each node below the shared ROOT_DIR, and no key left on disk."""
    settings = SlurmSettings(nodes=2, cpus_per_node=2)
    number = bundles.submit(queue, HELLO, "hello", Options(nproc_per_node="2"), settings)
    assert queue.lab.over(number, 60) == "COMPLETED", bundles.output(queue, "hello")
    queue.gone()
    folders = queue.jobs_of_nodes("hello")
    assert [folder.parent.name for folder in folders] == ["node0", "node1"]
    for node, folder in enumerate(folders):
        for rank in (2 * node, 2 * node + 1):
            assert f"rank={rank} world_size=4" in (folder / f"log/workerlog.{rank}").read_text()
    outcome = status(queue, "hello").outcome
    assert outcome is not None and (outcome.state, outcome.code) == (JobState.SUCCEEDED, 0)
    assert not (queue.shared / "hello/bundle.pyz").exists(), "the bundle has the job's key"


def test_ranks_have_the_environment_of_the_shell_that_submits(queue: SlurmSite):
    """Five variables of Slurm, and no other one: frameworks would take the one task of a node for a rank."""
    shell = {
        "MINE": "of my shell",
        "PMIX_RANK": "7",
        "OMPI_COMM_WORLD_SIZE": "9",
        "WORLD_SIZE": "9",
        "https_proxy": "x",
    }
    workspace = queue.workspace(train_py=ENVIRONMENT)
    number = bundles.submit(
        queue, workspace, "shell", Options(nproc_per_node="cpu"), SlurmSettings(nodes=2, cpus_per_node=1), shell
    )
    assert queue.lab.over(number, 60) == "COMPLETED", bundles.output(queue, "shell")
    for rank, folder in enumerate(queue.jobs_of_nodes("shell")):
        env = json.loads((folder / f"log/workerlog.{rank}").read_text())
        assert sorted(name for name in env if name.startswith(("SLURM_", "SRUN_", "PMI"))) == KEPT
        assert [env[name] for name in KEPT] == ["lab", number, "shell", "node[0-1]", "batch"]
        assert (env["MINE"], env["RANK"], env["WORLD_SIZE"], env["NODE_RANK"]) == (
            "of my shell",
            str(rank),
            "2",
            str(rank),
        )
        assert (env["OMPI_COMM_WORLD_SIZE"], env["MASTER_ADDR"]) == (
            "2",
            queue.lab.address(0),
        ) and "https_proxy" not in env


def test_a_second_task_on_a_node_is_refused(queue: SlurmSite):
    """Before any machine connects: each process ends with the fix."""
    settings = SlurmSettings(nodes=2, cpus_per_node=1, options=("--ntasks-per-node=2",))
    number = bundles.submit(queue, HELLO, "tasks", Options(), settings)
    assert queue.lab.over(number, 60) == "FAILED"
    text = bundles.output(queue, "tasks")
    assert text.count("clustertool join: srun has started 4 tasks on 2 nodes") == 4, text
    assert not queue.jobs_of_nodes("tasks") and (queue.shared / "tasks/bundle.pyz").exists()
