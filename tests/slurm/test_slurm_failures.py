"""Each way in which a job in Slurm ends: exit code, verdict, no survivors, and Slurm has finished with the job.

The faults that ssh knows as well happen to a job of each engine on the same machines, and end alike. docs/slurm.md has a table
of it. UPDATE_PAGES=1 writes it, with the seconds that were measured.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.cases import POLITE, STUBBORN
from tests.cli import until
from tests.slurm import page
from tests.slurm.engine_runs import SLURM, SSH, STARTS, Ending, EngineRun, number_of, run, use
from tests.slurm.slurm_site import SlurmSite

CUT = "a node is cut off"
RANKS = 6  # 2 on each of 3 nodes
LONG = 90.0
FAILS = """
    import os, sys, time
    rank = os.environ["CLUSTERTOOL_RANK"]
    print("ready", rank, flush=True)
    while not os.path.exists(os.path.expanduser("~/fail")):
        time.sleep(0.05)
    sys.exit(7 if rank == "2" else time.sleep(600))
"""


class Fault(NamedTuple):
    """happens(run) is the fault. verdict: what the reason matches. states: those that Slurm may give the job."""

    name: str
    happens: Callable[[EngineRun], object]
    code: int
    verdict: str
    states: tuple[str, ...]
    program: str = POLITE
    options: tuple[object, ...] = ()


def exits(job: EngineRun) -> None:
    (job.site.shared / "fail").touch()


def twice(job: EngineRun) -> None:
    job.command.signal(signal.SIGINT)
    job.command.says("again kills at once")
    job.fault()
    job.command.signal(signal.SIGINT)


def stop_from_another_folder(job: EngineRun) -> None:
    folder = job.site.folder / "other-folder"
    folder.mkdir()
    (folder / "tasks.py").write_text((job.site.folder / "tasks.py").read_text())
    (folder / "conf.py").write_text((job.site.folder / "conf.py").read_text())
    job.site.inv("stop", "--job", job.job, cwd=folder).ends(0)


def kill(pid: Callable[[EngineRun], int]) -> Callable[[EngineRun], None]:
    return lambda job: os.kill(pid(job), signal.SIGKILL)


LOST = ("FAILED", "NODE_FAIL")  # with a node that does not come back. After SlurmdTimeout Slurm itself has lost it
STOPPED = ("FAILED", "CANCELLED")
FAULTS = (
    Fault("a rank exits with 7", exits, 7, "trainer 2 on node1 failed", ("FAILED",), FAILS),
    Fault("a rank is killed", kill(lambda job: job.rank(2, 1)), 137, "trainer 2 on node1 failed", ("FAILED",)),
    Fault("a supervisor is killed", kill(lambda job: job.supervisor(1)), 75, "node node1 is lost", ("FAILED",)),
    Fault("the first supervisor is killed", kill(lambda job: job.supervisor(0)), 75, "node0.* lost", ("FAILED",)),
    Fault("a node crashes", lambda job: job.site.lab.crash(1), 75, "node node1 is lost", LOST),
    Fault(CUT, lambda job: job.site.lab.cut(1), 75, "node node1 is lost", LOST),
    Fault("Ctrl+C", lambda job: job.command.signal(signal.SIGINT), 130, r"Ctrl\+C", STOPPED),
    Fault("Ctrl+C twice, ranks ignore SIGTERM", twice, 130, r"Ctrl\+C", STOPPED, STUBBORN, ("--grace", 60)),
    Fault("`stop` from another folder", stop_from_another_folder, 143, "stop", STOPPED),
)


@pytest.mark.engines
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_job_ends_as_by_ssh(slurm: Callable[..., SlurmSite], fault: Fault) -> None:
    ssh, queued = (ended(slurm(3), engine, fault) for engine in (SSH, SLURM))
    assert queued.state in fault.states, queued.done.err
    assert queued.verdict == ssh.verdict
    measured = [
        queued.verdict,
        queued.state,
        *(f"{seconds:.1f} s" for seconds in (ssh.clean, queued.clean, queued.free)),
    ]
    page.check_row("failures", fault.name, [str(fault.code)], measured)


def ended(site: SlurmSite, engine: str, fault: Fault) -> Ending:
    site.workspace(train_py=fault.program)
    job = run(site, engine, "--nproc-per-node", 2, *fault.options, ranks=RANKS)
    job.fault()
    fault.happens(job)
    ending = job.ends(LONG, lost=1 if fault.states is LOST else 0)
    assert ending.done.code == fault.code, ending.done.err
    assert re.search(fault.verdict, ending.verdict), ending.done.err
    if fault.name == CUT:
        site.lab.crash(1)  # Slurm's own process there would try for minutes to report the end
    return ending


@pytest.mark.engines
@pytest.mark.parametrize("node", [1, 0], ids=["node1", "the coordinator"])
def test_a_crashed_node_does_not_keep_the_others(slurm: Callable[..., SlurmSite], node: int) -> None:
    """They are free as soon as the end is recorded: Slurm itself would wait for SlurmdTimeout, which is 300 s by default."""
    site = slurm(3, settings={"SlurmdTimeout": 300})
    site.workspace(train_py=POLITE)
    job = run(site, SLURM, "--nproc-per-node", 2, ranks=RANKS)
    job.fault()
    site.lab.crash(node)
    done = job.command.wait(LONG).ends(75)
    assert f"node node{node} is lost" in done.err
    others = {f"node{other}" for other in range(3) if other != node}
    until(lambda: others <= set(site.lab.idle()), LONG, lambda: f"{others} to be idle: {site.lab.idle()}")
    assert time.monotonic() - job.at < 60
    status = site.inv("status", "--job", job.job, "--json").ends(0).json
    assert (status["state"], status["outcome"]["code"]) == ("lost", 75), status
    (listed,) = site.inv("jobs", "--json").ends(0).json["jobs"]
    assert (listed["state"], listed["code"]) == ("lost", 75), listed


@pytest.mark.engines
def test_scancel_by_hand(queue: SlurmSite) -> None:
    """A stopped job, no failed ranks, and the reason that Slurm has."""
    queue.workspace(train_py=POLITE)
    job = run(queue, SLURM, "--nproc-per-node", 2, ranks=RANKS)
    job.fault()
    queue.lab.slurm("scancel", job.number)
    ending = job.ends(LONG)
    ending.done.ends(143)
    assert f"Slurm's job {job.number} was cancelled" in ending.verdict
    assert "was aborted" not in ending.done.err, "no rank has failed"
    assert ending.state == "CANCELLED"
    queue.gone()


@pytest.mark.engines
@pytest.mark.parametrize("what", ["", ".0"], ids=["the job", "its step"])
def test_scancel_with_sigkill(queue: SlurmSite, what: str) -> None:
    """Of the job: Slurm sends TERM first. Of the step: all processes die at once, without a record of the end."""
    queue.workspace(train_py=POLITE)
    job = run(queue, SLURM, "--nproc-per-node", 2, ranks=RANKS)
    job.fault()
    queue.lab.slurm("scancel", "--signal=KILL", job.number + what)
    ending = job.ends(LONG)
    ending.done.ends(75 if what else 143)
    assert ending.state == ("FAILED" if what else "CANCELLED")
    queue.gone()
    status = queue.inv("status", "--job", job.job, "--json").ends(0).json
    assert status["state"] == ("lost" if what else "stopped"), status


@pytest.mark.engines
def test_the_time_limit_of_slurm(queue: SlurmSite) -> None:
    """Slurm checks limits each 30 s, so it takes up to 90 s."""
    queue.workspace(train_py=POLITE)
    job = run(queue, SLURM, "--nproc-per-node", 2, ranks=RANKS, settings={"time": "1"})
    ending = job.ends(150)
    ending.done.ends(124)
    assert f"Slurm's job {job.number} exceeded its time limit" in ending.verdict
    assert ending.state == "TIMEOUT"
    queue.gone()


@pytest.mark.engines
def test_preemption_ends_a_job(queue: SlurmSite) -> None:
    queue.workspace(train_py=POLITE)
    job = run(queue, SLURM, "--nproc-per-node", 2, ranks=RANKS, settings={"exclusive": True})
    job.fault()
    queue.lab.slurm("sbatch", "-N3", "--partition=urgent", "--exclusive", "--wrap", "srun true")
    ending = job.ends(LONG)
    ending.done.ends(143)
    assert f"Slurm's job {job.number} was preempted" in ending.verdict
    assert ending.state == "PREEMPTED"
    queue.gone()


AGAIN = """
    import os, time
    print("ready", os.environ["CLUSTERTOOL_RANK"], "attempt", os.environ["CLUSTERTOOL_ATTEMPT"], flush=True)
    if os.environ["CLUSTERTOOL_ATTEMPT"] == "0":
        time.sleep(600)
