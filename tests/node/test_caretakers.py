"""Supervisor and guard watch each other: whichever is killed or frozen, the job is supervised or ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.storage import files
from clustertool.node.supervisor import guard
from clustertool.node.system import processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, kill, state, until

TREES = {
    "plain": p.PLAIN,
    "ignores TERM": p.IGNORES_TERM,
    "setsid": p.SETSID,
    "daemon": p.DAEMON,
    "retitled": p.RETITLED,
    "wiped environment": p.ENV_WIPED,
    "headless": p.HEADLESS,
}


def started(bench: Bench, program: Any, nodes: int = 1, per_node: int = 1) -> Job:
    """A job whose every process is in the book. Its supervisor has sent heartbeats: before the first the guard waits 30 s."""
    job = bench.run(bench.nodes(nodes, LOSS_TIMEOUT=2), program, per_node=per_node).ready()
    for process in job.plan.processes:
        node, rank = process.node, process.rank
        of_rank = {job.rank(rank), *job.reported(rank)}
        until(lambda node=node, of_rank=of_rank: job.seen(node) >= of_rank, "all are in the book")
    return job


def deaf(job: Job, node: int) -> None:
    """Supervisor and guard are there, and get nothing."""
    for kind in ("supervisor", "guard"):
        kill(job.process(kind, node), signal.SIGSTOP)


@pytest.mark.parametrize("tree", TREES)
def test_supervisor_killed(bench: Bench, tree: str) -> None:
    job = started(bench, TREES[tree])
    kill(job.process("supervisor"))
    assert job.until("supervisor-lost")[0]["why"] == "the supervisor died"
    assert job.until("clean")[0]["survivors"] == []
    job.gone()


def test_a_guard_creates_nothing_in_a_directory_that_is_removed(tmp_path: Path) -> None:
    """The child task of a machine that joined takes the job back at the same moment: a new file would keep the directory."""
    (tmp_path / "root").mkdir()
    top = tmp_path / "root/JOBx"
    job = files.make_job_dir(str(top))
    before = sorted(top.rglob("*"))
    spec: Any = {"node": 0, "lead": {"node": 0}, "mark": "no process has this mark"}
    dead = subprocess.Popen(["true"])
    dead.wait()
    guard._take_over("the supervisor died", processes.Process(dead.pid, 1), spec, job, ())
    os.close(job)
    assert sorted(top.rglob("*")) == before


def test_a_guard_leaves_the_child_that_takes_the_job_back(tmp_path: Path) -> None:
    """The descriptors of a process that is killed are closed while it still has its children."""
    program = "sleep 60 & echo $!; sleep 60 & echo $!; wait"
    spec: Any = {"node": 0, "lead": {"node": 0}, "mark": "no process has this mark"}
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        taking, rank = (processes.identify(int(supervisor.stdout.readline())) for _ in range(2))
        assert taking is not None and rank is not None
        job = os.open(tmp_path, os.O_RDONLY)
        guard._take_over("the supervisor died", processes.identify(supervisor.pid), spec, job, (taking,))
        os.close(job)
        assert processes.alive(taking) and not processes.alive(rank)
        kill(taking)


def test_the_coordinator_learns_of_a_dead_supervisor_at_once(bench: Bench) -> None:
    """Not after the loss timeout; and the ranks that fail for want of the dead ones are not the culprits."""
    peer = bench.tmp / "peer"
    program = p.python(f"""
import os, sys, time
if os.environ["RANK"] == "2":
    open({str(peer)!r}, "w").write(str(os.getpid()))
while not os.path.exists({str(peer)!r}):
    time.sleep(0.01)
pid = open({str(peer)!r}).read()
say("ready")
while os.path.exists("/proc/" + pid):
    time.sleep(0.001)
sys.exit(9)
""")
    job = bench.run(bench.nodes(3, LOSS_TIMEOUT=60), program).ready()
    kill(job.process("supervisor", 2))
    outcome = job.ended()
    assert (outcome["state"], outcome["code"], outcome["node"]) == ("lost", 75, 2)
    assert outcome["reason"] == f"node {job.nodes[2].host.name} is lost: the supervisor died"
    assert job.until("clean", 2)[0]["survivors"] == []
    job.gone()


def test_supervisor_frozen(bench: Bench) -> None:
    job = started(bench, p.one_each(p.IGNORES_TERM, p.DAEMON, p.ENV_WIPED, p.RETITLED), per_node=4)
    kill(job.process("supervisor"), signal.SIGSTOP)
    assert job.until("supervisor-lost")[0]["why"] == "the supervisor did not move for 2 s"
    job.until("clean")
    job.gone()


def test_a_busy_supervisor_is_not_frozen(tmp_path: Path) -> None:
    """It sends no beat for longer than the loss timeout, but is ready to run: a loaded machine. Then it sleeps."""
    busy = "import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end: pass\n"
    busy += "print('sleeps', flush=True)\ntime.sleep(60)"
    (tmp_path / ".clustertool").mkdir()
    (tmp_path / ".clustertool/events.jsonl").touch()  # the supervisor makes it
    spec = {"node": 0, "lead": {"node": 0}, "mark": "x", "policy": {"loss_timeout": 2}}
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as supervisor, ours, theirs:
        process = processes.identify(supervisor.pid)
        pid = os.fork()
        if pid == 0:
            ours.close()
            guard.run(theirs, process, spec, os.open(tmp_path, os.O_RDONLY))
            os._exit(0)
        theirs.close()
        ours.send(b"s")
        assert supervisor.stdout.readline() == b"sleeps\n"
        os.waitpid(pid, 0)
        assert supervisor.wait() == -signal.SIGKILL
    assert "did not move for 2 s" in (tmp_path / ".clustertool/events.jsonl").read_text()


@pytest.mark.parametrize("ender", ["guard", "stop"])
def test_born_while_the_supervisor_is_frozen(bench: Bench, ender: str) -> None:
    """Not in the book, and without a marker: known as a child of the frozen one's children."""
    job = started(bench, p.ENV_WIPED_LATE)
    kill(job.process("supervisor"), signal.SIGSTOP)
    (job.dir() / "go").touch()
    job.reported(count=1)
    if ender == "stop":
        kill(job.process("guard"), signal.SIGSTOP)
        assert job.stop(grace=0.1)["state"] == "clean"
    job.until("clean")
    job.gone()


