"""A stranger floods the port where machines join: 2000 connections a second delay a join by a second at most."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import pytest

from clustertool.fleet import identity
from tests.node.joining import JoinBench, Machine, codes, start
from tests.security import flooder

RATE = 2000
LIMIT = 1.0  # seconds
TRIES = 5  # the machine that runs the tests may be busy
STRANGER = "127.0.0.66"


@contextmanager
def flooded(machine: Machine, kinds: list[str]) -> Iterator[list[int]]:
    """A stranger floods the port of this coordinator meanwhile. It gets the connections a second that were made."""
    pem = machine.folder / "stranger.pem"
    pem.write_text("".join(identity.certificate()))
    port = machine.join.coordinator.port
    argv = [sys.executable, flooder.__file__, STRANGER, "127.0.0.21", str(port), str(RATE), str(pem), *kinds]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        time.sleep(0.3)  # longer than a connection is kept
        made: list[int] = []
        yield made
        made.append(int(child.communicate(timeout=60)[0]))
    finally:
        child.kill()
        child.wait()


def joined(bench: JoinBench, kinds: list[str]) -> tuple[float, float]:
    """Seconds until all ranks of a job of two machines run, and until a third machine is refused by the coordinator."""
    machines = bench.job(2, "echo ready; exec sleep 60")
    machines[0].start().until("waiting")
    if not kinds:
        found = _measured(bench, machines)
    else:
        with flooded(machines[0], kinds) as made:
            found = _measured(bench, machines)
        if made[0] < RATE / 2:  # no flood: this try counts for nothing
            found = inf, inf
    machines[0].signal(signal.SIGINT)
    assert codes(machines) == [130, 130]
    return found


def _measured(bench: JoinBench, machines: list[Machine]) -> tuple[float, float]:
    began = time.monotonic()
    start(machines[1:])
    for rank, machine in enumerate(machines):
        machine.says("ready", rank)
    running = time.monotonic()
    assert bench.another(machines[1]).start().wait() == 64
    return running - began, time.monotonic() - running


@pytest.mark.parametrize("kinds", [["hello"], sorted(flooder.KINDS)], ids=["hello", "all"])
def test_a_flood_delays_a_join_by_a_second_at_most(join_bench: JoinBench, kinds: list[str]) -> None:
    """While machines join, and when the coordinator has the port."""
    found = []
    for _ in range(TRIES):
        calm, busy = joined(join_bench, []), joined(join_bench, kinds)
        found.append([after - before for before, after in zip(calm, busy)])
        if max(found[-1]) < LIMIT:
            return
    raise AssertionError(f"delays of the start and of a refusal in seconds: {found}")
