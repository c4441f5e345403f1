"""Each way in which a job in containers ends: exit code, verdict, and neither a container nor a process left on any node.

The ranks are shell scripts in podman's containers on two nodes. Each starts a child with a session of its own, which a
plain kill of the container's first process leaves. A file in a folder that is mounted in all containers states what a rank
does next.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import containers
from tests.cli import Done, LabSite, Process, Running, until
from tests.lab.lab import HOME, Lab

LOSS, GRACE = 3.0, 2.0
SLACK = 20.0  # seconds that a loaded machine may add
RANKS = 2  # one on each node
SMALL = 1  # the node with a disk of its own for jobs
WHAT = HOME / "what"
WAITS = f"""\
setsid sleep 1000 &
echo ready $CLUSTERTOOL_RANK attempt $CLUSTERTOOL_ATTEMPT
while ! [ -e {WHAT}/$CLUSTERTOOL_RANK ]; do sleep 0.05; done
. {WHAT}/$CLUSTERTOOL_RANK
"""
STUBBORN = f"trap '' TERM\n{WAITS}"
FILL = """\
dd if=/dev/zero of=big bs=4k 2>/dev/null
echo lost line
exit 9
"""
TAKES_MEMORY = f'exec {sys.executable} -c "x = bytearray(300 << 20); print(len(x))"\n'


@dataclass
class ContainerRun:
    """A job whose ranks are ready, and the command that follows it."""

    site: LabSite
    command: Running
    at: float = field(default_factory=time.monotonic)  # of the fault

    def does(self, rank: int, text: str) -> None:
        """Let a rank run `text` in its shell."""
        self.at = time.monotonic()
        _does(self.site, rank, text)

    def strikes(self, found: list[Process], number: signal.Signals = signal.SIGKILL) -> None:
        (process,) = found
        self.at = time.monotonic()
        os.kill(process.pid, number)

    def ranks(self, node: int) -> list[Process]:
        """First processes of containers."""
        return [p for p in self.site.processes(node) if p.argv == ("sh", "train.sh")]

    def clients(self, node: int) -> list[Process]:
        return [p for p in self.site.processes(node) if Path(p.argv[0]).name == "podman" and "run" in p.argv]

    def named(self, node: int, name: str) -> list[Process]:
        return [process for process in self.site.processes(node) if process.name == name]

    def job(self) -> str:
        found = re.search(r"^job (\S+):", self.command.err, re.M)
        assert found, self.command.err
        return found.group(1)

    def ends(self, code: int, verdict: str, seconds: float, lost: tuple[int, ...] = ()) -> Done:
        """Wait for the end of everything. seconds: after the fault. lost: nodes without power."""
        done = self.command.wait(seconds + SLACK + 30)
        print(f"MEASURED {done.last}: {time.monotonic() - self.at:.2f} s after the fault")
        assert re.search(verdict, done.last), done.err
        done.ends(code)
        reachable = sorted(set(range(self.site.count)) - set(lost))
        containers.no_containers(self.site, nodes=reachable, seconds=seconds + SLACK)
        gone = time.monotonic() - self.at
        print(f"MEASURED all gone {gone:.2f} s after the fault")
        assert gone < seconds + SLACK
        return done


def _does(site: LabSite, rank: int, text: str) -> None:
    for node in range(site.count):
        path = site.home(node) / "what" / str(rank)
        path.with_name("new").write_text(text)
        path.with_name("new").rename(path)


@pytest.fixture(scope="module")
def cluster(
    module_lab: Callable[..., Lab], tmp_path_factory: pytest.TempPathFactory, container_image: Path
) -> Iterator[LabSite]:
    etc = tmp_path_factory.mktemp("etc")
    disks = {SMALL: {"disk": "8m"}}
    nodes = {node: containers.container_node(etc / str(node), **disks.get(node, {})) for node in range(RANKS)}
    made = LabSite(etc / "site", module_lab(RANKS, nodes=nodes))
    for node in range(RANKS):
        (made.home(node) / "what").mkdir()
    containers.put_image(made, container_image, nodes=[0])
    containers.copy_image(made)
    yield made
    made.close()


@pytest.fixture
def site(cluster: LabSite) -> Iterator[LabSite]:
    """The cluster that all tests share, without jobs."""
    for node in range(RANKS):
        for path in (cluster.home(node) / "what").iterdir():
            path.unlink()
    yield cluster
    for running in cluster.running:
        running.close()
    cluster.running.clear()
    try:
        containers.no_containers(cluster)
    except AssertionError:  # one that fails leaves nothing for the next one
        for process in cluster.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for node in range(RANKS):
            for name in containers.containers(cluster, node):
                containers.podman(cluster, node, "rm", "--force", name)
        raise


@pytest.fixture
def started(site: LabSite) -> Callable[..., ContainerRun]:
    """started("--max-restarts", 1, program=STUBBORN) -> the job, whose ranks are ready."""

    def make(*options: object, program: str = WAITS, **keys: object) -> ContainerRun:
        _conf(site)
        site.workspace(train_sh=program)
        command = site.start("run", "-w", "job", "--script", "sh train.sh", "--all-ranks", *options)
        for rank in range(RANKS):
            command.says(rf"\bready {rank} attempt 0$")
        return ContainerRun(site, command)

    return make


def _conf(site: LabSite, **more: object) -> None:
    settings = containers.settings(**more)
    volumes = [*settings["volumes"], f"{WHAT}:{WHAT}"]  # type: ignore[misc]
    site.conf(CONTAINER={**settings, "volumes": volumes}, LOSS_TIMEOUT=LOSS, GRACE=GRACE, CONNECT_TIMEOUT=5)


def one_rank(site: LabSite, script: str, *options: object, text: str = "", **container: object) -> Done:
    """Run a script as the only rank, on node 0. text: of train.sh. That nothing is left is checked at the end of the test."""
    _conf(site, **container)
    site.workspace(train_sh=text)
    return site.inv("run", "-w", "job", "--only", "node0", "--script", script, *options)


def test_a_rank_exits(started: Callable[..., ContainerRun]) -> None:
    job = started()
    job.does(1, "exit 7")
    done = job.ends(7, r"exit 7 \(job\): trainer 1 on node1: exit code 7$", 3)
    assert "the trainer process with rank=[1] was aborted" in done.err
    assert done.err.count("trainer 1 on node1 ended with exit code 7") == 1
    trainers = {p["rank"]: p for p in job.site.inv("status", "--json").ends(0).json["processes"]}
    assert (trainers[1]["state"], trainers[1]["code"]) == ("failed", 7)
    assert trainers[0]["state"] == "stopped"


@pytest.mark.chaos  # test_container_rootless.py kills one
def test_a_rank_is_killed(started: Callable[..., ContainerRun]) -> None:
    job = started()
    job.strikes(job.ranks(1))
    done = job.ends(137, r"exit 137 \(job\): trainer 1 on node1: .+", 3)
    assert done.err.count("trainer 1 on node1 ended with signal 9 (killed)") == 1


@pytest.mark.parametrize("what", ["conmon", pytest.param("client", marks=pytest.mark.chaos)])
def test_a_process_of_the_runtime_is_killed(started: Callable[..., ContainerRun], what: str) -> None:
    """The rank of this container is the cause, and its processes end although the runtime does not know of them any more."""
    job = started()
    job.strikes(job.named(1, "conmon") if what == "conmon" else job.clients(1))
    done = job.ends(137, r"exit 137 \(job\): trainer 1 on node1: .+", 3)
    assert ("the process of podman that observed its container has ended" in done.err) == (what == "conmon")


@pytest.mark.parametrize("node", [1, pytest.param(0, marks=pytest.mark.chaos)], ids=["node1", "the coordinator"])
def test_a_supervisor_is_killed(started: Callable[..., ContainerRun], node: int) -> None:
    job = started()
    job.strikes(job.named(node, "ct-supervisor"))
    job.ends(75, f"node{node}.* lost", LOSS + GRACE)


@pytest.mark.chaos  # test_jobs_faults.py has it without containers, and test_ctrl_c_... ends containers in the same way
def test_a_node_is_cut_off(started: Callable[..., ContainerRun]) -> None:
    """Both sides end by themselves: the cut node too, with its containers."""
    job = started()
    job.at = time.monotonic()
    job.site.lab.cut(1)
    try:
        job.ends(75, "node1.* lost", LOSS + GRACE)
    finally:
        job.site.lab.heal(1)


@pytest.mark.chaos
def test_a_node_crashes(started: Callable[..., ContainerRun]) -> None:
    """Its store keeps the container. It disturbs no other job, and stop or clean removes it."""
    job = started()
    job.at = time.monotonic()
    job.site.lab.crash(1)
    try:
        job.ends(75, "node1.* lost", LOSS + GRACE, lost=(1,))
    finally:
        job.site.lab.start(1)
    (job.site.home(1) / "what/1").write_text("exit 0")
    (job.site.home(0) / "what/0").write_text("exit 0")
    job.site.inv("run", "-w", "job", "--script", "sh train.sh").ends(0)
    assert len(containers.containers(job.site, 1)) == 1
    job.site.inv("stop", "--job", job.job()).ends(0)
    assert not containers.containers(job.site, 1)


def test_ctrl_c_and_a_first_process_without_handlers(site: LabSite) -> None:
    """TERM ends `sleep`, which in a process namespace of its own would ignore it."""
    _conf(site)
    site.workspace()
    job = ContainerRun(site, site.start("run", "-w", "job", "--script", "sleep 1000"))
    until(lambda: all(_sleeps(site, node) for node in range(RANKS)), 30, lambda: f"{site.living()}")
    job.at = job.command.signal(signal.SIGINT)
    done = job.ends(130, r"exit 130 \(tool\): Ctrl\+C$", 3)
    assert "node[0-1]: clean" in done.err
    trainers = job.site.inv("status", "--json").ends(0).json["processes"]
    assert [p["signal"] for p in trainers] == [int(signal.SIGTERM)] * RANKS


def _sleeps(site: LabSite, node: int) -> bool:
    return any(process.argv == ("sleep", "1000") for process in site.processes(node))


@pytest.mark.chaos  # test_container_rootless.py and test_docker.py have it
def test_ctrl_c_and_a_program_that_ignores_term(started: Callable[..., ContainerRun]) -> None:
    job = started(program=STUBBORN)
    job.at = job.command.signal(signal.SIGINT)
    done = job.ends(130, "exit 130", GRACE + 3)
    assert time.monotonic() - job.at > GRACE
    assert "node[0-1]: clean" in done.err


@pytest.mark.chaos  # test_jobs_interrupt.py has it without containers, which the end of the grace kills in the same way
def test_ctrl_c_twice(started: Callable[..., ContainerRun]) -> None:
    job = started("--grace", 60, program=STUBBORN)
    job.at = job.command.signal(signal.SIGINT)
    job.command.says("Ctrl.C again")
    job.at = job.command.signal(signal.SIGINT)
    job.ends(130, "exit 130", 3)


def test_a_disk_that_is_full(started: Callable[..., ContainerRun]) -> None:
    job = started()
    job.does(SMALL, FILL)
    done = job.ends(9, rf"exit 9 \(job\): trainer {SMALL} on node{SMALL}: the disk of .* is full$", 5)
    assert f"node{SMALL}: the disk of" in done.err
    job.site.lab.exec(SMALL, ["sh", "-c", "rm -f ~/clustertool/JOB*/big"])


@pytest.mark.chaos
def test_restarts(started: Callable[..., ContainerRun]) -> None:
    job = started("--max-restarts", 1)
    job.does(1, f"rm {WHAT}/1; exit 3\n")
    for rank in range(RANKS):
        job.command.says(rf"\bready {rank} attempt 1$")
    names = [name for node in range(RANKS) for name in containers.containers(job.site, node)]
    assert len(names) == RANKS, names
    for rank in range(RANKS):
        job.does(rank, "echo end; exit 0")
    done = job.ends(0, r"exit 0 \(job\)", GRACE + 3)
    assert "attempt 1" in done.err
    folder = job.site.jobs(1)[-1]
    assert (folder / "log/workerlog.1").read_text().splitlines() == ["ready 1 attempt 0"]
    assert (folder / "log/attempt1/workerlog.1").read_text().splitlines() == ["ready 1 attempt 1", "end"]


@pytest.mark.chaos  # Ctrl+C ends a job in the same way
@pytest.mark.parametrize("force", [False, True], ids=["stop", "stop --force"])
def test_stop(started: Callable[..., ContainerRun], force: bool) -> None:
    job = started(program=STUBBORN)
    job.at = time.monotonic()
    done = job.site.inv("stop", *(["--force"] if force else [])).ends(0)
    assert done.out.endswith(": node[0-1]: clean\n")
    assert not any(containers.containers(job.site, node) for node in range(RANKS)), "stop has proved this"
    job.ends(143, "exit 143", GRACE + 3)


def test_stop_without_supervisors(started: Callable[..., ContainerRun]) -> None:
    """Supervisors and guards were killed. The records and the labels are what is left to find ranks and containers."""
    job = started(program=STUBBORN)
    for node in range(RANKS):
        supervisor, guard = job.named(node, "ct-supervisor"), job.named(node, "ct-guard")
        job.strikes(supervisor, signal.SIGSTOP)  # it replaces a guard that is killed
        job.strikes(guard)
        job.strikes(supervisor)
    job.at = time.monotonic()
    assert all(job.ranks(node) for node in range(RANKS))
    done = job.site.inv("stop", "--job", job.job()).ends(0)
    assert "node[0-1]: clean" in done.out
    assert not any(containers.containers(job.site, node) for node in range(RANKS)), "stop has proved this"
    job.command.close()
    containers.no_containers(job.site)


@pytest.mark.chaos
def test_stop_after_conmon_was_killed(started: Callable[..., ContainerRun]) -> None:
    job = started("--on-failure", "continue")
    job.strikes(job.named(1, "conmon"))
    done = job.site.inv("stop").ends(0)
    assert "node[0-1]: clean" in done.out
    done = job.command.wait(60)
    job.ends(done.code, "exit", GRACE + 3)


@pytest.mark.chaos
def test_a_frozen_rank(started: Callable[..., ContainerRun]) -> None:
    """It is shown, and KILL ends it."""
    job = started()
    job.strikes(job.ranks(1), signal.SIGSTOP)
    job.command.says("trainer 1 on node1 .*(stopped|frozen)")
    job.at = job.command.signal(signal.SIGINT)
    job.ends(130, "exit 130", GRACE + 3)


def test_an_image_that_no_node_has(site: LabSite) -> None:
    done = one_rank(site, "sh train.sh", "--image", "no-such-image:9")
    assert done.code in (69, 125), done.err
    assert "no-such-image:9" in done.err


def test_a_command_that_the_image_does_not_have(site: LabSite) -> None:
    done = one_rank(site, "no-such-program --lr 1").ends(127)
    assert re.search("trainer 0 on node0 .*127", done.err)
    assert "no-such-program does not exist in the image" in done.out + done.err


@pytest.mark.parametrize("code", [125, *(pytest.param(code, marks=pytest.mark.chaos) for code in (126, 127))])
def test_a_program_with_a_code_of_the_runtime(site: LabSite, code: int) -> None:
    """It is the program's: the note does not blame the runtime."""
    done = one_rank(site, "sh train.sh", text=f"echo end; exit {code}\n").ends(code)
    assert f"trainer 0 on node0 ended with exit code {code}\n" in done.err
    assert "podman" not in done.err.partition(f"exit code {code}")[2]
    assert done.last.startswith(f"clustertool: exit {code} (job): ")


def test_an_option_that_the_runtime_refuses(site: LabSite) -> None:
    """The note has the runtime's own message, and the code is not that of the job."""
    done = one_rank(site, "sh train.sh", options=["--no-such-option"]).ends(125)
    assert re.search("trainer 0 on node0 .*125.*podman.*no-such-option", done.err)
    assert done.last.startswith("clustertool: exit 125 (tool): trainer 0 on node0: podman did not start its container")
    found = site.inv("status", "--json").ends(0).json["outcome"]
    assert (found["code"], found["source"]) == (125, "tool")


def test_a_rank_beyond_its_memory_limit(site: LabSite) -> None:
    with containers.oom_kills(True):
        done = one_rank(site, "sh train.sh", text=TAKES_MEMORY, options=["--memory", "100m"])
    done.ends(137)
    assert re.search("trainer 0 on node0 ended with signal 9 .*memory", done.err)
