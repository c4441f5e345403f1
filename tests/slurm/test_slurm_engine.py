"""Jobs in the queue of a real Slurm, by the commands that a user types: start, follow, find, stop."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest

from tests.cli import CLUSTERTOOL, HELLO, until
from tests.lab.lab import HOME, Node
from tests.slurm.queue_jobs import STEPS, STUBBORN, blocker, folder_of, is_over, submission
from tests.slurm.slurm_site import SlurmSite


def test_a_job_runs_and_each_verb_finds_it(queue: SlurmSite):
    site = queue
    done = site.clustertool("run", "--workspace", HELLO, "--all-ranks", "--nnodes", 2).ends(0)
    found = sorted(re.findall(r"rank=(\d) world_size=2.*host=(\S+)", done.out))
    assert found == [("0", "node0"), ("1", "node1")]
    assert "is Slurm job" in done.err
    job = done.job
    is_over(site, job)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder_of(site, job).iterdir()}
    assert modes == {"job.sh": 0o600, "submission.json": 0o600, "slurm.out": 0o600}  # the bundle had the job's key
    found = site.clustertool("status", "--json").ends(0).json
    assert (found["state"], [node["name"] for node in found["nodes"]]) == ("succeeded", ["node0", "node1"])
    assert "rank=1" in site.clustertool("logs", "--rank", "1").ends(0).out
    assert site.clustertool("jobs", "--json").ends(0).json["jobs"][0]["state"] == "succeeded"
    site.clustertool("attach", "--job", job).ends(0)
    assert f"  {job}" in site.clustertool("clean", "--older-than", "0s").lines()
    assert (site.jobs_of_nodes(job), folder_of(site, job).exists()) == ([], False)


def test_the_environment_of_a_login_shell_and_the_exit_code_of_the_rank(queue: SlurmSite):
    """As if the user had logged in and typed sbatch: what a profile exports, and its PATH."""
    site = queue
    (site.shared / ".profile").write_text("echo Welcome\nexport OF_MY_PROFILE=yes PATH=/opt/mine:$PATH\n")
    site.workspace(
        train_py="""
        import os, sys, time
        if os.environ["PADDLE_TRAINER_ID"] == "1":
            sys.exit(7)
        print(os.environ.get("OF_MY_PROFILE"), os.environ["PATH"], flush=True)
        time.sleep(600)
        """
    )
    done = site.clustertool("run", "--workspace", "job", "--nnodes", "2").ends(7)
    assert "trainer 1 on node1" in done.err
    is_over(site, done.job)
    shown = site.clustertool("logs", "--rank", "0").ends(0).out
    assert re.search(r"yes /opt/mine:\S*/usr/bin", shown), shown


def test_a_job_that_fails_while_it_joins(queue: SlurmSite):
    """The reason and the exit code are those of the nodes, and not Slurm's."""
    site = queue
    site.workspace(train_py=STEPS)
    done = site.clustertool("run", "--workspace", "job", "--nnodes", "1", "--nproc-per-node", "gpu").ends(64)
    reason = "clustertool join: --nproc-per-node gpu: node0 has none"
    assert done.last == f"clustertool: exit 64 (tool): {reason}"
    (job,) = (path.name for path in (site.root(0) / ".clustertool/queue").iterdir())
    for verb, code in (("status", 0), ("logs", 66), ("attach", 64)):
        err = site.clustertool(verb, "--job", job).ends(code).err
        assert reason in err and f"{job}/slurm.out on login" in err
    assert reason in done.err and f"{job}/slurm.out on login" in done.err
    status = site.clustertool("status", "--job", job, "--json").ends(0).json
    assert status["outcome"]["code"] == 64 and reason in status["join_log"]["lines"]
    is_over(site, job)


@pytest.mark.parametrize("program", [STEPS, pytest.param(STUBBORN, marks=pytest.mark.engines)], ids=["once", "twice"])
def test_an_interrupt_ends_the_job_on_its_nodes(queue: SlurmSite, program: str):
    """Through supervisors, over steps of srun: the code is that of Ctrl+C, and not of a signal of Slurm."""
    site = queue
    site.workspace(train_py=program)
    running = site.start("run", "--workspace", "job", "--nnodes", "2", program=CLUSTERTOOL)
    running.says(r"step 1\b")
    running.signal()
    if program is STUBBORN:
        running.says("ending the job on all nodes")
        running.signal()
    done = running.wait().ends(130)
    assert "node[0-1]: clean" in done.err
    is_over(site, done.job)