def test_supervisor_frozen_for_a_moment(bench: Bench) -> None:
    job = started(bench, "echo ready; until [ -e go ]; do sleep 0.2; done; echo done")
    supervisor = job.process("supervisor")
    kill(supervisor, signal.SIGSTOP)
    until(lambda: state(supervisor) == "T")
    time.sleep(1.0)  # not a wait for anything: it is how long the supervisor is away, half of what the guard bears
    kill(supervisor, signal.SIGCONT)
    (job.dir() / "go").touch()
    assert job.ended()["state"] == "succeeded"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_guard(bench: Bench, number: signal.Signals) -> None:
    """A dead guard is replaced, a frozen one too; TERM is not for it. The job goes on."""
    job = started(bench, p.PLAIN)
    guard, supervisor = job.process("guard"), job.process("supervisor")
    kill(guard, number)
    if number == signal.SIGTERM:
        assert alive(guard)
    else:
        job.until("guard", count=2)
        until(lambda: not alive(guard))
    second = job.process("guard")
    assert alive(second) and alive(supervisor) and alive(job.rank())
    kill(supervisor)  # the new one is as good as the first
    job.until("clean")
    job.gone()


def test_supervisor_that_is_asked_to_end(bench: Bench) -> None:
    """As by a shutdown: the job is stopped everywhere, with grace and a verdict."""
    job = started(bench, p.SAYS_BYE, nodes=2)
    kill(job.process("supervisor", 1), signal.SIGTERM)
    for node in range(2):
        outcome = job.ended(node)
        assert (outcome["state"], outcome["code"]) == ("stopped", 143)
        sender = f"received SIGTERM from pid {os.getpid()} ("
        assert f"the supervisor on {job.nodes[1].host.name} {sender}" in outcome["reason"]
        assert f"), uid {os.getuid()}" in outcome["reason"] and "linger" not in outcome["reason"]
        assert job.log(node) == b"ready\nbye\n"


