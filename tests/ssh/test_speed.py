"""Promises of speed, as ratios within one run: a machine's noise is in both sides. Asserted only by `make test-chaos`.

The yardstick on 64 nodes is the leanest thing that does the same: an asyncssh loop from a cold interpreter.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import HELLO

pytestmark = pytest.mark.chaos
NODES = 64
ROUNDS = 5

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


def test_64_nodes_cost_little_more_than_ssh_itself(site):
    many = site(NODES)
    many.conf(PYTHON=None)  # as on machines that nobody has set up: a virtual environment takes twice as long to start
    many.inv("dispatch", "-w", HELLO, timeout=300).ends(0)
    nodes = [f"{server.address}:{server.port}" for server in many.servers]
    user = many.conf_text().split("'")[1].split("@")[0]
    loop = [sys.executable, "-c", LOOP, user, str(many._keys.user), *nodes]

    def bare() -> float:
        return seconds(loop, many.folder)

    def exec_() -> float:
        return float(many.inv("exec", "--command", "true").ends(0).seconds)

    def run() -> float:
        """Until all ranks have started, by the events of the nodes."""
        start = time.time()
        job = many.inv("run", "-w", HELLO, "--rank", 63).ends(0).job
        started = [
            float(at)
            for node in range(NODES)
            for at in re.findall(r'"t": ?([\d.]+), ?"e": ?"started"', events(many.root(node) / f"JOB{job}"))
        ]
        assert len(started) == NODES
        return max(started) - start

    ssh, ours, all_started = alternately(ROUNDS, bare, exec_, run)
    print(f"\n{NODES} nodes: asyncssh {ssh:.2f} s, exec {ours:.2f} s ({ours / ssh:.2f} x), ", end="")
    print(f"run, all ranks started: {all_started:.2f} s ({all_started / ours:.2f} x exec)")
    assert ours < 2 * ssh
    assert all_started < 3 * ours


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
