"""Jobs in an allocation that a user has: each is a step, which ends without the allocation."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.cli import CLUSTERTOOL, REPO, Done, Process, until
from tests.lab.lab import PATH
from tests.lab.typed import TypedSite, interrupt
from tests.slurm.slurm_site import SlurmSite

TRAIN = """
    import os, time
    print("ready", os.environ["RANK"], os.uname().nodename, flush=True)
    time.sleep(float(os.environ.get("NAP", "0")))
"""
LONG = ("run", "--workspace", "job", "--env", "NAP=600")


class ShellSite(TypedSite):
    """A folder of the user on the login host. conf.py names no login host: it is this machine."""

    def __init__(self, queue: SlurmSite) -> None:
        super().__init__(queue.lab, queue.lab.login, CLUSTERTOOL_SECRET="")
        self.queue = queue
        self.conf()
        self.workspace(train_py=TRAIN)

    def conf_text(self, **keys: object) -> str:
        return self.queue.conf_text(**{"SLURM": {"cpus_per_node": 2, "partition": "batch", "time": 10}, **keys})

    def processes(self, node: int) -> list[Process]:
        return self.queue.processes(self.queue.lab.login)

    def allocate(self, *options: str) -> str:
        """A new allocation, without a shell; its number."""
        done = self.queue.lab.exec(self.queue.lab.login, ["salloc", "--no-shell", *options])
        found = re.search(r"Granted job allocation (\d+)", done.stderr)
        assert found, done.stderr
        return found[1]

    def within(self, allocation: str, *args: object, **env: str) -> Done:
        """A command in the shell of an allocation."""
        return self.clustertool(*args, env={"SLURM_JOB_ID": allocation, **env})

    def steps(self, allocation: str) -> list[str]:
        """The numbers of its steps."""
        return self.queue.lab.slurm("squeue", "--steps", f"--jobs={allocation}", "--noheader", "--format=%i").split()

    def sruns(self) -> set[tuple[str, ...]]:
        """The command lines of srun on the login host."""
        return {process.argv for process in self.processes(0) if process.name == "srun"}

    def submission(self, job: str) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder_of(job) / "submission.json").read_text())
        return found

    def folder_of(self, job: str) -> Path:
        return self.queue.root(0) / ".clustertool/queue" / job

    def runs(self, job: str) -> None:
        """Wait until its first rank is ready; then `status` knows that it runs."""
        until(
            lambda: any(
                "ready" in log.read_text() for path in self.queue.jobs_of_nodes(job) for log in path.glob("log/*")
            )
        )
        until(lambda: self.queue.clustertool("status", "--job", job).out.startswith(f"job {job}: running"))


@pytest.fixture
def shell(queue: SlurmSite) -> ShellSite:
    return ShellSite(queue)


@pytest.mark.parametrize("kind", ["array", pytest.param("heterogeneous", marks=pytest.mark.engines)])
def test_an_allocation_that_squeue_shows_by_another_name(shell: ShellSite, kind: str) -> None:
    """It shows 20_0 for job 21, the first task of an array, and 20+0 for the first part of a heterogeneous job."""
    if kind == "array":
        shell.queue.lab.slurm("sbatch", "--array=0-1%1", "-N1", "--cpus-per-task=2", "--wrap=sleep 600")
    else:
        shell.allocate("-N1", "-n1", "-c2", ":", "-N1", "-n1", "-c2")

    def first() -> list[str]:
        lines = shell.queue.lab.slurm("squeue", "-h", "--states=RUNNING", "--format=%i %A").splitlines()
        return [line.split()[1] for line in lines if line.split()[0].endswith(("_0", "+0"))]

    until(first)
    (number,) = first()
    parts = {"SLURM_HET_SIZE": "2"} if kind == "heterogeneous" else {}
    job = shell.within(number, *LONG, "--detach", **parts).ends(0).job
    assert shell.submission(job)["slurm_id"] == f"{number}.0"
    shell.runs(job)
    assert "clean" in shell.clustertool("stop", "--job", job).ends(0).out
    until(lambda: not shell.sruns())
    assert shell.queue.lab.state(number).startswith("RUNNING"), "the allocation stays"
    shell.queue.lab.cancel_all()


@pytest.mark.engines
def test_jobs_one_after_another_in_the_shell_of_salloc(shell: ShellSite) -> None:
    """In a terminal: an interrupt, a job that runs to its end, and one that is left, until the shell itself is left."""
    env = {"PATH": f"{Path(CLUSTERTOOL[0]).parent}:{PATH}", "PS1": "$ "}
    # eight tasks: no variable of salloc changes the one task on each node
    typed = shell.start("-N2", "-n8", "--ntasks-per-node=4", "sh", program=["salloc"], terminal=True, env=env)
    number = typed.says(r"Granted job allocation (\d+)")
    typed.type(f"clustertool {' '.join(LONG)} --all-ranks\n")
    typed.says("these settings have no effect there: partition, time")
    first = typed.says(r"^job (\S+): collective, 2 nodes")
    typed.says("ready 0 node0")
    typed.says("ready 1 node1")
    assert shell.submission(first)["slurm_id"] == f"{number}.0"
    typed.type("\x03")
    typed.says(r"exit 130")
    until(lambda: {process.name for process in shell.queue.living()} == {"salloc", "sh"})
    assert (shell.steps(number), shell.queue.lab.state(number)) == ([], "RUNNING")
    typed.type("clustertool run -w job; echo code=$?\n")
    typed.says("code=0")
    typed.type(f"clustertool {' '.join(LONG)} --detach\n")
    last = typed.says(r"job (\S+) is submitted")
    shell.runs(last)
    typed.type("exit\n")
    typed.wait()
    assert shell.queue.lab.over(number) == "COMPLETED"
    shell.queue.gone()
    found = shell.queue.clustertool("status", "--job", last, "--json").ends(0).json
    ended = f"the allocation {number} of Slurm was ended: its shell or script has ended, or scancel"
    assert (found["state"], found["outcome"]["code"], found["outcome"]["reason"]) == ("stopped", 143, ended)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in shell.folder_of(last).iterdir()}
    assert modes == {"job.sh": 0o600, "submission.json": 0o600, "slurm.out": 0o600}


@pytest.mark.engines
def test_each_verb_knows_a_step(shell: ShellSite) -> None:
    """Also on the laptop: a stop ends the step, and the allocation stays."""
    site, number = shell.queue, shell.allocate("-N2", "-c4")
    job = shell.within(number, *LONG, "--cpus-per-node", "4", "--detach").ends(0).job
    shell.runs(job)
    assert shell.steps(number) == [str(shell.submission(job)["slurm_id"])]
    refused = shell.within(number, *LONG).ends(69)
    assert "Unable to create step" in refused.err and f"the allocation has these jobs: {job}" in refused.err
    waiting = shell.start(*LONG, program=CLUSTERTOOL, env={"SLURM_JOB_ID": number})
    until(lambda: len(shell.sruns()) == 2)
    interrupt(waiting)
    waiting.wait().ends(130)
    assert len(shell.sruns()) == 1
    assert [path.name for path in shell.folder_of(job).parent.iterdir()] == [job]
    assert site.clustertool("exec", "--job", job, "hostname").ends(0).lines() == [
        "--- node0",
        "node0",
        "--- node1",
        "node1",
    ]
    assert sorted(site.clustertool("top", "--json").ends(0).json["nodes"]) == ["node0", "node1"]
    assert "ready 1 node1" in site.clustertool("logs", "--rank", "1").ends(0).out
    attached = site.start("attach", "--job", job, program=CLUSTERTOOL)
    attached.says("ready 0 node0")
    assert f"job {job}: node[0-1]: clean" in site.clustertool("stop").ends(0).out
    attached.wait().ends(143)
    site.gone()
    assert (shell.steps(number), site.lab.state(number)) == ([], "RUNNING")
    assert site.clustertool("jobs", "--json").ends(0).json["jobs"][0]["state"] == "stopped"
    assert f"  {job}" in site.clustertool("clean", "--older-than", "0s").lines()
    assert not shell.folder_of(job).exists() and site.jobs_of_nodes(job) == []
    site.lab.slurm("scancel", number)


@pytest.mark.engines
def test_jobs_at_the_same_time_in_one_allocation(shell: ShellSite) -> None:
    """Each on the node that is free. A step that is killed by Slurm is lost, and the other one goes on."""
    site, number = shell.queue, shell.allocate("-N2", "--exclusive")
    jobs = [shell.within(number, *LONG, "--nnodes", "1", "--detach").ends(0).job for _ in range(2)]
    for job in jobs:
        shell.runs(job)
    first, second = (str(shell.submission(job)["slurm_id"]) for job in jobs)
    assert sorted(shell.steps(number)) == sorted([first, second])
    attached = site.start("attach", "--job", jobs[0], program=CLUSTERTOOL)
    attached.says("ready 0")
    site.lab.slurm("scancel", first)
    done = attached.wait().ends(75)
    assert f"Slurm: its step {first} has ended" in done.err
    assert site.clustertool("status", "--job", jobs[1]).out.startswith(f"job {jobs[1]}: running")
    srun = "/usr/bin/srun"  # without it there is no channel to the node: scancel sends a signal to the step
    site.lab.exec(site.lab.login, ["mount", "--bind", "/dev/null", srun])
    assert "no channel" in site.clustertool("stop").ends(0).err
    site.lab.exec(site.lab.login, ["umount", srun])
    assert shell.steps(number) == []
    found = site.clustertool("status", "--job", jobs[1], "--json").ends(0).json["outcome"]
    assert (found["state"], found["code"]) == ("stopped", 143)
    assert f"Slurm has not ended job {number}: its state is RUNNING" in found["reason"]
    site.lab.slurm("scancel", number)
    site.gone()


@pytest.mark.engines
@pytest.mark.parametrize("way", ["scancel", "time limit", "node"])
def test_the_end_of_the_allocation_ends_the_job(shell: ShellSite, way: str) -> None:
    site, number = shell.queue, shell.allocate("-N2", "-c2", "-t5")
    running = shell.start(*LONG, program=CLUSTERTOOL, env={"SLURM_JOB_ID": number})
    running.says("starting the trainers")
    shell.runs(running.says(r"^job (\S+):"))
    command, code = {
        "scancel": (["scancel", number], 143),
        "time limit": (["scontrol", "update", f"jobid={number}", "endtime=now+1"], 124),
        "node": (["scontrol", "update", "nodename=node1", "state=down", "reason=a test"], 75),
    }[way]
    site.lab.slurm(*command)
    done = running.wait().ends(code)
    reason = {
        "scancel": f"the allocation {number} of Slurm was ended: ",
        "time limit": f"Slurm's job {number} exceeded its time limit",
        "node": f"a node of Slurm's job {number} failed",
    }
    assert reason[way] in done.err
    site.lab.over(number)
    site.gone()


@pytest.mark.engines
def test_jobs_of_a_batch_script(shell: ShellSite) -> None:
    """The script of the user starts them on its first node. The one that it leaves ends with the script."""
    site = shell.queue
    program = f"clustertool {' '.join(LONG)} --detach"
    running = "until clustertool status | grep -q '^job .*: running'; do sleep 0.2; done"
    lines = ["#!/bin/sh", "clustertool run -w job --all-ranks", program, running]
    (shell.folder / "mine.sh").write_text("\n".join(lines) + "\n")
    env = {"PATH": f"{Path(CLUSTERTOOL[0]).parent}:{PATH}", "PYTHONPATH": str(REPO)}
    options = ["-N2", "-c2", f"--chdir={shell.inside}", "--output=mine.out"]
    number = site.lab.slurm("sbatch", "--parsable", *options, f"{shell.inside}/mine.sh", env=env)
    assert site.lab.over(number, 60) == "COMPLETED"
    text = (shell.folder / "mine.out").read_text()
    assert "ready 0 node0" in text and "ready 1 node1" in text and f"is step {number}.0" in text
    site.gone()
    states = [job["state"] for job in site.clustertool("jobs", "--json").ends(0).json["jobs"]]
    assert states == ["stopped", "succeeded"]
    assert "its shell or script has ended, or scancel" in site.clustertool("status").ends(0).out


@pytest.mark.engines
def test_a_shell_that_is_a_step_has_the_processors(shell: ShellSite) -> None:
    """`srun --pty` on a node: the job shares them with the shell."""
    env = {"PATH": f"{Path(CLUSTERTOOL[0]).parent}:{PATH}", "PS1": "$ "}
    typed = shell.start("-N2", "-c2", "srun", "-N1", "-n1", "--pty", "sh", program=["salloc"], terminal=True, env=env)
    typed.says(r"^\$ ")
    typed.type("clustertool run -w job --all-ranks; echo code=$?\n")
    typed.says("2 nodes of Slurm, from node0")
    typed.says("ready 1 node1")
    typed.says("code=0")
    typed.type("exit\n")
    typed.wait()
    shell.queue.gone()


@pytest.mark.engines
def test_an_allocation_that_is_too_small_or_over(shell: ShellSite) -> None:
    site, number = shell.queue, shell.allocate("-N2", "-c1")
    assert "has 2 nodes, and the job needs 3" in shell.within(number, "run", "-w", "job", "--nnodes", 3).ends(64).err
    shell.conf(SLURM={})
    checked = shell.within(number, "check", "--deep", "--json").ends(0).json["nodes"]
    assert [row["node"] for row in checked] == ["login", "node0", "node1"]
    assert checked[0]["findings"]["queue"]["text"] == f"allocation {number}: 2 nodes"
    shell.conf(SLURM={"nodes": 3})
    assert "has 2 nodes, and the job needs 3" in shell.within(number, "check").ends(69).out
    shell.conf(SLURM={})
    few = {"SLURM_JOB_CPUS_PER_NODE": "1(x2)"}
    done = shell.within(number, "run", "-w", "job", "--nproc-per-node", 2, "--dry", **few).ends(0)
    assert "has 1 CPU on a node, and its 2 ranks share it" in done.err and f"srun --jobid={number} " in done.out
    assert (
        "has 1 CPU on a node, and the job needs 2"
        in shell.within(number, "run", "-w", "job", "--cpus-per-node", 2, **few).ends(64).err
    )
    wide = shell.within(number, "run", "-w", "job", "--cpus-per-node", 3).ends(69)  # srun refuses it
    assert "srun: Unable to create step" in wide.err
    python = "/var/tmp/python"  # the nodes do not have it
    site.lab.exec(site.lab.login, ["ln", "-s", sys.executable, python])
    shell.conf(PYTHON=python)
    done = shell.within(number, "run", "-w", "job", "--cpus-per-node", 1)
    if "No such file or directory" in done.err:
        done.ends(127)
    else:  # srun has not written its messages yet
        assert "has ended; slurm.out has its messages" in done.ends(69).err
    shell.clustertool("clean", "--older-than", "0s").ends(0)
    shell.conf()
    assert list(shell.folder_of("").iterdir()) == []
    site.lab.slurm("scancel", number)
    site.lab.over(number)
    done = shell.within(number, "run", "-w", "job").ends(66)
    assert f"the allocation of this shell (SLURM_JOB_ID={number}) is CANCELLED" in done.err
    assert shell.clustertool("run", "-w", "job").ends(0)
    site.gone()


@pytest.mark.engines
def test_the_login_host_may_be_named(shell: ShellSite) -> None:
    """conf.py is that of the laptop. On another machine the variable means nothing: a new job is submitted."""
    site, number = shell.queue, shell.allocate("-N1", "-c2")
    key = site.shared / "key"
    shutil.copy(site.lab.laptop_home / ".ssh/id_ed25519", key)
    shell.conf(SLURM={"login": "root@login", "cpus_per_node": 2}, IDENTITY_FILE="~/key")
    done = shell.within(number, "run", "-w", "job").ends(0)
    assert f"is step {number}." in done.err
    site.workspace(train_py=TRAIN)
    done = site.clustertool("run", "-w", "job", "--nnodes", 1, env={"SLURM_JOB_ID": number}).ends(0)
    assert (
        f"the allocation of this shell (SLURM_JOB_ID={number}) is not used" in done.err and "is Slurm job" in done.err
    )
    site.lab.slurm("scancel", number)
    site.gone()


@pytest.mark.engines
def test_ranks_have_the_same_environment_as_with_sbatch(shell: ShellSite) -> None:
    """But for what differs between two jobs, and what Slurm sets for a script: HOSTNAME, and ENVIRONMENT=BATCH."""
    site = shell.queue
    shell.workspace(train_py="import json, os\nprint('env', json.dumps(dict(os.environ)), flush=True)\n")
    options = ("run", "-w", "job", "--nnodes", 1, "--name", "mine", "--all-ranks")
    number = shell.allocate("-N1", "-c2", "-J", "other")
    inside = {"SLURM_NTASKS": "8", "SLURM_JOB_PARTITION": "batch", "SLURM_CLUSTER_NAME": "lab"}
    found = [shell.within(number, *options, **inside), shell.clustertool(*options)]
    site.lab.slurm("scancel", number)
    step, batch = (json.loads(re.findall(r"env (\{.*\})", done.ends(0).out)[0]) for done in found)
    assert step["SLURM_JOB_NAME"] == batch["SLURM_JOB_NAME"] == "mine"
    assert {name for name in step if name.startswith(("SLURM", "SRUN"))} == {
        name for name in batch if name.startswith(("SLURM", "SRUN"))
    }
    mine = re.compile(
        "HOSTNAME|ENVIRONMENT|CLUSTERTOOL_|PADDLE_|TORCHELASTIC|MASTER_|SLURM_JOB_ID|PWD|TMP|.*PORT|.*ENDPOINTS?|GLOO|.*_URI"
    )
    differ = {name for name in {*step, *batch} if step.get(name) != batch.get(name) and not mine.match(name)}
    assert differ == set()
    site.gone()
