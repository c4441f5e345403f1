"""Elastic jobs in a real queue: fewer nodes than the most, nodes that are lost, a stop after that, and a start again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import mpi
from tests.cli import CLUSTERTOOL, Running, until
from tests.lab.lab_store import LabStore
from tests.slurm.engine_runs import SLURM, STARTS, EngineRun, number_of, use
from tests.slurm.queue_jobs import folder_of
from tests.slurm.slurm_site import SlurmSite
from tests.slurm.test_job_in_allocation import ShellSite
from tests.slurm.test_mpi_in_slurm import prepared

TRAIN = """
    import os, time
    env = os.environ
    print("ready", env["CLUSTERTOOL_ATTEMPT"], env["RANK"], env["WORLD_SIZE"], flush=True)
    while not os.path.exists(os.path.expanduser("~/over")):
        time.sleep(0.05)
"""
BY_MPI = """
    import os, time
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    print("ready", os.environ["CLUSTERTOOL_ATTEMPT"], world.rank, world.size, flush=True)
    while not world.bcast(os.path.exists(os.path.expanduser("~/over"))):
        time.sleep(0.1)
    world.allreduce(0)  # each rank has received, so none waits in MPI_Finalize of MPICH 4.0 (docs/mpi.md)
"""
LOSS = 5  # seconds


@pytest.fixture
def store(queue: SlurmSite, tmp_path: Path) -> Iterator[LabStore]:
    made = LabStore(queue.lab, tmp_path / "etcd")
    yield made
    made.kill()


def begun(
    site: SlurmSite, world: int, *options: object, train: str = TRAIN, prelude: Sequence[str] = (), **settings: object
) -> EngineRun:
    """An elastic job that is followed, whose ranks run in epoch 0."""
    use(site, SLURM, **settings)
    with (site.folder / "conf.py").open("a") as conf:
        conf.write(f"LOSS_TIMEOUT = {LOSS}\nPRELUDE = {list(prelude)!r}\n")
    site.workspace(train_py=train)
    command = site.start("run", "-w", "job", "--all-ranks", *options)
    epoch(command, 0, world)
    job = command.says(r"^job (\S+?):", 1)
    return EngineRun(site, SLURM, command, job, number_of(site, job))


def epoch(command: Running, number: int, world: int) -> None:
    for rank in range(world):
        command.says(rf"ready {number} {rank} {world}$", STARTS)


def epochs(job: EngineRun) -> list[list[int]]:
    """The nodes of each epoch."""
    found = job.site.clustertool("status", "--job", job.job, "--json").ends(0).json
    return [epoch["nodes"] for epoch in found["epochs"]]


def test_what_is_submitted(queue: SlurmSite) -> None:
    queue.workspace(train_py=TRAIN)
    shown = queue.clustertool("run", "-w", "job", "--nnodes", "2:3", "--dry").ends(0)
    assert "#SBATCH --nodes=2-3" in shown.out and "#SBATCH --no-kill" in shown.out
    assert "for the 2 to 3 nodes that are there" in shown.err
    refused = queue.clustertool("run", "-w", "job", "--nnodes", "3:2").ends(64)
    assert "'3:2' is no number of nodes" in refused.err


@pytest.mark.engines
def test_a_member_is_killed_and_the_job_goes_on(queue: SlurmSite) -> None:
    """The command that follows the job shows the next epoch, and ends with 0."""
    job = begun(queue, 3, "--nnodes", "2:3")
    bundle = folder_of(queue, job.job) / "bundle.pyz"
    assert bundle.exists()
    os.kill(job.supervisor(1), signal.SIGKILL)
    epoch(job.command, 1, 2)
    assert queue.lab.state(job.number) == "RUNNING"
    (queue.shared / "over").touch()
    job.command.wait().ends(0)
    assert epochs(job) == [[0, 1, 2], [0, 2]]
    queue.gone()
    queue.lab.over(job.number)
    assert not bundle.exists(), "it has the key of the job"


@pytest.mark.engines
@pytest.mark.parametrize("kind", mpi.each(*mpi.BOTH))
def test_mpirun_goes_on_with_the_nodes_that_are_left(queue: SlurmSite, kind: mpi.Mpi) -> None:
    prelude = prepared(queue, kind)
    before = [mpi.files(queue, node) for node in range(3)]
    job = begun(queue, 3, "--nnodes", "2:3", "--mode", "mpi", train=BY_MPI, prelude=prelude)
    os.kill(job.supervisor(1), signal.SIGKILL)
    epoch(job.command, 1, 2)
    (queue.shared / "over").touch()
    job.command.wait().ends(0)
    assert epochs(job) == [[0, 1, 2], [0, 2]]
    queue.gone()
    mpi.no_new_files(queue, before, range(3))


@pytest.mark.engines
def test_a_node_of_an_allocation_of_the_user_crashes(slurm: Callable[..., SlurmSite]) -> None:
    """salloc --no-kill, as docs/elastic.md has it. The allocation stays after the job."""
    site = slurm(3)
    shell = ShellSite(site)
    shell.conf(LOSS_TIMEOUT=LOSS)
    shell.workspace(train_py=TRAIN)
    number = shell.allocate("-N3", "--exclusive", "--no-kill")
    options = ("run", "-w", "job", "--nnodes", "2:3", "--all-ranks")
    command = shell.start(*options, program=CLUSTERTOOL, env={"SLURM_JOB_ID": number})
    epoch(command, 0, 3)
    site.lab.crash(1)
    epoch(command, 1, 2)
    (site.shared / "over").touch()
    command.wait().ends(0)
    assert site.lab.state(number) == "RUNNING"
    until(lambda: not shell.sruns(), 90, lambda: str(shell.sruns()))  # Slurm waits for the lost task (KillWait)
    site.lab.slurm("scancel", number)
    site.lab.over(number)
    site.gone()


@pytest.mark.engines
@pytest.mark.parametrize("timeout", [10, 300])
def test_a_node_crashes_and_the_job_goes_on(slurm: Callable[..., SlurmSite], timeout: int) -> None:
    """SlurmdTimeout: after that Slurm takes the node out of the allocation, or the job ends before that."""
    site = slurm(3, settings={"SlurmdTimeout": timeout})
    job = begun(site, 3, "--nnodes", "1:3")
    site.lab.crash(1)
    epoch(job.command, 1, 2)
    if timeout < 60:
        until(lambda: site.lab.job(job.number)["NodeList"] == "node[0,2]", 60, lambda: str(site.lab.job(job.number)))
        assert site.lab.state(job.number) == "RUNNING"
    (site.shared / "over").touch()
    job.fault()
    job.command.wait().ends(0)
    assert epochs(job) == [[0, 1, 2], [0, 2]]
    until(lambda: {"node0", "node2"} <= set(site.lab.idle()), 60, lambda: f"free nodes: {site.lab.idle()}")


@pytest.mark.engines
def test_scancel_ends_it_on_all_nodes(queue: SlurmSite) -> None:
    """Each node gets its own signal, and one of three would be enough to go on."""
    job = begun(queue, 3, "--nnodes", "1:3")
    queue.lab.slurm("scancel", job.number)
    job.command.wait().ends(143)
    assert epochs(job) == [[0, 1, 2]]
    queue.gone()


@pytest.mark.engines
def test_a_job_that_has_lost_a_node_is_stopped(slurm: Callable[..., SlurmSite]) -> None:
    """The numbers of its nodes are not those of the nodes that Slurm has left in the allocation."""
    site = slurm(3)
    job = begun(site, 3, "--nnodes", "1:3")
    site.lab.crash(1)
    epoch(job.command, 1, 2)
    until(lambda: site.lab.job(job.number)["NodeList"] == "node[0,2]", 60, lambda: str(site.lab.job(job.number)))
    there = site.clustertool("exec", "--job", job.job, "hostname").ends(69)
    assert there.out == "--- node0\nnode0\n--- node2\nnode2\n" and "is no node of its allocation" in there.err
    stopped = site.clustertool("stop", "--job", job.job).ends(69)
    assert "node[0,2]: clean" in stopped.out
    assert "node1: unknown" in stopped.out and "Slurm has ended it, and its records have no end" in stopped.out
    job.command.wait().ends(143)
    site.lab.over(job.number)
    site.gone()


@pytest.mark.engines
def test_it_starts_with_the_nodes_that_are_free(queue: SlurmSite) -> None:
    other = queue.lab.slurm("sbatch", "--parsable", "-N1", "--exclusive", "--wrap", "sleep 1000")
    queue.lab.runs(other)
    job = begun(queue, 2, "--nnodes", "1:3")
    (queue.shared / "over").touch()
    job.command.wait().ends(0)
    assert epochs(job) == [[0, 1]]
    assert queue.lab.over(job.number) == "COMPLETED"
    queue.lab.slurm("scancel", other)


@pytest.mark.engines
@pytest.mark.parametrize("stored", [False, True])
def test_slurm_starts_it_again(queue: SlurmSite, request: pytest.FixtureRequest, stored: bool) -> None:
    """A preempted job: its epochs go on with the next number, and it continues in its directory. With a store, too."""
    server = ("--elastic-server", request.getfixturevalue("store").url) if stored else ()
    job = begun(queue, 2, "--nnodes", "1:2", *server, exclusive=True, requeue=True, nodes=2)
    os.kill(job.supervisor(1), signal.SIGKILL)
    epoch(job.command, 1, 1)
    queue.lab.slurm("scontrol", "requeue", job.number)
    queue.lab.reaches(job.number, lambda state: state == "PENDING", STARTS)
    queue.lab.slurm("scontrol", "update", f"jobid={job.number}", "starttime=now")
    until(lambda: "ready 2 1 2" in _logs(queue, job), STARTS, lambda: _logs(queue, job))
    (queue.shared / "over").touch()
    assert queue.lab.over(job.number, 60) == "COMPLETED"
    assert epochs(job) == [[0, 1], [0], [0, 1]]
    queue.gone()


def _logs(site: SlurmSite, job: EngineRun) -> str:
    paths = [path for place in site.jobs_of_nodes(job.job) for path in place.glob("log/attempt2/workerlog.*")]
    return "".join(path.read_text() for path in paths)
