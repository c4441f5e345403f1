"""Signals for ranks: every process of the tool passes them on or survives them, and a rank gets each of them once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from clustertool.model.rank_signals import FOR_RANKS
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, kill, until

# Writes a line for each signal that it gets, and ends two turns after SIGTERM: a second one would be written too.
RECORDS = p.python("""
import signal, sys
ALL = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
say("ready")
left = -1
while left:
    found = signal.sigtimedwait(ALL, 0.7 if left > 0 else 600)
    left = 2 if found and found.si_signo == signal.SIGTERM else left - 1 if left > 0 else left
    if found:
        say("got %d" % found.si_signo)
sys.exit(143)
""")
# A process with the name of Slurm's daemon sends signals to the processes of each line: `SIGNAL PID...`.
SLURMSTEPD = """
import os, sys
open("/proc/self/comm", "w").write("slurmstepd")
for line in sys.stdin:
    number, *pids = map(int, line.split())
    for pid in pids:
        os.kill(pid, number)
"""


def got(job: Job, rank: int) -> list[int]:
    """The signals of a rank. SIGCONT also comes with the SIGTERM of the tool."""
    return [int(line.split()[1]) for line in job.log(rank).splitlines() if line.startswith(b"got ")]


class Slurm:
    """It signals all processes of a job on its first nodes."""

    def __init__(self) -> None:
        self._daemon = subprocess.Popen([sys.executable, "-c", SLURMSTEPD], stdin=subprocess.PIPE, text=True)

    def signal(self, number: int, job: Job, nodes: int = 2) -> None:
        pids = [job.process(kind, node).pid for node in range(nodes) for kind in ("supervisor", "guard")]
        pids += [job.rank(rank).pid for rank in range(2 * nodes)]
        assert self._daemon.stdin is not None
        print(int(number), *pids, file=self._daemon.stdin, flush=True)

    def end(self) -> None:
        self._daemon.communicate()


@pytest.fixture
def slurmstepd() -> Iterator[Slurm]:
    daemon = Slurm()
    yield daemon
    daemon.end()


def test_a_supervisor_passes_them_on_and_nothing_of_the_tool_ends(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), RECORDS, per_node=2).ready()
    watched = [job.process("supervisor"), job.process("guard")]
    for number in FOR_RANKS:
        for process in watched:
            kill(process, number)
        os.kill(job.nodes[0].client.pid, number)
    until(lambda: [sorted(got(job, rank)) for rank in (0, 1)] == [sorted(FOR_RANKS)] * 2, "each rank has got each")
    assert [got(job, rank) for rank in (2, 3)] == [[], []], "each node has its own"
    assert all(map(alive, watched)) and job.nodes[0].ask("status", job=job.id)["node"] == 0
    job.stop()
    assert [got(job, rank).count(signal.SIGTERM) for rank in range(4)] == [1] * 4
    assert job.ended()["code"] == 143


@pytest.mark.parametrize("first", ["all at once", "one node first"])
def test_what_a_scheduler_sends_to_all_is_not_sent_again(bench: Bench, slurmstepd: Slurm, first: str) -> None:
    """The other node gets the stop of the coordinator, perhaps before its own SIGTERM."""
    job = bench.run(bench.nodes(2), RECORDS, per_node=2).ready()
    slurmstepd.signal(signal.SIGUSR1, job)
    until(lambda: [got(job, rank) for rank in range(4)] == [[signal.SIGUSR1]] * 4, "each rank has got it")
    if first != "all at once":
        slurmstepd.signal(signal.SIGTERM, job, nodes=1)
        job.until("stopping", 1)
    slurmstepd.signal(signal.SIGTERM, job)
    job.ended()
    job.ended(1)
    before = [signal.SIGUSR1, signal.SIGTERM]
    again = [signal.SIGTERM] if first != "all at once" else []
    assert [got(job, rank) for rank in range(4)] == [[*before, *again]] * 2 + [before] * 2


def test_a_node_that_gets_no_signal_of_the_scheduler_is_stopped_too(bench: Bench, slurmstepd: Slurm) -> None:
    job = bench.run(bench.nodes(2), RECORDS, per_node=2, policy={"grace": 30.0}).ready()
    slurmstepd.signal(signal.SIGTERM, job, nodes=1)
    assert job.ended()["code"] == job.ended(1)["code"] == 143
    assert [got(job, rank).count(signal.SIGTERM) for rank in range(4)] == [1] * 4
