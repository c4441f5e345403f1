"""Each way in which a job of mode mpi ends: exit code, verdict, and nothing left on any node.

Each rank has a child with a session of its own, which bare mpirun leaves behind. What has to be gone: ranks and their
children, mpirun, orted, hydra_pmi_proxy, supervisors, and the launcher's session folders in /tmp, /var/tmp and /dev/shm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests import mpi
from tests.cli import LabSite, Running, until
from tests.mpi import MPICH, OPENMPI, Mpi

LOSS, GRACE = 3.0, 2.0
SLACK = 15.0  # seconds that a loaded machine may add
RANKS = 2  # one on each node
# Each rank waits in all-reduces until a file tells what happens to rank 1.
PROGRAM = """
    import os, subprocess, sys, time
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    world.barrier()
    print("ready", world.rank, "attempt", os.environ["CLUSTERTOOL_ATTEMPT"], flush=True)
    what = ""
    while not what:
        time.sleep(0.05)
        path = os.path.expanduser("~/what")
        mine = open(path).read() if os.path.exists(path) else ""
        what = world.allreduce(mine)  # the text of the one node that has it
    if what.startswith("exit") and world.rank == 1:
        os._exit(int(what.split()[1]))  # without MPI_Finalize
    if what.startswith("exit"):
        time.sleep(2)  # a peer that finds the dead one in MPI_Finalize fails too, on a busy machine before that is known
    if what.startswith("abort") and world.rank == 1:
        world.Abort(int(what.split()[1]))
    if what == "sleep" and world.rank == 1:
        time.sleep(600)
    if what == "end":
        print("end", world.rank, flush=True)
    MPI.Finalize()
