"""Promises of speed, as ratios within one run or as CPU time. Asserted only by `make test-chaos`.

The yardstick on 64 nodes is the leanest thing that does the same: an asyncssh loop from a cold interpreter.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli import LoopSite, until
from tests.nodes_cpu import NodesCpu

pytestmark = pytest.mark.chaos
NODES = 64
ROUNDS = 5
# The bounds of CPU time are for a machine on which a bare Python takes these seconds (decision 26).
BARE = 0.007
STARTS = 10
PYTHONS = f"for _ in {' '.join('x' * STARTS)}; do python3 -ESs -c pass; done"

LOOP = """
import asyncio, sys, asyncssh

async def one(host, port, key):
    async with asyncssh.connect(host, port, username=sys.argv[1], client_keys=[key], known_hosts=None, config=None) as link:
        return (await link.run("true")).exit_status

async def main():
    nodes = [node.rsplit(":", 1) for node in sys.argv[3:]]
    assert set(await asyncio.gather(*(one(host, int(port), sys.argv[2]) for host, port in nodes))) == {0}

asyncio.run(main())
"""


def alternately(rounds: int, *them: Callable[[], float]) -> list[float]:
    """The median seconds of each, taken in turns: what the machine does meanwhile meets all of them."""
    taken = [[do() for do in them] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*taken)]


def seconds(argv: list[str], cwd: Path) -> float:
    start = time.monotonic()
    subprocess.run(argv, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each command start as a user's does, since its start is measured."""
    monkeypatch.setattr(LoopSite, "forks", False)


class Cost(NamedTuple):
    """What one command takes: seconds until its end, CPU seconds of the laptop's side, and of all nodes."""

    wall: float
    laptop: float
    nodes: float

    @property
    def alone(self) -> float:
        """Seconds without the nodes' CPU time: real nodes have processors of their own."""
        return self.wall - self.nodes / len(os.sched_getaffinity(0))


class Meter:
    """Measures commands on a site whose nodes share this machine."""

    def __init__(self, many: LoopSite) -> None:
        self._many = many
        self._cpu = NodesCpu(server.process.pid for server in many.servers)

    def __call__(self, do: Callable[[], object], ended: Callable[[], object] | None = None) -> Cost:
        """`ended`: what is waited for after the command, if not the end of all that it started on nodes."""
        nodes, laptop, start = self._cpu.seconds(), waited_for(), time.monotonic()
        do()
        wall, laptop = time.monotonic() - start, waited_for() - laptop
        until(ended or self._idle)
        return Cost(wall, laptop, self._cpu.seconds() - nodes)

    def _idle(self) -> bool:
        return not any(self._many.processes(node) for node in range(self._many.count))

    def alternately(
        self, rounds: int, of: Callable[[Sequence[float]], float], **commands: Callable[[], Cost]
    ) -> dict[str, Cost]:
        """The cost of each, as `of` makes it of all rounds. In turns: other load on this machine affects all of them."""
        taken: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, measure in commands.items():
                taken[name].append(measure())
        found = {name: Cost(*map(of, zip(*costs))) for name, costs in taken.items()}
        for name, cost in found.items():
            self.show(name, cost)
        return found

    def show(self, name: str, cost: Cost) -> None:
        each = cost.nodes / self._many.count * 1000
        print(
            f"\n{name:16} {cost.wall:6.2f} s, CPU of the laptop {cost.laptop:5.2f} s, of each node {each:6.1f} ms",
            end="",
        )
        print(f", without the nodes' {cost.alone:6.2f} s", end="")


