"""Settings of a job reach a real Slurm: those of the command line before job.toml before conf.py."""

from __future__ import annotations

import json

import pytest

from tests.cli import until
from tests.slurm.slurm_site import SlurmSite

TOML = '[trainer]\ncommand = ["python3", "train.py"]\n[slurm]\npartition = "urgent"\ntime = "30m"\n'


def test_the_three_sources_of_settings(queue: SlurmSite) -> None:
    """The command is a new process, so the node starts the bundle as users have it, and compiles its modules."""
    site = queue
    conf = {"login": "root@login", "nodes": 3, "cpus_per_node": 2, "time": 10, "options": ["--nice=7"]}
    (site.folder / "conf.py").write_text(site.conf_text(SLURM=conf))
    site.workspace(train_py="print('done')\n", job_toml=TOML)
    typed = ("--nnodes", "1", "--partition", "batch", "--exclusive", "--sbatch-option=--nice=9")
    dry = site.clustertool("run", "--workspace", "job", "--dry", *typed, "--grace", "30", "--json").ends(0)
    assert "the grace of 30 s is not shorter than KillWait of this Slurm (30 s)" in dry.err
    shown = dry.json["documents"]["job.sh"]
    done = site.clustertool("run", "--workspace", "job", *typed, fresh=True).ends(0)
    assert "KillWait" not in done.err
    (folder,) = site.root(0).glob(".clustertool/queue/*")
    number = json.loads((folder / "submission.json").read_text())["slurm_id"]
    fields = site.lab.job(number)
    found = {
        name: fields[name] for name in ("Partition", "TimeLimit", "NumNodes", "Nice", "CPUs/Task", "OverSubscribe")
    }
    assert found == {
        "Partition": "batch",
        "TimeLimit": "00:30:00",
        "NumNodes": "1",
        "Nice": "9",
        "CPUs/Task": "2",
        "OverSubscribe": "NO",
    }
    assert shown.replace(shown.split("--job-name=")[1].split("\n")[0], done.job) == (folder / "job.sh").read_text()


@pytest.mark.engines
def test_what_would_run(queue: SlurmSite) -> None:
    """Ranks, commands and variables are those of the job. Secrets are in nothing that is shown or stays on disk."""
    site = queue
    site.conf(ENV={"MINE": "1"}, SECRETS=["TOKEN"])
    text = "import os\nprint('ready', os.environ['RANK'], os.environ['MINE'], len(os.environ['TOKEN']))\n"
    site.workspace(train_py=text)
    options = ("run", "--workspace", "job", "--nnodes", 2, "--nproc-per-node", 2)
    dry = site.clustertool(*options, "--dry", "--json").ends(0).json
    assert "node0, node1, ... stand for them" in dry["stands"]
    job = site.clustertool(*options, env={"TOKEN": "s3cret"}).ends(0).job
    ran = {(one["role"], one["rank"]): one for one in site.clustertool("status", "--json").ends(0).json["processes"]}
    shown = {(one["role"], one["rank"]): (node["node"], one) for node in dry["nodes"] for one in node["processes"]}
    assert {key: node for key, (node, _) in shown.items()} == {key: one["node"] for key, one in ran.items()}
    assert [node["dir"].replace(dry["job"], job) for node in dry["nodes"]] == [
        f"{site.lab.slurm('pwd')}/clustertool/node{node}/JOB{job}" for node in range(2)
    ]
    env = shown["trainer", 3][1]["env"]
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["MINE"], env["TOKEN"]) == (
        "3",
        "4",
        "node0",
        "1",
        "***",
    )
    out = site.clustertool(*options, "--dry").ends(0).out
    assert "--- job.sh" in out and "workerlog.3" in out and "***" in out
    assert "ready 3 1 6" in site.clustertool("logs", "--rank", 3).ends(0).out
    left = [path for path in site.root(0).rglob("*") if path.is_file()]
    assert len(left) > 10 and not [path for path in left if b"s3cret" in path.read_bytes()]


@pytest.mark.engines
def test_errors_come_before_any_connection(queue: SlurmSite) -> None:
    site = queue
    (site.folder / "conf.py").write_text(site.conf_text(SLURM={"login": "root@10.255.255.1", "time": "soon"}))
    site.workspace(train_py="print('done')\n", job_toml="[slurm]\nnodes = 0\n")
    assert "SLURM['time'] = 'soon'" in site.clustertool("run", "--workspace", "job").ends(78).err
    (site.folder / "conf.py").write_text(site.conf_text(SLURM={"login": "root@10.255.255.1"}))
    assert "job.toml: [slurm] nodes = 0" in site.clustertool("run", "--workspace", "job").ends(65).err
    (site.folder / "job/job.toml").unlink()
    for option, value in (("--mem", "much"), ("--sbatch-option", "-H"), ("--servers", "10.0.0.1:7164")):
        assert option in site.clustertool("run", "--workspace", "job", f"{option}={value}").ends(64).err


def test_an_allocation_that_is_ignored_is_one_line(queue: SlurmSite) -> None:
    site = queue.conf_of_ssh()
    line = "the allocation of this shell (SLURM_JOB_ID=812) is ignored: the engine ssh does not use it"
    assert site.clustertool("check", env={"SLURM_JOB_ID": "812"}).err.count(line) == 1


@pytest.mark.engines
def test_a_job_that_cannot_start_is_explained(queue: SlurmSite) -> None:
    """Slurm keeps it in the queue: a partition may be changed."""
    site = queue
    site.workspace(train_py="print('done')\n")
    options = ("--partition", "short", "--time", "10m")
    found = site.clustertool("check", *options, "--json").ends(69).json["nodes"][0]["findings"]["queue"]
    assert found["text"] == "the job would not start: partition short: its longest time is 1 min 00 s, not 10 min 00 s"
    job = site.clustertool("run", "--workspace", "job", *options, "--detach").ends(0).job
    reason = "PartitionTimeLimit: its time is above the limit of its partition, so it does not start"
    until(lambda: reason in site.clustertool("status", "--job", job, "--json").ends(0).json["queue"]["reason"])
    site.clustertool("stop", "--job", job).ends(0)
    site.lab.slurm("scontrol", "update", "partitionname=short", "maxnodes=2", "allowaccounts=lab")
    try:
        out = site.clustertool("check", "--partition", "short", "--account", "me").ends(69).out
        assert "not available; partition short: a job has at most 2 of its nodes, not 3; " in out
        assert "partition short: the account me may not use it" in out
        site.clustertool("check", "--partition", "short,urgent", "--account", "me").ends(0)
    finally:
        site.lab.slurm("scontrol", "update", "partitionname=short", "maxnodes=unlimited", "allowaccounts=all")


@pytest.mark.engines
def test_a_warning_states_the_processors_of_the_ranks(queue: SlurmSite) -> None:
    site = queue
    (site.folder / "conf.py").write_text(site.conf_text(SLURM={"login": "root@login"}))
    site.workspace(train_py="print('done')\n")
    for options, text in (
        (("--nproc-per-node", "3"), "its 3 ranks share it"),
        (("--mode", "ps"), "its 2 ranks share it"),
        ((), "its rank has no more"),
        (("--gpus-per-node", "2"), "all its ranks share it"),
    ):
        assert text in site.clustertool("run", "--workspace", "job", "--dry", *options).ends(0).err
    assert "warning:" not in site.clustertool("run", "--workspace", "job", "--dry", "--cpus-per-node", "2").ends(0).err