"""
# Ranks that end in order when they get SIGTERM, and ranks that ignore it.
POLITE = """
    import os, signal, time
    from mpi4py import MPI
    def end(*_):
        os.write(1, b"TERM\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    MPI.COMM_WORLD.barrier()
    print("ready", MPI.COMM_WORLD.rank, "attempt", os.environ["CLUSTERTOOL_ATTEMPT"], flush=True)
    time.sleep(600)
"""
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{textwrap.dedent(PROGRAM)}"


@dataclass
class MpiRun:
    """A job that runs on two nodes, and the command that follows it."""

    site: LabSite
    kind: Mpi
    command: Running
    before: list[set[str]]
    at: float = field(default_factory=time.monotonic)  # of the fault

    def does(self, what: str) -> None:
        """Tell the ranks, by a file on node 1."""
        self.at = time.monotonic()
        path = self.site.home(1) / "what"
        path.with_name("new").write_text(what)
        path.with_name("new").rename(path)

    def strikes(self, pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
        (pid,) = pids
        self.at = time.monotonic()
        os.kill(pid, number)

    def ranks(self, node: int) -> list[int]:
        return [p.pid for p in self.site.processes(node) if p.argv[-1:] == ("train.py",)]

    def named(self, node: int, name: str) -> list[int]:
        return [process.pid for process in self.site.processes(node) if process.name == name]

    def mpirun(self) -> list[int]:
        return mpi.mpiruns(self.site.processes(0))

    def daemons(self, node: int) -> list[int]:
        return mpi.daemons(self.site.processes(node))

    def ends(self, code: int, verdict: str, seconds: float, lost: tuple[int, ...] = ()) -> str:
        """Wait for the end of all. What the command has printed on stderr. lost: nodes whose power is off."""
        try:
            done = self.command.wait(seconds + 30).ends(code)
        except AssertionError as error:
            raise AssertionError(f"{error}\nliving: {self.site.living()}") from None
        ended = time.monotonic() - self.at
        assert re.search(verdict, done.last), done.err
        until(lambda: not self.site.living(), seconds + SLACK, lambda: f"these to end: {self.site.living()}")
        gone = time.monotonic() - self.at
        assert gone < seconds + SLACK
        print(f"MEASURED {self.kind.name}: {done.last}: ended {ended:.2f} s, all gone {max(ended, gone):.2f} s")
        reachable = sorted(set(range(RANKS)) - set(lost))
        mpi.no_new_files(self.site, self.before, reachable, done.last)
        assert not any(mpi.strangers(self.site, node) for node in reachable)
        return done.err


@pytest.fixture
def started(site: Callable[..., LabSite]) -> Callable[..., MpiRun]:
    """started(MPICH, *options) -> the job, whose ranks are ready."""

    def make(kind: Mpi, *options: object, program: str = PROGRAM) -> MpiRun:
        both = mpi.use(site(RANKS), kind, LOSS_TIMEOUT=LOSS, GRACE=GRACE, CONNECT_TIMEOUT=5)
        both.workspace(train_py=program)
        before = [mpi.files(both, node) for node in range(RANKS)]
        command = both.start("run", "-w", "job", "--mode", "mpi", "--all-ranks", *options)
        for rank in range(RANKS):
            command.says(rf"\bready {rank} attempt 0$")
        return MpiRun(both, kind, command, before)

    return make


@pytest.mark.parametrize("kind", mpi.each(OPENMPI))
def test_a_rank_exits(started: Callable[..., MpiRun], kind: Mpi) -> None:
    job = started(kind)
    job.does("exit 7")
    err = job.ends(7, r"exit 7 \(job\): trainer 1 on node1: exit code 7$", 3)
    assert "the trainer process with rank=[1] was aborted" in err
    assert err.count("trainer 1 on node1 ended with exit code 7") == 1
    status = job.site.inv("status", "--json").ends(0).json
    trainers = {p["rank"]: p for p in status["processes"] if p["role"] == "trainer"}
    assert (trainers[1]["state"], trainers[1]["code"]) == ("failed", 7)
    assert trainers[0]["state"] == "stopped"


@pytest.mark.parametrize("kind", mpi.each())
def test_a_rank_is_killed(started: Callable[..., MpiRun], kind: Mpi) -> None:
    job = started(kind)
    job.strikes(job.ranks(1))
    err = job.ends(137, r"exit 137 \(job\): trainer 1 on node1: killed \(signal 9\)$", 3)
    assert err.count("trainer 1 on node1 ended with signal 9 (killed)") == 1


@pytest.mark.parametrize("kind", mpi.each())
def test_mpi_abort(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """The code that a rank gives to MPI_Abort. mpirun of MPICH kills that rank before it can exit."""
    job = started(kind)
    job.does("abort 7")
    culprit = "trainer 1 on node1" if kind is OPENMPI else "mpirun( 0)? on node0"
    job.ends(7, rf"exit 7 \(job\): {culprit}: .+", 5)


@pytest.mark.parametrize("kind", mpi.each())
def test_a_rank_returns_without_mpi_finalize(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """The others wait for it in MPI_Finalize, which bare mpirun of MPICH does forever."""
    job = started(kind, "--timeout", 20)
    job.does("exit 0")
    done = job.command.wait(60)
    assert done.code not in (0, -9)
    job.ends(done.code, r"mpirun|--timeout 20|trainer 0 on", 25)  # or they fail in it


@pytest.mark.parametrize("kind", mpi.each())
def test_ranks_hang_in_mpi_finalize(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """One rank never arrives: only --timeout, a stop or Ctrl+C ends that."""
    job = started(kind, "--timeout", 4)
    job.does("sleep")
    job.ends(124, "--timeout 4", 4 + GRACE)


@pytest.mark.parametrize("kind", mpi.each(OPENMPI))
def test_a_daemon_is_killed(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """It is the cause, and mpirun's own exit is its consequence."""
    job = started(kind)
    job.strikes(job.daemons(1))
    err = job.ends(137, r"exit 137 \(job\): MPI daemon 1 on node1: killed \(signal 9\)$", 5)
    assert "MPI daemon 1 on node1 ended with signal 9 (killed)" in err


@pytest.mark.parametrize("kind", mpi.each(MPICH))
def test_mpirun_is_killed(started: Callable[..., MpiRun], kind: Mpi) -> None:
    job = started(kind)
    job.strikes(job.mpirun())
    err = job.ends(137, r"exit 137 \(job\): mpirun on node0: killed \(signal 9\)$", 5)
    assert re.search(r"mpirun( 0)? on node0 ended with signal 9 \(killed\)", err)


@pytest.mark.parametrize("node", [1, 0], ids=["node1", "the coordinator"])
@pytest.mark.parametrize("kind", mpi.each())
def test_a_supervisor_is_killed(started: Callable[..., MpiRun], kind: Mpi, node: int) -> None:
    job = started(kind)
    job.strikes(job.named(node, "ct-supervisor"))
    job.ends(75, f"node{node}.* lost", LOSS + GRACE)


@pytest.mark.parametrize("node", [1, 0], ids=["node1", "the coordinator"])
@pytest.mark.parametrize("kind", mpi.each())
def test_a_node_crashes(started: Callable[..., MpiRun], kind: Mpi, node: int) -> None:
    job = started(kind)
    job.at = time.monotonic()
    job.site.lab.crash(node)
    job.ends(75, f"node{node}.* lost", LOSS + GRACE, lost=(node,))


@pytest.mark.parametrize("kind", mpi.each(OPENMPI))
def test_a_node_is_cut_off(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """Both sides end by themselves: the cut node too, with its ranks, its daemon and its folders.

    The ranks sleep: one that waits in an all-reduce for a rank that is cut off keeps a processor busy.
    """
    job = started(kind, program=POLITE)
    job.at = time.monotonic()
    job.site.lab.cut(1)
    job.ends(75, "node1.* lost", LOSS + GRACE)


@pytest.mark.parametrize("kind", mpi.each(MPICH))
def test_ctrl_c(started: Callable[..., MpiRun], kind: Mpi) -> None:
    job = started(kind)
    job.at = job.command.signal(signal.SIGINT)
    err = job.ends(130, r"exit 130 \(tool\): Ctrl\+C$", 3)
    assert "node[0-1]: clean" in err


@pytest.mark.parametrize("kind", mpi.each())
def test_stop(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """Each rank gets SIGTERM once, and ends by itself."""
    job = started(kind, program=POLITE)
    job.at = time.monotonic()
    done = job.site.inv("stop").ends(0)
    assert done.out.endswith(": node[0-1]: clean\n")
    job.ends(143, "exit 143", 3)
    logs = [(job.site.jobs(node)[0] / f"log/workerlog.{node}").read_text() for node in range(RANKS)]
    assert logs == [f"ready {rank} attempt 0\nTERM\n" for rank in range(RANKS)]


@pytest.mark.parametrize("kind", mpi.each())
def test_ranks_that_ignore_sigterm(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """The grace of ranks is that of the tool, and not that of mpirun."""
    job = started(kind, program=STUBBORN)
    job.at = job.command.signal(signal.SIGINT)
    err = job.ends(130, "exit 130", GRACE + 3)
    assert time.monotonic() - job.at > GRACE
    assert "node[0-1]: clean" in err


@pytest.mark.parametrize("kind", mpi.each(OPENMPI))
def test_restarts(started: Callable[..., MpiRun], kind: Mpi) -> None:
    """A new mpirun with new daemons for the second attempt, which succeeds."""
    job = started(kind, "--max-restarts", 1)
    first = job.mpirun()
    job.does("exit 3")
    until(lambda: not (set(first) & {p.pid for p in job.site.processes(0)}), 30, lambda: "the first mpirun to end")
    (job.site.home(1) / "what").unlink()
    for rank in range(RANKS):
        job.command.says(rf"\bready {rank} attempt 1$")
    job.does("end")
    err = job.ends(0, r"exit 0 \(job\)", GRACE + 3)
    assert "attempt 1" in err
    folder = job.site.jobs(1)[0]
    assert (folder / "log/attempt1/workerlog.1").read_text().splitlines() == ["ready 1 attempt 1", "end 1"]
    assert (folder / "log/workerlog.1").read_text().splitlines() == ["ready 1 attempt 0"]


@pytest.mark.parametrize("kind", mpi.each())
def test_a_program_that_cannot_start(site: Callable[..., LabSite], kind: Mpi) -> None:
    """The code of the rank, and the reason in its log."""
    both = mpi.use(site(RANKS), kind, python=False)
    both.workspace()
    before = [mpi.files(both, node) for node in range(RANKS)]
    at = time.monotonic()
    command = both.start("run", "-w", "job", "--mode", "mpi", "--script", "no-such-program --lr 1")
    job = MpiRun(both, kind, command, before, at)
    job.ends(127, "exit 127", 20)
    assert "[trainer 0 node0] the command no-such-program does not exist here" in command.out


def test_a_wrong_option_of_mpirun(site: Callable[..., LabSite]) -> None:
    """mpirun fails before any rank: it is the culprit, and its own message is shown."""
    both = mpi.use(site(RANKS), OPENMPI, python=False)
    both.workspace(train_py="print('started')")
    (both.folder / "job/job.toml").write_text('mode = "mpi"\n[mpi]\noptions = ["--no-such-option"]\n')
    before = [mpi.files(both, node) for node in range(RANKS)]
    job = MpiRun(both, OPENMPI, both.start("run", "-w", "job"), before)
    done = job.command.wait(60)
    assert done.code not in (0, 70), done
    err = job.ends(done.code, r"mpirun on node0: exit code", 30)
    assert "no-such-option" in err


@pytest.mark.chaos
def test_the_records_of_a_job(started: Callable[..., MpiRun]) -> None:
    """Each rank, mpirun and each daemon has its events, log and usage as ranks of other modes have."""
    job = started(OPENMPI)
    job.does("end")
    job.ends(0, r"exit 0 \(job\)", 5)
    found: dict[tuple[str, int], list[str]] = {}
    for node in range(RANKS):
        for line in (job.site.jobs(node)[0] / ".clustertool/events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["type"] in ("started", "exited"):
                found.setdefault((event["role"], event["rank"]), []).append(event["type"])
    assert {name: kinds for name, kinds in found.items() if name[0] == "trainer"} == {
        ("trainer", rank): ["started", "exited"] for rank in range(RANKS)
    }
    assert found[("mpirun", 0)] == ["started", "exited"]