def test_a_signal_of_systemd_is_explained(bench: Bench) -> None:
    """As at a logout with KillUserProcesses=yes. Here a process with that name sends it."""
    job = started(bench, p.SAYS_BYE)
    sender = f"""
        open("/proc/self/comm", "w").write("systemd")
        import os
        os.kill({job.process("supervisor").pid}, 15)
        input()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(sender)], stdin=subprocess.PIPE) as systemd:
        reason = job.ended()["reason"]
        systemd.communicate()
    assert f"received SIGTERM from pid {systemd.pid} (" in reason
    assert "KillUserProcesses=yes: run `loginctl enable-linger`" in reason
    assert "\n" not in reason, "the sender's command has several lines"


def test_a_rank_blocks_no_signal(bench: Bench) -> None:
    """The supervisor blocks the signals that it reads with their sender; its ranks do not inherit this."""
    job = started(bench, "grep SigBlk /proc/self/status; echo ready")
    assert job.ended()["state"] == "succeeded"
    assert b"SigBlk:\t0000000000000000\n" in job.log()


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(tree, marks=() if tree in ("wiped environment", "headless") else pytest.mark.chaos)
        for tree in TREES
    ],
)
def test_both_killed(bench: Bench, tree: str) -> None:
    """No process is left to supervise the job; a stop, from any laptop, still ends all of it."""
    job = started(bench, TREES[tree])
    guard, supervisor = job.process("guard"), job.process("supervisor")
    kill(supervisor, signal.SIGSTOP)
    kill(guard)
    kill(supervisor)
    assert alive(job.rank()) or tree == "headless"
    client = job.nodes[0].open()
    assert client.ask("jobs", job=job.id)["jobs"][0]["state"] == "lost"
    assert client.ask("clean", job=job.id, exact=True)["running"] == [job.id]
    assert job.stop(client=client, grace=0.2) == {"state": "clean", "survivors": []}
    assert not job.living()
    assert job.stop(client=client) == {"state": "ended already", "survivors": []}
    assert client.ask("clean", job=job.id, exact=True)["removed"] == [job.id]


def test_both_killed_and_term_is_received(bench: Bench) -> None:
    job = started(bench, p.SAYS_BYE)
    kill(job.process("supervisor"), signal.SIGSTOP)
    kill(job.process("guard"))
    kill(job.process("supervisor"))
    assert job.stop()["state"] == "clean"
    assert job.log() == b"ready\nbye\n"


def test_both_frozen(bench: Bench) -> None:
    """A stop needs neither."""
    job = started(bench, p.ENV_WIPED)
    deaf(job, 0)
    assert job.stop(grace=0.2) == {"state": "clean", "survivors": []}
    assert not job.living()


def test_stop_says_clean_when_the_coordinator_has_left_too(bench: Bench) -> None:
    """It waits for a node whose supervisor had to be killed, and is not called clean before it has given that up."""
    job = bench.run(bench.nodes(3, LOSS_TIMEOUT=8), p.PLAIN).ready()
    deaf(job, 2)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda node: job.stop(node, grace=0.1), range(3)))
    assert not job.living()
    assert answers == [{"state": "clean", "survivors": []}] * 3
    assert job.events(2, "supervisor-lost")[0]["why"] == "test found that it does not respond"
    assert [job.ended(node)["code"] for node in range(2)] == [143, 143]


@pytest.mark.chaos
def test_force_ends_a_coordinator_that_waits(bench: Bench) -> None:
    """For a node that has been silent for less than the hour that conf.py allows."""
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=3600), p.PLAIN).ready()
    deaf(job, 1)
    assert job.stop(0, force=True) == {"state": "clean", "survivors": []}
    assert not alive(job.process("supervisor")) and not alive(job.process("guard"))
    assert job.stop(1, force=True) == {"state": "clean", "survivors": []}


def test_nodes_end_when_the_coordinator_dies(bench: Bench) -> None:
    """Supervisor and guard of node 0 are gone at once: the others end their ranks within loss timeout and grace."""
    job = bench.run(bench.nodes(3, LOSS_TIMEOUT=2), p.IGNORES_TERM, policy={"grace": 0.5})
    job.ready()
    kill(job.process("supervisor"), signal.SIGSTOP)
    kill(job.process("guard"))
    start = time.monotonic()
    kill(job.process("supervisor"))
    for node in (1, 2):
        outcome = job.ended(node)
        assert (outcome["state"], outcome["code"], outcome["node"]) == ("lost", 75, 0)
        assert f"node {job.nodes[0].host.name} is lost" in outcome["reason"]
        assert not alive(job.rank(node))
    assert time.monotonic() - start < 2.0 + 0.5 + 15.0
    assert alive(job.rank(0))
    job.stop(grace=0.1)
    job.gone()


def test_coordinator_gives_up_a_node(bench: Bench) -> None:
    """The supervisor of node 1 dies, its guard ends its ranks; the coordinator calls the node lost and ends the job."""
    job = bench.run(bench.nodes(3), p.PLAIN)
    job.ready()
    kill(job.process("supervisor", 1))
    job.until("clean", 1)
    for node in (0, 2):
        outcome = job.ended(node)
        assert (outcome["state"], outcome["code"], outcome["node"]) == ("lost", 75, 1)
        assert outcome["culprits"] == [["trainer", 1]] and outcome["victims"] == [["trainer", 0], ["trainer", 2]]
    job.gone()


def test_job_outlives_its_code(bench: Bench) -> None:
    """Once it runs, a job needs neither the agent that started it nor the files of our code."""
    import shutil

    home = bench.tmp / "home"
    home.mkdir()
    job = bench.run(bench.nodes(2, env={"HOME": str(home)}), "echo ready; until [ -e go ]; do sleep 0.2; done; exit 5")
    job.ready()
    for node in job.nodes:
        node.client.kill()
    shutil.rmtree(home)
    kill(job.process("guard", 1))
    job.until("guard", 1, 2)
    (job.dir(1) / "go").touch()
    assert [job.ended(node)["code"] for node in range(2)] == [5, 5]
    assert os.listdir(job.dir() / ".clustertool") and not (job.dir() / ".clustertool/supervisor.err").read_text()


def test_a_supervisor_that_dies_before_it_has_joined(bench: Bench) -> None:
    """Its guard reports that to the coordinator: no rank starts anywhere."""
    job = bench.job(bench.nodes(2), p.IGNORES_TERM).place()
    job.nodes[1].client.agent.ask(job.start_requests[1])
    supervisor, guard = job.process("supervisor", 1), job.process("guard", 1)
    for process in (supervisor, guard):  # the guard second: a supervisor replaces one that is stopped
        kill(process, signal.SIGSTOP)
    kill(supervisor)
    job.nodes[0].client.agent.ask(job.start_requests[0])
    kill(guard, signal.SIGCONT)
    ended = job.ended(0)
    assert (ended["state"], ended["node"]) == ("lost", 1) and "the supervisor died" in ended["reason"]
    assert job.events(0, "started") == [] and job.events(1, "started") == []