def test_a_job_waits_starts_without_the_laptop_and_leaves_its_result(queue: SlurmSite):
    site = queue
    other = blocker(site)
    text = "import os\nos.makedirs('output', exist_ok=True)\nopen('output/result', 'w').write('42')\n"
    site.workspace(train_py=text)
    options = ("--nnodes", "1", "--name", "later", "--detach")
    done = site.clustertool("run", "--workspace", "job", *options, env={"SLURM_JOB_ID": "99"}).ends(0)
    assert "the allocation of this shell (SLURM_JOB_ID=99) is not used" in done.err
    job = done.job
    found = site.clustertool("status", "--job", "later", "--json").ends(0).json
    assert (found["state"], found["job"]) == ("queued", job)
    assert found["queue"]["reason"].startswith(("Resources", "Priority"))
    assert "Slurm job" in site.clustertool("jobs").ends(0).err
    assert "no node has a record of it" in site.clustertool("logs", "--job", job).ends(66).err
    refused = site.clustertool("clean", "--job", job).ends(64)
    assert "is queued since" in refused.err
    site.lab.slurm("scancel", other)
    number = str(submission(site, job)["slurm_id"])
    assert site.lab.over(number) == "COMPLETED"  # and no command of the laptop runs
    site.clustertool("fetch", "--job", job, "--to", "here").ends(0)
    assert {path.read_text() for path in (site.folder / "here").rglob("result")} == {"42"}
    is_over(site, job)


@pytest.mark.engines
def test_an_id_is_used_again_when_its_job_has_ended(queue: SlurmSite):
    """Each job has a number, all have the name. While one of them is queued there is no other."""
    site = queue
    site.workspace(train_py="import os\nprint(os.environ['PADDLE_JOB_ID'], os.environ['CLUSTERTOOL_JOB'])\n")
    again = ("run", "--workspace", "job", "--nnodes", "1", "--job-id", "X")
    assert "X X" in site.clustertool(*again).ends(0).out
    other = blocker(site)
    queued = site.clustertool(*again, "--name", "other", "--detach").ends(0)
    assert "job X has ended before: the id of this one is X-2" in queued.err
    assert "job X-2 has not ended, its state is queued" in site.clustertool(*again, "--dry").ends(64).err
    assert site.clustertool("status", "--job", "X", "--json").ends(0).json["job"] == "X-2"
    site.lab.slurm("scancel", other)
    assert "X X-2" in site.clustertool("attach", "--job", "X", "--rank", "0").ends(0).out
    assert "job-name=other" in (folder_of(site, "X-2") / "job.sh").read_text()
    assert "/X-3" in site.clustertool(*again, "--dry").ends(0).out
    for job in ("X", "X-2"):
        is_over(site, job)


@pytest.mark.engines
def test_a_timeout_begins_when_the_ranks_start(queue: SlurmSite):
    """The time in the queue does not count."""
    site = queue
    other = blocker(site)
    site.workspace(train_py=STEPS)
    running = site.start("run", "--workspace", "job", "--nnodes", 2, "--timeout", 3, program=CLUSTERTOOL)
    job = running.says(r"^job (\S+): queued since")
    time.sleep(4)
    site.lab.slurm("scancel", other)
    running.says(r"step 5\b")
    assert "3 s" in running.wait().ends(124).last
    is_over(site, job)


@pytest.mark.engines
def test_a_queued_job_is_cancelled_from_another_folder(queue: SlurmSite, tmp_path: Path):
    site = queue
    other = blocker(site)
    site.workspace(train_py=STEPS)
    running = site.start("run", "--workspace", "job", program=CLUSTERTOOL)
    job = running.says(r"^job (\S+): queued since")
    done = site.clustertool("stop", "--job", job, cwd=tmp_path).ends(0)
    assert f"job {job}: cancelled" in done.out
    running.wait().ends(69)
    assert not folder_of(site, job).exists()
    assert site.lab.slurm("squeue", "--noheader", "--format=%A") == other
    running = site.start("run", "--workspace", "job", program=CLUSTERTOOL)
    job = running.says(r"^job (\S+): queued since")
    running.signal(signal.SIGINT)
    assert "was cancelled before its start" in running.wait().ends(130).err
    assert not folder_of(site, job).exists()
    site.lab.slurm("scancel", other)
    site.gone()


