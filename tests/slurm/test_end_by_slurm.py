"""Slurm ends a job: all nodes record the same outcome with Slurm's reason, no rank counts as failed, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.config.job import Options
from clustertool.model.slurm.slurm_settings import SlurmSettings
from clustertool.model.wire.record_lines import read_events
from tests import containers, mpi
from tests.cases import POLITE
from tests.cli import until
from tests.slurm import bundles, engine_runs
from tests.slurm.slurm_site import SlurmSite


def events(site: SlurmSite, job: str, kind: str) -> list[dict[str, Any]]:
    """Of all nodes, in the order of the nodes."""
    files = [folder / ".clustertool/events.jsonl" for folder in site.jobs_of_nodes(job)]
    found = [dict(event) for file in files for event in read_events(file.read_bytes().splitlines())]
    return [event for event in found if event["type"] == kind]


def submit(site: SlurmSite, job: str, nodes: int = 3, train: str = POLITE, **settings: Any) -> str:
    """Submit a job of two ranks a node, and wait until they run; its number in Slurm."""
    workspace = site.workspace(train_py=train)
    given = SlurmSettings(nodes=nodes, cpus_per_node=2, **settings)
    number = bundles.submit(site, workspace, job, Options(nproc_per_node="2"), given)
    running = list(range(2 * nodes))
    until(lambda: bundles.ready(site, job) == running, 60, lambda: bundles.output(site, job))
    return number


def ended(site: SlurmSite, job: str, nodes: int = 3) -> tuple[str, int, str]:
    """The outcome that all nodes have recorded; all ranks were stopped."""
    site.gone()
    ends = events(site, job, "ended")
    assert len(ends) == nodes, bundles.output(site, job)
    ((state, code, reason),) = {(end["state"], end["code"], end["reason"]) for end in ends}
    assert [event["stopped"] for event in events(site, job, "exited")] == [True] * 2 * nodes
    assert all(end["culprits"] == [] for end in ends)
    return state, code, reason


def test_scancel(queue: SlurmSite) -> None:
    number = submit(queue, "cancelled", 2)
    queue.lab.slurm("scancel", number)
    assert queue.lab.over(number) == "CANCELLED"
    assert ended(queue, "cancelled", 2) == ("stopped", 143, f"Slurm's job {number} was cancelled (scancel)")
    (verdict,) = events(queue, "cancelled", "verdict")
    assert (verdict["engine"]["state"], verdict["engine"]["job"]) == ("COMPLETING", number)
    assert abs(verdict["engine"]["ended"] - verdict["t"]) < 60
    assert bundles.output(queue, "cancelled").count("exit code 143") == 2, (
        "the exit code of each task is that of the job"
    )


RECORDS = """
    import os, signal, sys
    watched = {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    print("ready", os.environ["CLUSTERTOOL_RANK"], flush=True)
    found, wait = None, 600
    while found or wait > 1:
        found = signal.sigtimedwait(watched, wait)
        if found:
            print("got", int(found.si_signo), flush=True)
            wait = 0.7 if found.si_signo == signal.SIGTERM else wait
    sys.exit(143)
"""


def signals_of_ranks(site: SlurmSite, job: str) -> dict[str, list[int]]:
    """The signals of each rank. Slurm itself adds SIGCONT to others."""
    logs = [log for folder in site.jobs_of_nodes(job) for log in (folder / "log").glob("workerlog.*")]
    found = {log.name: [int(line.split()[1]) for line in log.read_text().split("\n") if "got" in line] for log in logs}
    return {name: [number for number in numbers if number != signal.SIGCONT] for name, numbers in found.items()}


def test_each_rank_gets_each_signal_once_and_the_job_goes_on(queue: SlurmSite) -> None:
    """Also where only the batch script is signalled, which has become srun."""
    number = submit(queue, "signals", 2, RECORDS)
    sent = [signal.SIGUSR1, signal.SIGUSR2, 36, signal.SIGUSR1]
    options: list[tuple[str, ...]] = [(), (), (), ("--batch",)]
    for i, (name, more) in enumerate(zip(sent, options)):
        queue.lab.slurm("scancel", *more, f"--signal={int(name)}", number)
        wanted = [sent[: i + 1]] * 4
        until(lambda wanted=wanted: [*signals_of_ranks(queue, "signals").values()] == wanted, 10)  # type: ignore[misc]
    queue.lab.slurm("scancel", number)
    assert queue.lab.over(number) == "CANCELLED"
    assert ended(queue, "signals", 2)[:2] == ("stopped", 143)
    assert [*signals_of_ranks(queue, "signals").values()] == [[*sent, signal.SIGTERM]] * 4


def each_rank_gets_each(site: SlurmSite, run: engine_runs.EngineRun, ranks: int, sent: Sequence[int]) -> None:
    """Signals of `scancel` to the ranks of a job that runs; then its end."""

    def got() -> list[list[int]]:
        return [*signals_of_ranks(site, run.job).values()]

    for i, number in enumerate(sent):
        site.lab.slurm("scancel", f"--signal={int(number)}", run.number)
        until(lambda count=i + 1: got() == [sent[:count]] * ranks, 10, lambda: str(got()))  # type: ignore[misc]
    site.lab.slurm("scancel", run.number)
    run.command.wait().ends(143)
    assert site.lab.over(run.number) == "CANCELLED"
    site.gone()
    assert got() == [[*sent, signal.SIGTERM]] * ranks


SENT = [signal.SIGUSR1, signal.SIGUSR2, 34, 36, 64, signal.SIGUSR1]


@pytest.mark.engines
@pytest.mark.parametrize("plugin", ["cgroup", "pgid"])
def test_slurm_signals_only_the_first_process_of_a_task(slurm: Any, tmp_path: Path, plugin: str) -> None:
    """The supervisor passes them on then, SIGTERM too."""
    node = containers.container_node(tmp_path / "etc")  # it has the machine's cgroups
    site: SlurmSite = slurm(1, special={0: node}, settings={"ProctrackType": f"proctrack/{plugin}"})
    site.workspace(train_py=RECORDS)
    site.conf()
    run = engine_runs.follow(site, engine_runs.SLURM, "--nproc-per-node", 2, ranks=2)
    each_rank_gets_each(site, run, 2, SENT)


@pytest.fixture
def in_containers(slurm: Any, tmp_path: Path, container_image: Path) -> Callable[..., SlurmSite]:
    """A cluster of one node, whose conf.py puts ranks into containers of podman."""
    containers.demand()

    def make(**settings: object) -> SlurmSite:
        site: SlurmSite = slurm(1, special={0: containers.container_node(tmp_path / "etc")}, settings=settings)
        containers.put_image(site, container_image, nodes=[0])
        site.conf(CONTAINER=containers.settings(), PRELUDE=f"export PATH={Path(sys.executable).parent}:$PATH")
        return site

    return make


@pytest.mark.engines
@pytest.mark.parametrize("plugin", ["linuxproc", "cgroup", "pgid"])
def test_each_rank_in_a_container_gets_each_signal_once(in_containers: Callable[..., SlurmSite], plugin: str) -> None:
    """Neither podman's client nor conmon passes one on or ends by it, and no container is left."""
    site = in_containers(ProctrackType=f"proctrack/{plugin}")
    site.workspace(train_py=RECORDS)
    run = engine_runs.follow(site, engine_runs.SLURM, "--nproc-per-node", 2, ranks=2)
    each_rank_gets_each(site, run, 2, SENT)
    containers.no_containers(site, nodes=[0])


ENDS = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", os.environ["RANK"], flush=True)
    how = sys.argv[1]
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600 if how == "stays" else 0)
    sys.exit(int(how))
