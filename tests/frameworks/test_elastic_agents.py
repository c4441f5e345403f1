"""Elastic jobs of torchrun, of Paddle's launcher and of the tool: what a failure, a loss and a new node change in each.

docs/elastic.md has a table of it. UPDATE_PAGES=1 writes it, with the seconds that were measured.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.model.config.elastic_keys import ElasticSettings
from tests.cli import REPO, until
from tests.frameworks.elastic_agents import LIMIT, PROGRAM, Agents, LauncherAgents, Start
from tests.free_ports import free_port
from tests.node.joining import JoinBench, Machine
from tests.node.test_store_epochs import Etcd, etcd

__all__ = ["etcd"]  # a fixture

PAGE, SECTION = REPO / "docs/elastic.md", "## Compared with torchrun and Paddle's launcher"
RESTARTS = 2
ORPHAN = 3.0  # seconds for the end of a rank whose agent was killed
COUNT = "TORCHELASTIC_RESTART_COUNT"
VARIABLES = (
    "WORLD_SIZE",
    COUNT,
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "PADDLE_MASTER",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_NNODES",
    "PADDLE_ELASTIC_JOB_ID",
    "PADDLE_ELASTIC_NP",
)
PLACES = ("MASTER_ADDR", "PADDLE_MASTER")  # their values are those of this machine
_SECONDS = re.compile(r"\b([0-9]+) s\b")
Facts = dict[str, str]  # by the row of the table


class ToolAgents(Agents):
    """Joining processes, as clusterrun starts them on each machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        home = folder / "home"
        home.mkdir()
        self._bench = JoinBench(folder, home)
        settings = ElasticSettings(1, 3, timeout=5.0, grow="restart")
        command = (sys.executable, str(PROGRAM), str(self.records))
        machines = self._bench.job(
            3, command, id="job", options={"max_restarts": str(RESTARTS)}, cluster={"loss_timeout": 10.0}
        )
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


def duration(value: float) -> str:
    return f"{value:.0f} s"


def again(world: list[Start], at: float, before: list[Start]) -> str:
    """A new world, `at` seconds of the time of the machine when its cause happened; the restart counts of those in both."""
    took = max(start.seconds for start in world) - at
    counts = [" ".join(one.env.get(COUNT, "-") for one in found[:2]) for found in (before, world)]
    known = f"; {COUNT}: {counts[0]}, then {counts[1]}" if COUNT in world[0].env else ""
    return f"all ranks start again after {duration(took)}{known}"


def fail(agents: Agents, world: list[Start], code: int) -> tuple[list[Start], str]:
    """The last rank of a world exits with this code. Returns the next world, and what is to be stated."""
    since, at = len(agents.starts()), time.time()
    agents.order(f"{world[-1].pid} {code}")
    found = agents.world("".join(start.node for start in world), since)
    return found, again(found, at, world)


def fail_to_the_end(agents: Agents, names: str) -> str:
    """All ranks exit with 7 until all agents have ended: how often the first one starts its rank again, and how all end."""
    since = len(agents.starts())
    agents.order("all 7")
    codes = " ".join(str(agents.exit_code(name)) for name in names)
    new = [one.node for one in agents.starts()[since:]]
    return f"new starts on the first node: {new.count(names[0])}; exit codes of the agents: {codes}"


def _ended(agents: Agents, names: str) -> bool:
    return all(agents.poll(name) is not None for name in names)


def started(agents: Agents, names: str) -> list[Start]:
    for name in names:
        agents.start(name)
        time.sleep(agents.apart)  # of an agent that removes what others have registered
        until(agents.listens, LIMIT, agents.text)
    return agents.world(names)


def failures(agents: Agents) -> Facts:
    """Ranks of two nodes fail, more often than it is allowed."""
    first = started(agents, "ab")
    second, after_1 = fail(agents, first, 1)
    _, after_101 = fail(agents, second, 101)
    return {
        "a rank exits with 1": after_1,
        "a rank exits with 101": after_101,
        "then all ranks exit with 7": fail_to_the_end(agents, "ab"),
    }


def losses(agents: Agents, names: str = "abc") -> Facts:
    """The last one of these nodes is lost, and comes back; then ranks fail."""
    stay, lost = names[:-1], names[-1]
    whole = started(agents, names)
    agents.kill(lost)
    end = time.time() + ORPHAN
    while whole[-1].runs and time.time() < end:
        time.sleep(0.05)
    facts = {"an agent is killed": "its rank lives on" if whole[-1].runs else "its rank is ended, too"}
    at = time.time()
    if whole[-1].runs:
        os.kill(whole[-1].pid, signal.SIGKILL)
    rest = agents.world(stay, len(names))
    facts["agent and rank are gone"] = again(rest, at, whole[:-1])
    since, at = len(agents.starts()), time.time()
    agents.order("wait")  # no rank fails because another one is stopped first
    agents.start(lost)
    back = agents.world(names, since)
    facts["an agent joins"] = again(back, at, rest)
    facts["all ranks exit with 7 after that"] = fail_to_the_end(agents, names)
    for name in VARIABLES:
        values = [world[0].env.get(name, "-") for world in (whole, rest, back)]
        facts[f"`{name}`"] = ", ".join("set" if name in PLACES and value != "-" else value for value in values)
    return facts