@pytest.mark.engines
def test_all_jobs_are_stopped_at_the_same_time(queue: SlurmSite):
    """Three that need the whole grace, and one that waits for them."""
    site = queue
    site.workspace(train_py=STUBBORN)
    detached = ("run", "--workspace", "job", "--detach", "--nnodes")
    jobs = [site.clustertool(*detached, "1", "--cpus-per-node", "4").ends(0).job for _ in range(3)]
    until(lambda: all("deaf" in site.clustertool("logs", "--job", job).out for job in jobs))
    queued = site.clustertool(*detached, "3").ends(0).job
    done = site.clustertool("stop", "--all", "--grace", "5").ends(0)
    assert done.seconds < 14, "one after the other takes more than 15 s"
    assert {line for line in done.lines() if queued in line} == {f"job {queued}: cancelled"}
    assert all(re.search(f"job {job}: node[0-2]: clean", done.out) for job in jobs), done.out
    for job in jobs:
        is_over(site, job)


@pytest.mark.engines
def test_a_running_job_is_stopped_by_slurm_where_there_is_no_channel(slurm):
    site: SlurmSite = slurm(2, login=Node(hide=("srun",)))
    site.workspace(train_py=STEPS)
    running = site.start("run", "--workspace", "job", program=CLUSTERTOOL)
    running.says(r"step 1\b")
    done = site.clustertool("stop").ends(0)
    assert "no channel" in done.err and "scancel ends it" in done.err
    assert running.wait().code == 143
    is_over(site, done_job(site))


def done_job(site: SlurmSite) -> str:
    return str(site.clustertool("jobs", "--json").ends(0).json["jobs"][0]["id"])


@pytest.mark.engines
def test_what_slurm_refuses_leaves_nothing(queue: SlurmSite):
    site = queue
    site.workspace(train_py=STEPS)
    conf = {"login": "root@login", "nodes": 2, "partition": "no-such"}
    done = site.conf(SLURM=conf).clustertool("run", "--workspace", "job").ends(69)
    assert "invalid partition specified: no-such" in done.err
    assert list((site.root(0) / ".clustertool/queue").iterdir()) == []
    assert "no-such-too" in site.clustertool("run", "--workspace", "job", "--partition", "no-such-too").ends(69).err
    done = site.conf(SLURM={**conf, "partition": "batch", "colour": "red"}).clustertool("status").ends(78)
    assert "SLURM['colour']" in done.err
    site.conf()
    for options in (["--resume"], ["--wait"], ["--lease", "60"], ["--servers", "10.0.0.1:80"], ["--nnodes", "2x"]):
        site.clustertool("run", "--workspace", "job", *options).ends(64)
    assert site.lab.slurm("squeue", "--noheader") == ""


def wrap_sbatch(site: SlurmSite, after: str, before: str = "") -> None:
    """A wrapper of a site that comes first in PATH of the login node. after: its lines once Slurm has accepted a job; before:
    those in front of that."""
    wrapper = site.shared / "bin/sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\n{before}\n/usr/bin/sbatch "$@" || exit\n{after}\n')
    wrapper.chmod(0o755)
    (site.shared / ".profile").write_text("export PATH=$HOME/bin:$PATH\n")


@pytest.mark.engines
@pytest.mark.parametrize(
    ("after", "warned"),
    [("echo charged to the account liu", ""), ("exit 1", "sbatch: exit code 1"), ("exec >&-", "")],
    ids=["a line after the id", "an error after the submission", "an end without more"],
)
def test_a_site_with_a_wrapper_of_sbatch(slurm, after: str, warned: str):
    """Slurm has accepted the job, so it is followed, and nothing else stays in the queue."""
    site: SlurmSite = slurm(1)
    wrap_sbatch(site, after)
    site.workspace(train_py="print('done')\n")
    done = site.clustertool("run", "--workspace", "job").ends(0)
    assert ("Slurm has accepted the job all the same" in done.err) is bool(warned) and warned in done.err
    assert site.lab.slurm("squeue", "--noheader") == ""


HANGS = '[ "$1" = --version ] && exit; touch "$HOME/hangs"; sleep 1000'


