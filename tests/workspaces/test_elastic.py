"""elastic continues on other nodes, in other numbers, from the newest checkpoint that any of them has."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Callable

import pytest

from tests.free_ports import free_ports
from tests.workspaces.conftest import DEADLINE, Job, Program

UNDISTURBED = 80


def start(job: Job, nodes: str, *args: object) -> list[Program]:
    """One rank for each letter, which is the name of a node with an output of its own."""
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": str(len(nodes)), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = ["--pause", "0", *map(str, args)]
    return [
        job.start("train.py", *line, env={**world, "RANK": str(rank), "CLUSTERTOOL_OUTPUT": str(job.output / node)})
        for rank, node in enumerate(nodes)
    ]


def train(job: Job, nodes: str, *args: object) -> Program:
    """The first rank, after all have ended well."""
    programs = start(job, nodes, *args)
    assert [program.wait() for program in programs] == [0] * len(nodes), [program.text for program in programs]
    return programs[0]


def losses(*programs: Program) -> dict[int, str]:
    """step -> loss, of programs that ran one after another. A step comes once."""
    found = [line for program in programs for line in re.findall(r"^step=(\d+) loss=(\S+)", program.text, re.M)]
    assert len(found) == len(dict(found))
    return {int(step): loss for step, loss in found}


def resumed(program: Program) -> tuple[int, int]:
    """(step, rank) of the line at the start; step 0 without it."""
    found = re.search(r"^resumed at step (\d+) \(from rank (\d+)\)$", program.text, re.M)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def checkpoint(job: Job, node: str, step: int) -> Path:
    return job.output / node / f"checkpoints/step-{step:09}"


@pytest.fixture
def elastic(job_of: Callable[[str], Job]) -> Job:
    return job_of("elastic")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    job = Job("elastic", tmp_path_factory.mktemp("undisturbed"))
    try:
        found = losses(train(job, "u", "--steps", UNDISTURBED))
    finally:
        job.end()
    assert list(found) == list(range(10, UNDISTURBED + 1, 10))
    assert float(found[UNDISTURBED]) < float(found[10]) - 0.5
    return found


def test_other_nodes_continue_the_same_training(elastic: Job, undisturbed: dict[int, str]) -> None:
    """Node c has no files; node b has older ones than d."""
    first = train(elastic, "abd", "--steps", 30)
    second = train(elastic, "d", "--steps", 50)
    third = train(elastic, "cbd", "--steps", UNDISTURBED)
    assert [resumed(program) for program in (first, second, third)] == [(0, 0), (30, 0), (50, 2)]
    assert losses(first, second, third) == undisturbed


def test_a_damaged_checkpoint_is_not_used(elastic: Job, undisturbed: dict[int, str]) -> None:
    first = train(elastic, "ab", "--steps", 30)
    cut, changed = checkpoint(elastic, "a", 30), checkpoint(elastic, "b", 30)
    cut.write_bytes(cut.read_bytes()[:-1])
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    checkpoint(elastic, "a", 20).write_bytes(b"")
    (elastic.output / "b/checkpoints/part").write_bytes(b"a part")
    second = train(elastic, "ab", "--steps", UNDISTURBED)
    assert resumed(second) == (20, 1)
    assert losses(second) == {step: loss for step, loss in undisturbed.items() if step > 20}
    assert losses(first)[20] == undisturbed[20]
    for node in "ab":
        assert [path.name for path in sorted((elastic.output / node / "checkpoints").iterdir())] == [
            "step-000000070",
            "step-000000080",
        ]


def test_all_ranks_end_with_one_that_is_killed(elastic: Job, undisturbed: dict[int, str]) -> None:
    programs = start(elastic, "abc", "--steps", UNDISTURBED, "--pause", "0.02")
    deadline = time.monotonic() + DEADLINE
    while not checkpoint(elastic, "a", 20).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    programs[1].popen.kill()
    assert [program.wait() for program in programs] == [1, -9, 1]
    again = train(elastic, "ca", "--steps", UNDISTURBED)
    step, _ = resumed(again)
    assert 20 <= step < UNDISTURBED
    assert losses(programs[0], again) == undisturbed
