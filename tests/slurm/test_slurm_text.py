"""What is submitted to a real Slurm is understood there as it is meant, and what its programs print is understood here."""

from __future__ import annotations

import time

import pytest

from clustertool.model.paths import STEP_OUTPUT
from clustertool.model.slurm.slurm_answers import NODES, QUEUE, TIME_FORMAT, SlurmJob, read_nodes, read_queue
from clustertool.model.slurm.slurm_settings import read_settings
from clustertool.model.slurm.submit_script import SubmitOrder, script, submit_command
from tests.slurm.slurm_site import SlurmSite

PRINT = "import os, sys; print(os.environ['SLURM_NODEID'], os.environ.get('SLURM_CPUS_PER_TASK'), sys.argv[1:])"


def submitted(site: SlurmSite, settings: dict[str, object], name: str = "queue", program: str = PRINT) -> str:
    """The Slurm id of a job whose bundle is `program`, submitted by the script alone."""
    folder = site.shared / name
    folder.mkdir()
    (folder / "bundle.pyz").write_text(program)
    (folder / "job.sh").write_text(script(read_settings(settings), order(site, name)))
    return site.lab.slurm("sbatch", "--parsable", f"{order(site, name).folder}/job.sh")


def order(site: SlurmSite, name: str) -> SubmitOrder:
    folder = f"{site.lab.slurm('pwd')}/{name}"  # as the hosts of the cluster see it
    return SubmitOrder("J-1", folder, f"{folder}/bundle.pyz", name="my 'job'")


def jobs(site: SlurmSite) -> dict[str, SlurmJob]:
    return {str(job.id): job for job in read_queue(site.lab.slurm(*QUEUE, env=TIME_FORMAT))}


@pytest.mark.parametrize(
    "name",
    ["a b#c'd\"e$(id)%j", *(pytest.param(name, marks=pytest.mark.engines) for name in ("queue", "back\\slash%j"))],
)
def test_a_script_starts_one_task_on_each_node(queue: SlurmSite, name: str) -> None:
    job = submitted(queue, {"nodes": 2, "cpus_per_node": 2, "time": "90m", "options": ["--nice=5"]}, name)
    assert queue.lab.over(job) == "COMPLETED"
    lines = (queue.shared / name / STEP_OUTPUT).read_text().splitlines()
    assert sorted(line for line in lines if not line.startswith("srun:")) == ["0 2 ['join']", "1 2 ['join']"]
    fields = queue.lab.job(job)
    assert fields["TimeLimit"] == "01:30:00" and fields["Nice"] == "5" and fields["Requeue"] == "0"


def test_variables_of_the_login_host_do_not_replace_settings(queue: SlurmSite) -> None:
    settings, folder = read_settings({"partition": "short", "time": "1"}), queue.shared / "queue"
    folder.mkdir()
    (folder / "bundle.pyz").write_text(PRINT)
    (folder / "job.sh").write_text(script(settings, order(queue, "queue")))
    command = submit_command(settings, order(queue, "queue"), f"{order(queue, 'queue').folder}/job.sh")
    job = queue.lab.slurm(*command, env={"SBATCH_PARTITION": "urgent", "SBATCH_JOB_NAME": "other"})
    assert queue.lab.over(job) == "COMPLETED"
    fields = queue.lab.job(job)
    assert (fields["Partition"], fields["JobName"]) == ("short", "my")  # as far as the first space


def test_the_queue_lists_what_runs_and_what_waits(queue: SlurmSite) -> None:
    wait = "import time; time.sleep(1000)"
    first = submitted(queue, {"nodes": 3, "cpus_per_node": 4}, "first", wait)
    queue.lab.runs(first)
    second = submitted(queue, {"nodes": 3, "exclusive": True, "time": 5}, "second", wait)
    found = jobs(queue)
    assert abs(time.time() - (found[first].started or 0)) < 60
    assert (found[first].state, found[first].nodelist) == ("RUNNING", "node[0-2]")
    assert found[second].state == "PENDING" and found[second].reason in ("Resources", "")  # "" until Slurm has tried it
    assert {job.clustertool_job for job in found.values()} == {"J-1"}
    nodes = read_nodes(queue.lab.slurm(*NODES, env=TIME_FORMAT))
    assert [(node.name, node.state, node.used_cpus) for node in nodes] == [
        (f"node{i}", "allocated", 4) for i in range(3)
    ]
    assert set(nodes[0].partitions) == {"batch", "short", "urgent"} and nodes[0].memory == 16000
    queue.lab.slurm("scancel", second, first)
    assert queue.lab.over(first) == queue.lab.over(second) == "CANCELLED"