def joins_by_default(agents: Agents) -> Facts:
    """A third agent joins two that run."""
    started(agents, "ab")
    agents.order("wait")
    agents.start("c")
    at = time.time()
    until(lambda: _ended(agents, "abc") or len(agents.starts()) > 2, LIMIT, agents.text)
    assert _ended(agents, "abc"), "it starts again"
    codes = " ".join(str(agents.exit_code(name)) for name in "abc")
    return {
        "an agent joins, by default": f"no rank starts; exit codes of the agents after {duration(time.time() - at)}: {codes}"
    }


# -- the launchers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def made() -> Iterator[list[Agents]]:
    """Agents that are ended after the test."""
    found: list[Agents] = []
    yield found
    for agents in found:
        agents.close()


def environment(scratch: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(scratch), "LANG": "C.UTF-8", **more}


def torchrun(venv: Path, folder: Path, **more: str) -> Agents:
    argv = [
        venv / "bin/torchrun",
        "--nnodes",
        "1:3",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "job",
    ]
    port = free_port()
    argv += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=5"]
    argv += ["--max-restarts", RESTARTS]
    agents = LauncherAgents(folder, list(map(str, argv)), environment(folder, **more))
    agents.port = port  # the first agent has the store
    return agents


def paddle(venv: Path, folder: Path, etcd: Etcd) -> Agents:
    """With 1:3 three agents that start within some seconds do not always find each other: each removes the keys of the job."""
    argv = [venv / "bin/python", "-m", "paddle.distributed.launch", "--nnodes", "1:2", "--nproc_per_node", "1"]
    argv += ["--master", f"etcd://127.0.0.1:{etcd.port}", "--job_id", folder.name, "--elastic_level", "1"]
    argv += ["--elastic_timeout", "10", "--max_restart", RESTARTS]
    # etcd3 0.12 has modules that newer versions of protobuf take in Python only.
    env = environment(folder, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python")
    agents = LauncherAgents(folder, list(map(str, argv)), env)
    agents.world_name, agents.apart = "PADDLE_TRAINERS_NUM", 6.0
    return agents


@pytest.mark.frameworks
def test_torchrun(venv: Callable[[str], Path], scratch: Path, made: list[Agents]) -> None:
    """Without the variable a new agent waits for an address that is not published again (PyTorch 2.13)."""
    torch = venv("digits-torch")
    made.append(torchrun(torch, scratch / "failures"))
    check(1, failures(made[-1]))
    made.append(torchrun(torch, scratch / "losses", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    check(1, losses(made[-1]))
    made.append(torchrun(torch, scratch / "joins"))
    check(1, joins_by_default(made[-1]))


@pytest.mark.frameworks
def test_paddles_launcher(venv: Callable[[str], Path], scratch: Path, made: list[Agents], etcd: Etcd) -> None:
    launcher = venv("digits-paddle+etcd3")
    made.append(paddle(launcher, scratch / "failures", etcd))
    check(2, failures(made[-1]))
    made.append(paddle(launcher, scratch / "losses", etcd))
    check(2, losses(made[-1], "ab"))


@pytest.mark.frameworks
def test_the_tool(scratch: Path, made: list[Agents]) -> None:
    made.append(ToolAgents(scratch / "failures"))
    check(3, failures(made[-1]))
    made.append(ToolAgents(scratch / "losses"))
    check(3, losses(made[-1]))


# -- the table --------------------------------------------------------------------------------------------------------


def check(column: int, facts: Facts) -> None:
    """The cells of a launcher in docs/elastic.md. Seconds may differ by half of them and 3 s. UPDATE_PAGES=1 writes them."""
    lines = PAGE.read_text().splitlines()
    wrong, first = [], lines.index(SECTION)
    for name, text in facts.items():
        place = next((n for n in range(first, len(lines)) if lines[n].startswith(f"| {name} |")), None)
        assert place is not None, f"{PAGE.name} has no row {name}: {text}"
        cells = lines[place].strip("| ").split(" | ")
        if not _alike(cells[column], text):
            wrong.append(f"{name}: {cells[column]!r} is {text!r}")
            cells[column] = text
            lines[place] = f"| {' | '.join(cells)} |"
    if os.environ.get("UPDATE_PAGES") and wrong:
        PAGE.write_text("\n".join(lines) + "\n")
        return
    assert not wrong, "\n".join(wrong)


def _alike(one: str, other: str) -> bool:
    texts, times = zip(*((_SECONDS.sub("", text), [float(n) for n in _SECONDS.findall(text)]) for text in (one, other)))
    near = (abs(a - b) <= 3.0 + max(a, b) / 2 for a, b in zip(*times))
    return texts[0] == texts[1] and len(times[0]) == len(times[1]) and all(near)
