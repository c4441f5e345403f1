"""The cluster of Slurm for tests is a real one, and nothing of it is left."""

from __future__ import annotations

import os

import pytest

from tests.cli import until
from tests.lab.lab import LabError, Node
from tests.slurm.slurm_lab import LOGIN, SlurmLab
from tests.slurm.slurm_site import SlurmSite

TASK = 'echo "$SLURM_NODEID of $SLURM_STEP_NODELIST" > of-$(hostname)'


def test_a_job_runs_on_every_node_and_writes_into_the_shared_folder(queue: SlurmSite):
    site = queue
    script = site.shared / "job.sh"
    script.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 sh -c '{TASK}'\n")
    job = site.lab.slurm("sbatch", "--parsable", "-N3", "job.sh")
    assert site.lab.over(job) == "COMPLETED"
    assert {path.name: path.read_text() for path in site.shared.glob("of-*")} == {
        f"of-node{i}": f"{i} of node[0-2]\n" for i in range(3)
    }
    site.gone()


def test_srun_returns_the_exit_code_of_a_task(queue: SlurmSite):
    with pytest.raises(LabError, match="exit code 7"):
        queue.lab.slurm("srun", "-N2", "sh", "-c", "exit 7")


def test_scancel_ends_every_task(queue: SlurmSite):
    site = queue
    job = site.lab.slurm("sbatch", "--parsable", "-N3", "--wrap", "srun sleep 1000")
    site.lab.runs(job)
    until(lambda: {process.node for process in site.living() if process.name == "sleep"} == {0, 1, 2})
    site.lab.slurm("scancel", job)
    assert site.lab.over(job) == "CANCELLED"
    site.gone()


def test_a_shell_on_a_node_of_a_running_job(queue: SlurmSite):
    """The channel that stop, top and exec use."""
    site = queue
    job = site.lab.slurm("sbatch", "--parsable", "-N2", "--wrap", "srun sleep 1000")
    site.lab.runs(job)
    shell = ["srun", f"--jobid={job}", "--overlap", "-w", "node1", "-n1", "/bin/sh"]
    assert site.lab.exec(site.lab.login, shell, input="hostname\n").stdout == "node1\n"
    site.lab.slurm("scancel", job)
    site.lab.over(job)


def test_a_crashed_node_comes_back_and_a_controller_starts_again(slurm):
    site: SlurmSite = slurm(2)
    job = site.lab.slurm("sbatch", "--parsable", "-N1", "-w", "node0", "--wrap", "sleep 1000")
    site.lab.runs(job)
    site.lab.stop_controller()
    site.lab.start_controller()
    site.lab.crash(1)
    site.lab.start(1)
    assert site.lab.runs(job) == "RUNNING"
    site.lab.slurm("srun", "-w", "node1", "true")
    site.lab.slurm("scancel", job)
    site.lab.over(job)


def test_hosts_lack_the_programs_that_a_test_hides(slurm):
    site: SlurmSite = slurm(1, login=Node(hide=("sbatch",)))
    assert site.lab.exec(site.lab.login, ["sh", "-c", "command -v sbatch"]).returncode
    assert site.lab.slurm("sh", "-c", "hostname; command -v srun").split() == [LOGIN, "/usr/bin/srun"]


def test_nothing_is_left_of_a_closed_cluster(slurm_here, tmp_path):
    lab = SlurmLab(2, tmp_path / "closed")
    lab.slurm("sbatch", "-N2", "--wrap", "srun sleep 1000")
    pids = [process.pid for i in range(3) for process in lab.processes(i)]
    assert len(pids) >= 9  # sshd and munged on each, slurmd on two, slurmctld
    lab.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not lab.dir.exists()