"""


@pytest.mark.engines
def test_ends_of_ranks_in_containers(in_containers: Callable[..., SlurmSite]) -> None:
    """A shell waits for each container: the codes are those of the programs. One that ignores SIGTERM has the grace."""
    site = in_containers()
    site.workspace(train_py=ENDS)
    one = ("run", "-w", "job", "--nnodes", 1, "--nproc-per-node", 2, "--grace", 2)
    for how, code in (("0", 0), ("7", 7), ("signal", 139)):
        site.clustertool(*one, "--", "python", "train.py", how).ends(code)
        containers.no_containers(site, nodes=[0])
    running = site.start(*one, "--", "python", "train.py", "stays")
    running.says("ready 0")
    job = running.says(r"^job (\S+?):", 1)
    site.lab.slurm("scancel", engine_runs.number_of(site, job))
    running.wait(20).ends(143)
    containers.no_containers(site, nodes=[0])


@pytest.mark.engines
@pytest.mark.parametrize("kind", mpi.BOTH, ids=lambda kind: kind.name)
def test_ranks_of_mpi_get_each_signal_once(queue: SlurmSite, kind: mpi.Mpi) -> None:
    mpi.demand(kind)
    kind.put_into(queue.shared)
    prelude = "\n".join(kind.prelude())
    starts = RECORDS.replace('    print("ready"', '    from mpi4py import MPI\n    print("ready"')
    queue.workspace(train_py=starts)
    engine_runs.use(queue, engine_runs.SLURM, prelude)
    options = ("--mode", "mpi", "--nnodes", 2, "--nproc-per-node", 2)
    run = engine_runs.follow(queue, engine_runs.SLURM, *options, ranks=4)
    each_rank_gets_each(queue, run, 4, [signal.SIGUSR1, signal.SIGUSR2, 36])


@pytest.mark.engines
def test_a_job_goes_back_to_the_queue_at_its_time_limit(queue: SlurmSite) -> None:
    """SIGUSR1 comes first. The ranks have the grace to save, and the next start ends the job."""
    program = AGAIN.replace(
        "time.sleep", "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('saved')); time.sleep"
    )
    signalled = {"requeue_on": ("time_limit",), "options": ("--signal=USR1@60",)}
    number = submit(queue, "longer", 2, program, time="5", **signalled)
    queue.lab.slurm("scancel", "--signal=USR1", number)
    queue.lab.slurm("scontrol", "update", f"jobid={number}", "endtime=now+1")
    assert queue.lab.reaches(number, lambda state: state == "PENDING", 90)
    assert ended(queue, "longer", 2) == ("timeout", 124, f"Slurm's job {number} exceeded its time limit")
    queue.lab.slurm("scontrol", "update", f"jobid={number}", "starttime=now")
    assert queue.lab.over(number, 60) == "COMPLETED", bundles.output(queue, "longer")
    assert [end["state"] for end in events(queue, "longer", "ended")] == ["timeout", "succeeded"] * 2


@pytest.mark.engines
def test_scancel_of_ranks_that_die_at_once(queue: SlurmSite) -> None:
    """The default action of SIGTERM: a supervisor may see the end of its ranks before it reads its own signal."""
    number = submit(
        queue, "sudden", train="import os, time\nprint('ready', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
    )
    queue.lab.slurm("scancel", number)
    assert queue.lab.over(number) == "CANCELLED"
    assert ended(queue, "sudden")[:2] == ("stopped", 143)


@pytest.mark.engines
def test_a_signal_that_scancel_sends_does_not_end_the_job_of_slurm(queue: SlurmSite) -> None:
    number = submit(queue, "signalled", 2)
    queue.lab.slurm("scancel", "--signal=TERM", number)
    queue.lab.over(number)
    state, code, reason = ended(queue, "signalled", 2)
    assert (state, code) == ("stopped", 143)
    assert (
        "received SIGTERM from pid " in reason and f"Slurm has not ended job {number}: its state is RUNNING" in reason
    )


@pytest.mark.engines
def test_a_node_that_is_taken_down(queue: SlurmSite) -> None:
    """It comes back when its slurmd registers again."""
    number = submit(queue, "down", 2)
    queue.lab.slurm("scontrol", "update", "nodename=node1", "state=down", "reason=a test")
    assert queue.lab.over(number) == "NODE_FAIL"
    assert ended(queue, "down", 2) == ("lost", 75, f"a node of Slurm's job {number} failed")


@pytest.mark.engines
def test_preemption(slurm: Any) -> None:
    """The partition of the job gives it 10 s to end."""
    site: SlurmSite = slurm(2, settings={"PreemptMode": "CANCEL"})
    site.lab.slurm("scontrol", "update", "partitionname=batch", "gracetime=10")
    number = submit(site, "preempted", 2, exclusive=True)
    other = site.lab.slurm("sbatch", "--parsable", "-N2", "--exclusive", "-p", "urgent", "--wrap", "sleep 1")
    site.lab.over(number)
    assert ended(site, "preempted", 2) == ("stopped", 143, f"Slurm's job {number} was preempted")
    assert site.lab.over(other) == "COMPLETED"


@pytest.mark.engines
def test_the_time_limit(queue: SlurmSite) -> None:
    """Slurm searches for jobs over their limit every 30 s."""
    number = submit(queue, "limited", 2, time="5")
    queue.lab.slurm("scontrol", "update", f"jobid={number}", "endtime=now+1")
    assert queue.lab.over(number, 60) == "TIMEOUT"
    assert ended(queue, "limited", 2) == ("timeout", 124, f"Slurm's job {number} exceeded its time limit")


@pytest.mark.engines
def test_a_controller_that_is_away(slurm: Any) -> None:
    """scontrol does not answer: the job ends as it would without a reason."""
    site: SlurmSite = slurm(2)
    number = submit(site, "alone", 2)
    site.lab.stop_controller()
    for process in site.living():
        if process.node == 0 and process.name == "ct-supervisor":
            os.kill(process.pid, signal.SIGTERM)
    until(lambda: len(events(site, "alone", "ended")) == 2, 30)
    site.lab.start_controller()
    site.lab.over(number)
    state, code, reason = ended(site, "alone", 2)
    assert (state, code) == ("stopped", 143) and f"scontrol shows nothing about job {number}" in reason


def test_a_supervisor_is_killed(queue: SlurmSite) -> None:
    """Its guard ends its ranks, reports the loss, and leaves: it does not keep the job in COMPLETING."""
    number = submit(queue, "killed", 2)
    (supervisor,) = [one for one in queue.living() if one.node == 1 and one.name == "ct-supervisor"]
    os.kill(supervisor.pid, signal.SIGKILL)
    queue.lab.over(number)
    queue.gone()
    (end,) = events(queue, "killed", "ended")
    assert (end["state"], end["code"]) == ("lost", 75)


@pytest.mark.engines
def test_scancel_with_sigkill(queue: SlurmSite) -> None:
    """For a whole job, Slurm sends SIGTERM first, as without the option."""
    number = submit(queue, "ended", 2)
    queue.lab.slurm("scancel", "--signal=KILL", number)
    assert queue.lab.over(number) == "CANCELLED"
    assert ended(queue, "ended", 2) == ("stopped", 143, f"Slurm's job {number} was cancelled (scancel)")


@pytest.mark.engines
def test_sigkill_for_all_processes(queue: SlurmSite) -> None:
    """Nothing can be recorded, and nothing is left."""
    number = submit(queue, "killed", 2)
    queue.lab.slurm("scancel", "--signal=KILL", f"{number}.0")
    queue.lab.over(number)
    queue.gone()
    assert events(queue, "killed", "ended") == []


AGAIN = """
    import os, time
    print("ready", os.environ["CLUSTERTOOL_RANK"], flush=True)
    time.sleep(600 if os.environ["CLUSTERTOOL_ATTEMPT"] == "0" else 0)