def waited_for() -> float:
    """CPU seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def starts(many: LoopSite, meter: Meter, workspace: str) -> Cost:
    """A run until all ranks have started. It is stopped then, which is not measured."""
    before = [set(many.jobs(node)) for node in range(many.count)]

    def started() -> bool:
        new = [set(many.jobs(node)) - before[node] for node in range(many.count)]
        agents = [
            process for node in range(many.count) for process in many.processes(node) if process.name == "ct-agent"
        ]
        return not agents and all(jobs and re.search('"type": ?"started"', events(jobs.pop())) for jobs in new)

    cost = meter(lambda: many.inv("run", "-w", workspace, "--detach", timeout=300).ends(0), started)
    many.inv("stop", "--force", timeout=300).ends(0)
    many.gone()
    return cost


def sleeper(many: LoopSite) -> str:
    """A workspace whose ranks take no CPU time."""
    return many.workspace("sleeper", job_toml='[trainer]\ncommand = ["sleep", "1000"]\n').name


def test_64_nodes_cost_little_more_than_ssh_itself(site):
    many = site(NODES)
    many.conf(
        PYTHON=None
    )  # as on machines where nothing was set up: a virtual environment takes twice as long to start
    meter, workspace = Meter(many), sleeper(many)
    many.inv("dispatch", "-w", workspace, timeout=300).ends(0)
    nodes = [f"{server.address}:{server.port}" for server in many.servers]
    user = many.conf_text().split("'")[1].split("@")[0]
    loop = [sys.executable, "-c", LOOP, user, str(many._keys.user), *nodes]
    found = meter.alternately(
        ROUNDS,
        statistics.median,
        asyncssh=lambda: meter(lambda: seconds(loop, many.folder)),
        exec=lambda: meter(lambda: many.inv("exec", "--command", "true").ends(0)),
        check=lambda: meter(lambda: many.inv("check")),
        jobs=lambda: meter(lambda: many.inv("jobs").ends(0)),
        dispatch=lambda: meter(lambda: many.inv("dispatch", "-w", workspace).ends(0)),
        run=lambda: starts(many, meter, workspace),
    )
    assert found["exec"].alone < 1.2 * found["asyncssh"].alone
    assert found["run"].alone < 3 * found["exec"].alone


def test_nodes_take_little_cpu_time(site):
    """Four nodes: with more of them on one machine, each finds the processes of all others in /proc.

    `exec` is a login and a shell, which the other commands have as well. A busy machine, or one with slower processors, has
    bounds that are higher by as much as a bare Python takes longer there, started in turns with the commands and as they are.
    """
    few = site(4, installed=False)
    few.conf(PYTHON=None)
    meter, workspace = Meter(few), sleeper(few)

    def first() -> Cost:
        """The first command of a version on each node.

        The earlier code is moved away: ext4 without a journal creates files slowly after deletions, which doubles the time.
        """
        for node in range(few.count):
            with contextlib.suppress(FileNotFoundError):
                (few.home(node) / ".cache/clustertool").rename(few.home(node) / f"code{time.monotonic_ns()}")
        return meter(lambda: few.inv("jobs").ends(0))

    few.inv("dispatch", "-w", workspace).ends(0)
    found = meter.alternately(
        ROUNDS,
        statistics.median,
        exec=lambda: meter(lambda: few.inv("exec", "--command", "true").ends(0)),
        pythons=lambda: meter(lambda: few.inv("exec", "--command", PYTHONS).ends(0)),
        check=lambda: meter(lambda: few.inv("check")),
        jobs=lambda: meter(lambda: few.inv("jobs").ends(0)),
        dispatch=lambda: meter(lambda: few.inv("dispatch", "-w", workspace).ends(0)),
        run=lambda: starts(few, meter, workspace),
        status=lambda: meter(lambda: few.inv("status").ends(0)),  # of that job
        first=first,
    )
    login = found.pop("exec").nodes
    bare = (found.pop("pythons").nodes - login) / few.count / STARTS
    slower = max(1.0, bare / BARE)
    print(f"\na bare Python {bare * 1000:.1f} ms: bounds times {slower:.2f}")
    assert login / few.count < 0.060 * slower
    first_use = (found.pop("first").nodes - found["jobs"].nodes) / few.count
    assert first_use < 0.400 * slower
    for name, cost in found.items():
        each = (cost.nodes - login) / few.count
        print(f"{name:10} {each * 1000:6.1f} ms without the login, {each / bare:5.2f} bare Pythons")
        assert each < (0.150 if name == "run" else 0.060) * slower, name


def events(job: Path) -> str:
    return next(path for path in job.rglob("events.jsonl")).read_text()


def test_200_nodes_cost_little_memory(site):
    many = site(200)
    many.conf(PYTHON=None)
    folder = many.workspace(train_py="")
    for number in range(10):
        (folder / f"f{number}").write_bytes(os.urandom(1_000_000))
    cold, most = many.start("dispatch", "-w", folder.name).weighed()
    cold.ends(0)
    warm, then = many.start("run", "-w", folder.name, "--script", "train.py", "--rank", 0).weighed()
    warm.ends(0)
    print(f"\n{many.count} nodes: dispatch takes {most / 1e6:.0f} MB, run {then / 1e6:.0f} MB")
    assert most < 300e6 and then < 300e6


def test_the_list_of_verbs_is_there_at_once(site, tmp_path):
    alone = site(0)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "tasks.py").write_text("from invoke import task\n\n\n@task\ndef nothing(c):\n    pass\n")

    def listed() -> float:
        return float(alone.inv("--list").ends(0).seconds)

    def bare() -> float:
        return seconds([sys.executable, "-m", "invoke", "--list"], empty)

    ours, theirs = alternately(ROUNDS, listed, bare)
    print(f"\ninv --list {ours:.2f} s, of a tasks.py with one empty task {theirs:.2f} s ({ours / theirs:.2f} x)")
    assert ours < 3 * theirs