@pytest.mark.engines
def test_sbatch_that_gives_no_answer_after_slurm_has_accepted_the_job(slurm):
    """It is ended after 60 s, and the job is adopted."""
    site: SlurmSite = slurm(1)
    wrap_sbatch(site, HANGS)
    site.workspace(train_py="print('done')\n")
    done = site.clustertool("run", "--workspace", "job", timeout=120).ends(0)
    assert "waiting for sbatch on login" in done.err
    assert "sbatch: no answer for 60 s; Slurm has accepted the job all the same" in done.err
    assert site.lab.slurm("squeue", "--noheader") == ""
    is_over(site, done.job)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("number", "code", "accepted"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, True), (signal.SIGINT, 130, False)],
    ids=["INT after Slurm has accepted the job", "TERM after that", "INT before it"],
)
def test_an_interrupt_while_sbatch_hangs(slurm, number: int, code: int, accepted: bool):
    """It is obeyed at once: sbatch ends, and the job that Slurm may have accepted is found by its comment and cancelled."""
    site: SlurmSite = slurm(1)
    wrap_sbatch(site, HANGS if accepted else "", "" if accepted else HANGS)
    site.workspace(train_py=STEPS)
    running = site.start("run", "--workspace", "job", program=CLUSTERTOOL)
    until((site.shared / "hangs").exists)
    numbers = site.lab.slurm("squeue", "--noheader", "--format=%A").split()
    assert len(numbers) == accepted
    began = time.monotonic()
    running.signal(number)
    done = running.wait().ends(code)
    assert time.monotonic() - began < 6, "sbatch would have gone on for 60 s"
    job = done.job
    assert f": cancelling job {job}\n" in done.err
    assert re.findall(r"Slurm job (\d+) of job (\S+) was cancelled", done.err) == [(one, job) for one in numbers]
    assert done.last == f"clustertool: exit {code} (tool): {'Ctrl+C' if code == 130 else 'SIGTERM'}"
    for one in numbers:
        assert site.lab.over(one) == "CANCELLED"
    assert site.lab.slurm("squeue", "--noheader") == "" and not folder_of(site, job).exists()
    site.gone()


@pytest.mark.engines
def test_an_interrupt_while_slurm_does_not_answer(slurm):
    """The last line names what may be left and what to type."""
    site: SlurmSite = slurm(1)
    wrap_sbatch(site, HANGS)
    site.workspace(train_py=STEPS)
    running = site.start("run", "--workspace", "job", program=CLUSTERTOOL)
    until((site.shared / "hangs").exists)
    site.lab.stop_controller()
    running.signal()
    done = running.wait().ends(130)
    job = done.job
    may = f"Slurm has not answered whether it has job {job} in its queue"
    assert done.last == f"clustertool: exit 130 (tool): Ctrl+C; {may}: clustertool stop --job {job}"
    site.lab.start_controller()
    assert f"job {job}: cancelled" in site.clustertool("stop", "--job", job).ends(0).out
    until(lambda: not site.lab.slurm("squeue", "--noheader"))
    assert not folder_of(site, job).exists()
    site.gone()


@pytest.mark.engines
def test_a_login_host_without_slurm(slurm):
    site: SlurmSite = slurm(1, login=Node(hide=("sbatch",)))
    site.workspace(train_py=STEPS)
    done = site.clustertool("run", "--workspace", "job").ends(69)
    assert "there is no sbatch" in done.err
    assert "there is no sbatch" in site.clustertool("check").ends(69).err
    site.gone()


@pytest.mark.engines
def test_the_job_of_a_killed_login_agent_stays_known(queue: SlurmSite):
    """The command dies between sbatch and the record of the number: the comment of the Slurm job has the id."""
    site = queue
    site.workspace(train_py=STEPS)
    job = site.clustertool("run", "--workspace", "job", "--nnodes", "1", "--detach").ends(0).job
    path = folder_of(site, job) / "submission.json"
    path.write_text(json.dumps({**submission(site, job), "slurm_id": ""}))
    until(lambda: site.clustertool("status").ends(0).out.startswith(f"job {job}: running"))
    assert f"job {job} runs" in site.clustertool("clean", "--job", job).ends(64).err
    began = time.monotonic()
    assert f"job {job}: node0: clean" in site.clustertool("stop").ends(0).out
    assert time.monotonic() - began < 10
    site.gone()


@pytest.mark.engines
def test_a_job_that_ended_before_a_node_had_a_record(queue: SlurmSite):
    """No python on the nodes: srun fails. Each verb names the state, and clean removes what is left."""
    site = queue
    site.workspace(train_py=STEPS)
    job = site.clustertool("run", "--workspace", "job", "--detach").ends(0).job
    number = str(submission(site, job)["slurm_id"])
    site.lab.runs(number)
    for path in site.shared.rglob("bundle.pyz"):
        path.unlink()
    site.lab.slurm("scancel", number)
    site.lab.over(number)
    if site.jobs_of_nodes(job):
        pytest.skip("the nodes were faster")
    err = site.clustertool("status", "--job", job).ends(66).err
    assert "has no record on a node, and has ended: Slurm: CANCELLED" in err
    assert site.clustertool("clean", "--job", job).ends(0).lines() == ["removed 1 job, 0 B", f"  {job}"]
    assert not folder_of(site, job).exists()
    site.gone()