"""


@pytest.mark.engines
def test_preemption_requeues_a_job(queue: SlurmSite) -> None:
    """The job runs again in the same directory, as attempt 1. A command that waits follows this attempt."""
    queue.workspace(train_py=AGAIN)
    use(queue, SLURM, exclusive=True, requeue=True)
    from_the_start = queue.start("run", "-w", "job", "--all-ranks")
    job = from_the_start.says(r"^job (\S+): running", STARTS)
    number = number_of(queue, job)
    for rank in range(3):
        from_the_start.says(f"ready {rank} attempt 0", STARTS)
    until(lambda: logs(queue, "") == {f"workerlog.{rank}": f"ready {rank} attempt 0\n" for rank in range(3)}, LONG)
    urgent = queue.lab.slurm("sbatch", "--parsable", "-N3", "--partition=urgent", "--exclusive", "--wrap", "srun true")
    assert queue.lab.over(urgent, LONG) == "COMPLETED"
    assert queue.inv("status", "--job", job, "--json").ends(0).json["state"] == "queued"
    from_the_start.says(f"job {job} is queued again")
    follower = queue.start("attach", "--job", job, "--all-ranks")
    follower.says(f"^job {job}: queued since", STARTS)
    queue.lab.slurm("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm itself waits 2 minutes
    assert queue.lab.over(number, LONG) == "COMPLETED"
    done = follower.wait().ends(0)
    assert {f"[trainer {rank} node{rank}] ready {rank} attempt 1" for rank in range(3)} <= set(done.lines())
    lines = from_the_start.wait().ends(0).lines("[trainer")
    assert sorted(lines) == sorted(f"[trainer {r} node{r}] ready {r} attempt {k}" for r in range(3) for k in range(2))
    assert logs(queue, "attempt1/") == {f"workerlog.{rank}": f"ready {rank} attempt 1\n" for rank in range(3)}
    assert queue.inv("status", "--job", job, "--json").ends(0).json["state"] == "succeeded"
    queue.gone()


@pytest.mark.engines
def test_a_job_that_has_lost_a_node_is_queued_again(slurm: Callable[..., SlurmSite]) -> None:
    """The coordinator requeues it at once. The command that is printed follows its next start, on other nodes."""
    site: SlurmSite = slurm(3)
    site.workspace(train_py=AGAIN)
    use(site, SLURM, requeue=True)
    command = site.start("run", "-w", "job", "--all-ranks", "--nnodes", 2)
    number = number_of(site, command.says(r"^job (\S+): running", STARTS))
    until(lambda: sorted(logs(site, "").values()) == ["ready 0 attempt 0\n", "ready 1 attempt 0\n"], LONG)
    site.lab.crash(1)
    done = command.wait(LONG).ends(75)
    assert f"job {done.job} is queued again; clustertool attach --job {done.job} follows" in done.err.replace(
        "inv ", "clustertool "
    )
    assert "node node1 is lost" in done.last
    assert site.lab.job(number)["Restarts"] == "1"
    until(lambda: site.lab.job(number)["JobState"] == "PENDING", LONG)  # srun waits for the lost node for KillWait
    follower = site.start("attach", "--job", done.job, "--all-ranks")
    follower.says(f"^job {done.job}: queued since", STARTS)
    site.lab.slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
    assert site.lab.over(number, LONG) == "COMPLETED"
    lines = follower.wait(LONG).ends(0).lines("[trainer")
    assert sorted(line.partition("] ")[2] for line in lines if "attempt 1" in line) == [
        f"ready {r} attempt 1" for r in range(2)
    ]
    site.gone(LONG)


def logs(site: SlurmSite, folder: str) -> dict[str, str]:
    return {
        path.name: path.read_text() for job in site.jobs_of_nodes() for path in job.glob(f"log/{folder}workerlog.*")
    }


@pytest.mark.engines
def test_slurmctld_is_restarted_while_a_job_runs(slurm: Callable[..., SlurmSite]) -> None:
    """The job goes on, and the commands work again afterwards."""
    site: SlurmSite = slurm(3)
    site.workspace(train_py=FAILS)
    job = run(site, SLURM, "--nproc-per-node", 2, ranks=RANKS)
    site.lab.stop_controller()
    assert site.inv("logs", "--job", job.job, "--rank", 3).ends(0).lines() == ["[trainer 3 node1] ready 3"]
    refused = site.inv("check").ends(69)
    assert "waiting for sbatch on login; is slurmctld running?" in refused.err
    assert "Unable to contact slurm controller" in refused.out + refused.err
    assert "is slurmctld running?" in refused.out + refused.err
    site.lab.start_controller()
    assert site.lab.runs(job.number) == "RUNNING"
    assert site.inv("status", "--job", job.job, "--json").ends(0).json["state"] == "running"
    job.fault()
    exits(job)
    ending = job.ends(LONG)
    ending.done.ends(7)
    assert ending.state == "FAILED"
    site.gone()
