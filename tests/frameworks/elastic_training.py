"""A training with checkpoints on four machines of a lab, as an elastic job: what its ranks have written while they lived.

Each rank writes its epoch, when its process began, and when it lived (programs/witness.py). All machines have one clock.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clustertool.model.wire import record_lines
from tests.cli import CLUSTERTOOL, REPO, Done, LabSite, Running, until
from tests.frameworks.examples import TIMEOUT, activate, find_venv
from tests.lab.lab import Lab
from tests.lab.test_join_chaos import CLAIMS, LOCK

NODES = 4
LOSS = 5.0  # seconds, LOSS_TIMEOUT
STEPS = 12  # between two checkpoints, see train.py
LATE = 0.5  # seconds that ranks may live after a machine goes on that was frozen as a whole
GOAL = LOSS + 3.0  # seconds from a loss to the start of the next ranks
PATIENCE = 120.0  # seconds for four processes that import a framework on a machine with other work


class Life(NamedTuple):
    """What one rank has written. began: the start of its process. lived: times. steps: their times and numbers."""

    job: str
    attempt: int
    rank: int
    node: int
    world: int
    began: float
    lived: tuple[float, ...]
    steps: tuple[tuple[float, int], ...]


class Epoch(NamedTuple):
    """The ranks of one attempt."""

    lives: tuple[Life, ...]

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(life.node for life in self.lives)

    @property
    def began(self) -> float:
        return min(life.began for life in self.lives)

    @property
    def steps(self) -> list[tuple[float, int]]:
        """Of all ranks, in order."""
        return sorted(step for life in self.lives for step in life.steps)

    @property
    def complete(self) -> bool:
        """Whether all of its ranks have made the steps to a further checkpoint."""
        return len(self.lives) == self.lives[0].world and all(len(life.steps) > STEPS for life in self.lives)


class Resumed(NamedTuple):
    """Seconds from a loss to the start of the next ranks, and from there to their first step."""

    tool: float
    program: float


class ElasticTraining:
    """`name`: of the workspace. `epochs`: through the data. Four machines, each with one rank; one step takes `pause` seconds
    until hurry()."""

    def __init__(
        self, site: LabSite, name: str, data: Path, epochs: int, pause: float = 0.1, elastic: str = ""
    ) -> None:
        self.site, self.lab, self.epochs = site, site.lab, epochs
        self.folder = site.folder / name
        site.conf(PRELUDE=activate(find_venv(name)), LOSS_TIMEOUT=LOSS, GRACE=2, CONNECT_TIMEOUT=5)
        ignored = shutil.ignore_patterns("data", "output", "__pycache__")
        shutil.copytree(REPO / "workspaces" / name, self.folder, ignore=ignored)
        shutil.copytree(data, self.folder / "data")
        shutil.copy(Path(__file__).with_name("programs") / "witness.py", self.folder)
        self._change("train.py", "import argparse\n", "import witness\nimport argparse\n")
        step = "        optimizer.step()\n"
        self._change("train.py", step, f"{step}        witness.step((epoch - 1) * STEPS + step + 1)\n")
        self._change("job.toml", '"train.py"]', f'"train.py", "--epochs", "{epochs}"]\nper_node = 1')
        self._change("job.toml", "[env]\n", f'[env]\nWITNESS_PAUSE = "{pause}"\n')
        (self.folder / "job.toml").open("a").write(f"\n[elastic]\n{elastic}\n")

    def _change(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} in {file}"
        path.write_text(text.replace(old, new))

    # -- the job --

    def start(self, *options: object) -> Running:
        """`run`, as a user types it in the folder of the job."""
        argv = ("run", "--workspace", ".", "--nnodes", f"2:{NODES}", *options)
        return self.site.start(*argv, program=CLUSTERTOOL, cwd=self.folder)

    def hurry(self) -> None:
        """No pauses any more."""
        for node in range(NODES):
            folder = self.lab.tmp(node) / "witness"
            folder.mkdir(exist_ok=True)
            (folder / "fast").touch()

    def epoch_of(self, nodes: Collection[int], run: Running, after: int = -1) -> int:
        """Wait until these nodes, and no others, train in a later attempt than `after`, and have a further checkpoint.

        Returns the attempt."""

        def found() -> list[int]:
            known = [
                attempt
                for (_, attempt), epoch in self.lives().items()
                if attempt > after and epoch.nodes == set(nodes) and epoch.complete
            ]
            assert known or run.process.poll() is None, f"it has ended: {self.summary()}\n{self.records()}\n{run.err}"
            return known

        until(found, PATIENCE, lambda: f"nodes {nodes} after {after}: {self.summary()}\n{self.records()}\n{run.err}")
        return max(found())

    def ends(self, run: Running, code: int = 0) -> Done:
        return run.wait(TIMEOUT).ends(code)

    # -- what its ranks have written --

    def lives(self) -> dict[tuple[str, int], Epoch]:
        """By job and attempt."""
        found: dict[tuple[str, int], list[Life]] = {}
        for node in range(NODES):
            for path in (self.lab.tmp(node) / "witness").glob("*.*.*.*"):
                job, attempt, rank, _ = path.name.rsplit(".", 3)
                rows = [row.split() for row in path.read_text().splitlines(keepends=True) if row.endswith("\n")]
                if rows:
                    pairs = [(float(t), int(number)) for t, number in rows[1:]]
                    life = Life(
                        job,
                        int(attempt),
                        int(rank),
                        node,
                        int(rows[0][0]),
                        float(rows[0][1]),
                        tuple(t for t, _ in pairs),
                        tuple((t, number) for t, number in pairs if number),
                    )
                    found.setdefault((job, life.attempt), []).append(life)
        return {key: Epoch(tuple(lives)) for key, lives in sorted(found.items(), key=lambda item: item[1][0].began)}

    def latest_step(self) -> float:
        """When it was made."""
        return max((t for epoch in self.lives().values() for t, _ in epoch.steps), default=0.0)

    def living_ranks(self, node: int) -> list[int]:
        """The processes of ranks on a node."""
        return [process.pid for process in self.lab.processes(node) if "CLUSTERTOOL_RANK" in process.environ]

    def events(self, node: int, kind: str) -> list[dict[str, Any]]:
        """What the newest job has recorded on a node."""
        rows = (self.site.jobs(node)[-1] / ".clustertool/events.jsonl").read_bytes().split(b"\n")[:-1]
        found = [dict(event) for event in map(record_lines.read_event, rows) if event is not None]
        return [event for event in found if event["type"] == kind]

    def records(self) -> str:
        """The last events of each node, and what its process of the job has reported."""
        found = []
        for node in range(NODES):
            for job in self.site.jobs(node)[-1:]:
                for name, rows in (("events.jsonl", 5), ("supervisor.err", 12)):
                    path = job / ".clustertool" / name
                    text = path.read_text(errors="replace") if path.exists() else ""
                    found += [f"node {node}: {row[:300]}" for row in text.splitlines()[-rows:]]
        return "\n".join(found)

    def summary(self) -> list[tuple[object, ...]]:
        return [(key, sorted(epoch.nodes), len(epoch.steps)) for key, epoch in self.lives().items()]

    def resumed(self, lost_at: float) -> Resumed:
        """lost_at: the time of the loss."""
        epoch = next(epoch for epoch in self.lives().values() if epoch.began > lost_at and epoch.steps)
        return Resumed(epoch.began - lost_at, epoch.steps[0][0] - epoch.began)

    def printed(self) -> list[tuple[int, float, float]]:
        """Step, loss and accuracy of each line that a rank has printed after a checkpoint, on any node and in any attempt."""
        found = []
        for node in range(NODES):
            for log in self.site.root(node).glob("**/workerlog.*"):
                for line in re.findall(r"step=(\d+) loss=([0-9.]+) accuracy=([0-9.]+)$", log.read_text(), re.M):
                    found.append((int(line[0]), float(line[1]), float(line[2])))
        return found

    # -- what must be true at the end --

    def check(self, undisturbed: Mapping[int, tuple[float, float]], frozen: Mapping[int, float] = {}) -> None:
        """undisturbed: loss and accuracy by step. frozen: when a node went on that was frozen as a whole."""
        self.check_lives(frozen)
        self.check_steps()
        printed = self.printed()
        assert {step for step, _, _ in printed} == set(undisturbed)
        for step, loss, accuracy in printed:
            assert loss == pytest.approx(undisturbed[step][0], abs=2e-3), f"step {step}"
            assert accuracy == pytest.approx(undisturbed[step][1], abs=0.01), f"step {step}"
        self.check_nothing_left()

    def check_lives(self, frozen: Mapping[int, float]) -> None:
        """The ranks of two epochs never live at the same time."""
        lives = [(key, life, _end(key, life, frozen)) for key, epoch in self.lives().items() for life in epoch.lives]
        for (key, life, end), (other_key, other, other_end) in itertools.combinations(lives, 2):
            both = min(end, other_end) - max(life.began, other.began)
            assert key == other_key or both < 0, (
                f"{key}, node {life.node}, and {other_key}, node {other.node}, lived {both:.2f} s at the same time"
            )

    def check_steps(self) -> None:
        """Each epoch goes on after the newest checkpoint of its nodes, and none begins at zero but the first."""
        newest = dict.fromkeys(range(NODES), 0)  # the last checkpoint that each node has written at least
        reached = 0
        for key, epoch in self.lives().items():
            if not epoch.steps:
                continue
            first = min(number for _, number in epoch.steps)
            before = max(newest[node] for node in epoch.nodes)
            assert first % STEPS == 1 and before < first <= reached + 1, (
                f"{key} begins with {first}, not after {before}"
            )
            assert (first == 1) == (reached == 0), f"{key} begins with {first}"
            for life in epoch.lives:
                steps = [step for _, step in life.steps]
                assert steps == list(range(first, first + len(steps))), f"{key}: {steps}"
                written = [step - 1 for step in steps[1:] if step % STEPS == 1]
                newest[life.node] = max(newest[life.node], *written, 0)
            reached = max([reached, *(number for _, number in epoch.steps)])
        assert reached == STEPS * self.epochs

    def check_nothing_left(self) -> None:
        self.site.gone()
        for node in range(NODES):
            if node not in self.lab.boots:
                continue
            left = [path for path in self.lab.tmp(node).rglob("*") if path.is_file() or path.is_socket()]
            ours = [path for path in left if path.name not in (CLAIMS, LOCK) and path.parent.name != "witness"]
            assert not ours, f"node {node} keeps {ours}"
            sockets = [path for path in self.site.root(node).rglob("*") if path.is_socket() or path.is_fifo()]
            assert not sockets, f"node {node} keeps {sockets}"


def _end(key: object, life: Life, frozen: Mapping[int, float]) -> float:
    """When a rank has lived last. What it did after its machine had been frozen does not count, if it was short."""
    thawed = frozen.get(life.node, 0.0)
    late = max(life.lived, default=thawed) - thawed
    if life.began >= thawed:
        return max((life.began, *life.lived))
    assert late <= LATE, f"{key}, node {life.node}: it lived {late:.1f} s after the machine went on"
    return max((life.began, *(t for t in life.lived if t < thawed)))


def kill_all(lab: Lab, node: int) -> float:
    """All processes of a node get SIGKILL but the sshd that listens. Returns when."""
    at = time.time()
    until(lambda: not _killed(lab, node), 30.0, lambda: f"node {node} to be empty: {lab.processes(node)}")
    return at


def _killed(lab: Lab, node: int) -> list[int]:
    found = [process.pid for process in lab.processes(node) if process.pid != lab.boots[node].init]
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found