"""


@pytest.mark.engines
@pytest.mark.parametrize("grace", [0, 10])
def test_preemption_by_requeue(slurm: Any, grace: int) -> None:
    """With and without a grace; the attempt is Slurm's, and the directory is the same.

    Slurm waits 2 minutes before it starts a job again.
    """
    site: SlurmSite = slurm(2)
    site.lab.slurm("scontrol", "update", "partitionname=batch", f"gracetime={grace}")
    number = submit(site, "requeued", 2, train=AGAIN, exclusive=True, requeue=True)
    other = site.lab.slurm("sbatch", "--parsable", "-N2", "--exclusive", "-p", "urgent", "--wrap", "sleep 1")
    assert site.lab.reaches(number, lambda state: state == "PENDING", 30)
    state, code, reason = ended(site, "requeued", 2)
    assert (state, code) == ("stopped", 143) and reason.startswith(f"Slurm's job {number} was ")
    assert site.lab.over(other) == "COMPLETED"
    bundle = site.shared / "requeued/bundle.pyz"
    assert bundle.exists(), "the next run needs it"
    site.lab.slurm("scontrol", "update", f"jobid={number}", "starttime=now")
    assert site.lab.over(number, 60) == "COMPLETED", bundles.output(site, "requeued")
    assert not bundle.exists(), "it has the job's key"
    assert site.lab.job(number)["Restarts"] == "1"
    assert [end["state"] for end in events(site, "requeued", "ended")] == ["stopped", "succeeded"] * 2
    assert {event["attempt"] for event in events(site, "requeued", "started")} == {0, 1}


@pytest.mark.engines
def test_a_crashed_node_and_requeue(slurm: Any) -> None:
    """The others end in order, and the job goes on without the node."""
    site: SlurmSite = slurm(3)
    number = submit(site, "moved", 2, train=AGAIN, requeue=True)
    site.lab.crash(1)
    assert site.lab.reaches(number, lambda state: state == "PENDING", 60)
    site.lab.slurm("scontrol", "update", f"jobid={number}", "starttime=now")
    assert site.lab.over(number, 60) == "COMPLETED", bundles.output(site, "moved")
    assert [end["state"] for end in events(site, "moved", "ended")][-1] == "succeeded"
