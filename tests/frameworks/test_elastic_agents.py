"""Elastic jobs of torchrun, of Paddle's launcher and of the tool: what a failure, a loss and a new node change in each.

docs/elastic.md has a table of it. UPDATE_PAGES=1 writes it, with the seconds that were measured.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.model.config.elastic_settings import ElasticSettings
from tests.frameworks.elastic_agents import LIMIT, PROGRAM, Agents, LauncherAgents, Start
from tests.node.joining import JoinBench, Machine, free_port

RESTARTS = 2
TORCHRUN, PADDLE, TOOL = "torchrun", "paddle", "clustertool"
Facts = dict[str, str]


class ToolAgents(Agents):
    """Joining processes, as clusterrun starts them on each machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        home = folder / "home"
        home.mkdir()
        self._bench = JoinBench(folder, home)
        settings = ElasticSettings(1, 3, timeout=5.0, grow="restart")
        command = (sys.executable, str(PROGRAM), str(self.records))
        machines = self._bench.job(3, command, options={"max_restarts": str(RESTARTS)}, cluster={"loss_timeout": 10.0})
        self._machines: dict[str, Machine] = {}
        for name, machine in zip("abc", machines):
            join = machine.join
            job = replace(join.job, elastic=settings)
            machine.join = replace(join, job=job, own=replace(join.own, env=(("NODE", name),)))
            self._machines[name] = machine

    def start(self, name: str) -> None:
        self._machines[name].start()

    def kill(self, name: str) -> None:
        self._machines[name].signal(signal.SIGKILL)

    def exit_code(self, name: str) -> int:
        return self._machines[name].wait(LIMIT)

    def poll(self, name: str) -> int | None:
        popen = self._machines[name].popen
        assert popen is not None
        return popen.poll()

    def text(self) -> str:
        return "".join(f"--- {name}\n{machine.lines}\n" for name, machine in self._machines.items())

    def end_agents(self) -> None:
        self._bench.end()


# -- what is measured -------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    return f"{value:.0f} s"


def count(start: Start) -> str:
    return start.env.get("TORCHELASTIC_RESTART_COUNT", "-")


def fail(agents: Agents, victim: Start, code: int) -> tuple[list[Start], float]:
    """A rank of the world of a and b exits with this code. Returns the next world, and the seconds until it runs."""
    since, at = len(agents.starts()), time.time()
    agents.order(f"{victim.pid} {code}")
    world = agents.world("ab", since)
    return world, max(start.seconds for start in world) - at


def failures(agents: Agents) -> Facts:
    """Ranks of two nodes fail, more often than it is allowed."""
    agents.start("a")
    agents.start("b")
    first = agents.world("ab")
    after_1, seconds_1 = fail(agents, first[1], 1)
    after_101, seconds_101 = fail(agents, after_1[1], 101)
    facts = {
        "a rank exits with 1": f"all ranks start again after {seconds(seconds_1)}, {counted(first[0], after_1[0])}",
        "a rank exits with 101": f"all ranks start again after {seconds(seconds_101)}, {counted(after_1[0], after_101[0])}",
    }
    world, more = after_101, 0
    while True:
        agents.order(f"{world[1].pid} 7")
        since = len(agents.starts())
        ended = {}
        end = time.time() + LIMIT
        while len(ended) < 2 and len([one for one in agents.starts()[since:]]) < 2 and time.time() < end:
            ended = {name: agents.poll(name) for name in "ab" if agents.poll(name) is not None}
            time.sleep(0.05)
        if len(ended) == 2:
            break
        world, more = agents.world("ab", since), more + 1
    facts["ranks exit with 7 until the job ends"] = (
        f"after {more} more starts; exit codes of the agents: {ended['a']} and {ended['b']}"
    )
    return facts


def counted(before: Start, after: Start) -> str:
    return f"TORCHELASTIC_RESTART_COUNT {count(before)}, then {count(after)}"


def loss(agents: Agents) -> Facts:
    """One of three nodes is lost, and comes back."""
    for name in "abc":
        agents.start(name)
    three = agents.world("abc")
    agents.kill("c")
    orphan, at = three[2], time.time()
    while orphan.runs and time.time() - at < 15.0:
        time.sleep(0.05)
    lived = time.time() - at
    facts = {"an agent is killed: its rank": f"lives on" if orphan.runs else f"ends after {seconds(lived)}"}
    if orphan.runs:
        os.kill(orphan.pid, signal.SIGKILL)
        at = time.time()
    two = agents.world("ab", 3)
    facts["and the others"] = (
        f"start again after {seconds(max(start.seconds for start in two) - at)}, {counted(three[0], two[0])}"
    )
    since, at = len(agents.starts()), time.time()
    agents.start("c")
    again = agents.world("abc", since)
    facts["a new agent joins"] = (
        f"all ranks start again after {seconds(max(one.seconds for one in again) - at)}, {counted(two[0], again[0])}"
    )
    agents.order("done")
    facts["all ranks exit with 0"] = "exit codes of the agents: " + " ".join(str(agents.exit_code(n)) for n in "abc")
    for name in VARIABLES:
        facts[name] = ", ".join(world[0].env.get(name, "-") for world in (three, two, again))
    return facts


VARIABLES = (
    "WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_NNODES",
    "PADDLE_ELASTIC_JOB_ID",
    "PADDLE_ELASTIC_NP",
)
