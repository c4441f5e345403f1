"""A job that hangs says which rank, and where: real ranks that wait for each other, and one that does not go on."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertool.fleet import stack_tools
from tests.node.harness import Bench, Job, kill, until
from tests.node.test_stacks import send

BARRIER = """
import os, socket, struct, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = os.environ["MEET"]
def all_reduce(step):
    open(f"{folder}/{step}.{rank}", "w").close()
    while sum(os.path.exists(f"{folder}/{step}.{one}") for one in range(world)) < world:
        time.sleep(1000) if waits(step) else time.sleep(0.02)
def waits(step):
    missing = [one for one in range(world) if not os.path.exists(f"{folder}/{step}.{one}")]
    time.sleep(0.5)
    return missing and all(not os.path.exists(f"{folder}/{step}.{one}") for one in missing)
"""
HANGS = {
    "sleeps": (BARRIER + """
def load():
    time.sleep(1000)
print("ready", flush=True)
for step in range(9):
    if rank == 2 and step == 1:
        load()
    all_reduce(step)
""", "trainer 2 on node1 is in"),
}


@pytest.fixture(scope="module")
def py_spy() -> bytes:
    program = stack_tools.installed(platform.machine())
    assert program, "the extra `test` brings py-spy"
    return program


def hung(bench: Bench, text: str, py_spy: bytes, **policy: Any) -> Job:
    meet = bench.tmp / "meet"
    meet.mkdir()
    (bench.tmp / "train.py").write_text(text)
    nodes = bench.nodes(2)
    send(nodes[0], py_spy)
    command = [sys.executable, "-u", "-S", "-E", str(bench.tmp / "train.py")]
    return bench.run(nodes, command, per_node=2, env={"MEET": str(meet)}, policy={"hang_timeout": 3, **policy})


@pytest.mark.parametrize("name", list(HANGS))
def test_a_rank_that_hangs_is_named(bench: Bench, py_spy: bytes, name: str) -> None:
    text, expected = HANGS[name]
    job = hung(bench, text, py_spy).ready()
    (event,) = until(lambda: job.events(0, "hang"), 30)
    print(event)
    assert expected in event["text"]
    job.stop()