@pytest.mark.engines
@pytest.mark.parametrize("hidden", [(), ("sacct",)], ids=["accounting is off", "no sacct"])
def test_a_job_that_slurm_has_forgotten(slurm, hidden: tuple[str, ...]):
    """Its records stand. Of one without records the accounting knows the end, if there is one."""
    site: SlurmSite = slurm(1, login=Node(hide=hidden))
    site.workspace(train_py="print('done')\n")
    job = site.clustertool("run", "--workspace", "job").ends(0).job
    other = blocker(site)
    lost = site.clustertool("run", "--workspace", "job", "--detach").ends(0).job
    site.lab.slurm("scancel", other, str(submission(site, lost)["slurm_id"]))
    for one in (job, lost):
        about = submission(site, one)
        (folder_of(site, one) / "submission.json").write_text(json.dumps({**about, "slurm_id": "99999"}))
    assert site.clustertool("status", "--job", job, "--json").ends(0).json["state"] == "succeeded"
    assert "done" in site.clustertool("logs", "--job", job).ends(0).out
    err = site.clustertool("status", "--job", lost).ends(66).err
    assert "has ended: Slurm has no information about it any more" in err
    site.clustertool("fetch", "--job", job, "--path", "log", "--to", "here").ends(0)
    (site.shared / "bin").mkdir()
    sacct = site.shared / "bin/sacct"
    sacct.write_text('#!/bin/sh\ncase " $* " in *" --jobs=99999 "*) echo "CANCELLED by 1000";; *) exit 1;; esac\n')
    sacct.chmod(0o755)
    (site.shared / ".profile").write_text("export PATH=$HOME/bin:$PATH\n")
    if hidden:  # else the one of the system is found first, without a login shell
        assert "has ended: Slurm: CANCELLED by 1000" in site.clustertool("status", "--job", lost).ends(66).err
    assert site.clustertool("clean", "--job", lost, "--json").ends(0).json["removed"] == [lost]
    site.gone()


def test_what_slurm_knows_of_its_nodes_and_of_a_job_to_come(queue: SlurmSite):
    site = queue
    found = site.clustertool("check", "--deep", "--json").ends(0).json["nodes"]
    assert [row["node"] for row in found] == ["login", "node0", "node1", "node2"]
    assert {row["findings"]["root"]["level"] for row in found} == {"ok"}
    assert found[0]["findings"]["queue"]["level"] == "ok"
    assert "KillWait" in site.conf(GRACE=60).clustertool("check").ends(0).out
    site.conf()
    out = site.clustertool("check", "--partition", "no-such").ends(69).out
    assert "invalid partition specified: no-such" in out
    site.clustertool("check", "--framework", "torch").ends(64)
    nodes = site.clustertool("gpus", "--json").ends(0).json["nodes"]
    assert (sorted(nodes), nodes["node1"]["cpus"], nodes["node1"]["gpus"]) == (["node0", "node1", "node2"], 4, [])
    assert "node[0-2]  idle" in site.clustertool("gpus").ends(0).out
    assert not list((site.root(0) / ".clustertool/queue").iterdir())


@pytest.mark.engines
def test_a_root_dir_that_is_not_shared(queue: SlurmSite):
    site = queue
    site.conf(ROOT_DIR="/var/tmp/alone")
    assert "FAIL /var/tmp/alone is not that of login" in site.clustertool("check", "--deep").ends(69).out
    other = blocker(site)
    site.conf()
    assert "no node answers within" in site.clustertool("check", "--deep").ends(69).err
    site.lab.slurm("scancel", other)


@pytest.mark.engines
def test_an_exported_job_is_submitted_by_hand(queue: SlurmSite):
    site = queue
    site.clustertool("export", "--engine", "slurm", "--workspace", HELLO, "--to", "out").ends(0)
    out = site.folder / "out"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (out, *out.iterdir())}
    assert (modes["out"], modes["bundle.pyz"]) == (0o700, 0o600)
    shutil.copytree(out, site.shared / "by-hand")
    (site.shared / "by-hand").chmod(0o700)
    other = blocker(site)
    number = site.lab.slurm("sh", "-c", "cd by-hand && sbatch --parsable job.sh")
    (queued,) = site.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert (queued["state"], queued["total"]) == ("queued", 3)
    job = queued["id"]
    assert f"Slurm job {number}" in site.clustertool("status", "--job", job).ends(0).out
    folder = site.folder / "other"
    folder.mkdir()
    (folder / "conf.py").write_text(site.conf_text(ROOT_DIR="~/other"))
    assert site.clustertool("jobs", "--json", cwd=folder).ends(0).json["jobs"] == [], "it is of another ROOT_DIR"
    following = site.start("attach", "--job", job, program=CLUSTERTOOL)
    following.says("queued since")
    site.lab.slurm("scancel", other)
    assert site.lab.over(number) == "COMPLETED"
    following.wait().ends(0)
    assert "rank=2" in site.clustertool("logs", "--rank", "2").ends(0).out
    assert "exists" in site.clustertool("export", "--workspace", HELLO, "--to", "out").ends(64).err
    site.workspace("empty", a_txt="x")
    assert "no train.py" in site.clustertool("run", "--workspace", "empty").ends(65).err  # before it waits in a queue
    assert not (site.root(0) / ".clustertool/queue").exists()
    other = blocker(site)
    shutil.rmtree(out)
    site.clustertool("export", "--workspace", HELLO, "--to", "out", "--job-id", "mine").ends(0)
    shutil.copytree(out, site.shared / "again")
    site.lab.slurm("sh", "-c", "cd again && sbatch --parsable job.sh")
    assert "its state is queued" in site.clustertool("run", "-w", HELLO, "--job-id", "mine", "--dry").ends(64).err
    assert "job mine: cancelled" in site.clustertool("stop").ends(0).out
    assert site.lab.slurm("squeue", "--noheader", "--format=%A") == other
    site.lab.slurm("scancel", other)
    site.gone()


@pytest.mark.engines
def test_an_exported_job_that_fails_while_it_joins(queue: SlurmSite):
    """Its output lies where the user has submitted it. The second submission ends otherwise."""
    site = queue
    site.workspace(train_py=STEPS)
    options = ("--nnodes", "2", "--nproc-per-node", "gpu", "--job-id", "mine")
    site.clustertool("export", "--engine", "slurm", "-w", "job", *options, "--to", "out").ends(0)
    shutil.copytree(site.folder / "out", site.shared / "by hand")
    submit = 'cd "by hand" && chmod 700 . && sbatch --parsable job.sh'
    assert site.lab.over(site.lab.slurm("sh", "-c", submit)) == "FAILED"
    reason = "clustertool join: --nproc-per-node gpu: node0 has none"
    for verb, code in (("status", 0), ("logs", 66), ("attach", 64)):
        err = site.clustertool(verb, "--job", "mine").ends(code).err
        assert reason in err and f"{HOME}/by hand/slurm.out on login" in err
    status = site.clustertool("status", "--json").ends(0).json
    assert (status["job"], status["outcome"]["code"]) == ("mine", 64) and reason in status["join_log"]["lines"]
    (listed,) = site.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert (listed["id"], listed["state"], listed["code"]) == ("mine", "lost", 64)
    again = submit.replace("job.sh", "--output=else.out job.sh")
    assert site.lab.over(site.lab.slurm("sh", "-c", again)) == "FAILED"
    assert "by hand/else.out on login" in site.clustertool("logs").ends(66).err
    assert site.clustertool("status", "--json").ends(0).json["outcome"]["code"] == 2


@pytest.mark.engines
def test_top_samples_the_nodes_of_a_running_job(queue: SlurmSite):
    site = queue
    site.workspace(train_py=STEPS)
    assert "no job runs" in site.clustertool("top", "--count", "1").ends(66).err
    running = site.start("run", "--workspace", "job", "--nnodes", "2", program=CLUSTERTOOL)
    running.says(r"step 1\b")
    found = site.clustertool("top", "--json").ends(0).json
    assert sorted(found["nodes"]) == ["node0", "node1"]
    assert sorted((rank["rank"], rank["node"], rank["state"]) for rank in found["ranks"]) == [
        (0, "node0", "running"),
        (1, "node1", "running"),
    ]
    running.signal()
    job = running.wait().ends(130).job
    assert "does not run" in site.clustertool("top", "--job", job).ends(66).err
    is_over(site, job)
