"""A process that was blocked does not count that time against others: a frozen machine loses no job."""

from __future__ import annotations

import json
import signal
import time

import pytest

from clustertool.node.system import process_clock
from clustertool.node.system.process_clock import ProcessClock
from tests.node.harness import Bench, Job, kill, until
from tests.node.test_links import _frame as frame
from tests.node.test_links import _tls as tls

TIMEOUT = 2
ENDS = "echo ready; until [ -e go ]; do sleep 0.2; done"
COORDINATOR, OTHER = 0, 1


def freeze(job: Job, *ranks: tuple[str, int]) -> None:
    for kind, node in ranks:
        kill(job.process(kind, node), signal.SIGSTOP)
        time.sleep(0.2)  # not a wait: those that are frozen later read what the frozen ones have sent


def thaw(job: Job, *ranks: tuple[str, int]) -> None:
    for kind, node in ranks:
        kill(job.process(kind, node), signal.SIGCONT)
        time.sleep(0.2)  # not a wait: the first ones check before the others run


ORDERS = {  # in which they are frozen; the last one runs again first
    "guards, coordinator": [
        ("supervisor", OTHER),
        ("supervisor", COORDINATOR),
        ("guard", OTHER),
        ("guard", COORDINATOR),
    ],
    "guards, other node": [
        ("supervisor", COORDINATOR),
        ("supervisor", OTHER),
        ("guard", COORDINATOR),
        ("guard", OTHER),
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_machine_that_stands_still_loses_no_node(bench: Bench, order: str) -> None:
    """All processes of the tool are frozen for longer than the loss timeout, as by a paused virtual machine."""
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=3), ENDS).ready()
    freeze(job, *ORDERS[order])
    time.sleep(3.5)  # not a wait: how long the machine stands still
    thaw(job, *reversed(ORDERS[order]))
    for node in (COORDINATOR, OTHER):
        (job.dir(node) / "go").touch()
    assert [job.ended(node)["state"] for node in (COORDINATOR, OTHER)] == ["succeeded"] * 2
    assert not any(job.events(node, kind) for node in (COORDINATOR, OTHER) for kind in ("lost", "supervisor-lost"))


def test_a_coordinator_that_was_blocked_for_less_than_the_timeout(bench: Bench) -> None:
    job = bench.run(bench.nodes(3, LOSS_TIMEOUT=8), ENDS).ready()
    kill(job.process("supervisor"), signal.SIGSTOP)
    time.sleep(5.5)  # not a wait: the nodes have dropped their connections, and not given up the coordinator
    kill(job.process("supervisor"), signal.SIGCONT)
    time.sleep(3.0)  # not a wait: longer in all than the timeout
    for node in range(3):
        (job.dir(node) / "go").touch()
    assert [job.ended(node)["state"] for node in range(3)] == ["succeeded"] * 3
    assert not job.events(0, "lost")


def test_a_node_may_be_silent_for_longer_until_all_have_started(bench: Bench) -> None:
    """Node 1 has joined, node 2 has not: a machine that starts many supervisors at once is slow."""
    job = bench.job(bench.nodes(3, LOSS_TIMEOUT=TIMEOUT), "echo ready").place()
    for node in (0, 1):
        job.nodes[node].client.agent.ask(job.start_requests[node])
    time.sleep(0.5)  # not a wait: node 1 has joined
    for kind in ("supervisor", "guard"):
        kill(job.process(kind, 1), signal.SIGSTOP)
    time.sleep(TIMEOUT + 1.0)  # not a wait: how long node 1 is too slow
    for kind in ("guard", "supervisor"):
        kill(job.process(kind, 1), signal.SIGCONT)
    assert not job.events(0, "lost")
    job.nodes[2].client.agent.ask(job.start_requests[2])
    assert [job.ended(node)["state"] for node in range(3)] == ["succeeded"] * 3


def test_a_node_that_has_started_may_be_silent_for_longer_until_all_have(bench: Bench) -> None:
    """Node 2 has joined and does not acknowledge its order to start; node 1 runs its rank."""
    job = bench.job(bench.nodes(3, LOSS_TIMEOUT=TIMEOUT), ENDS).place()
    identity = job.plan.identity
    hello = json.dumps({"type": "join", "node": 2, "token": job.token, "sender": ["boot", 7, 1]}).encode()
    for node in (0, 1):
        job.nodes[node].client.agent.ask(job.start_requests[node])
    with tls(job.plan.coordinator, (identity.certificate, identity.key), frame(hello)):
        job.until("started", 1)
        time.sleep(0.5)  # not a wait: node 1 has acknowledged
        freeze(job, ("supervisor", 1), ("guard", 1))
        time.sleep(TIMEOUT + 1.0)  # not a wait: how long node 1 is too slow
        thaw(job, ("guard", 1), ("supervisor", 1))
        assert not job.events(0, "lost")
    job.stop()


def test_the_loss_timeout_counts_from_the_start_on(bench: Bench) -> None:
    """The longer time to join is no longer time to notice a lost node."""
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=TIMEOUT), ENDS).ready()
    start = time.monotonic()
    for kind in ("supervisor", "guard"):
        kill(job.process(kind, 1), signal.SIGSTOP)
    reason = job.until("verdict")[0]["reason"]
    assert time.monotonic() - start < TIMEOUT + 15.0
    assert reason.endswith("no heartbeat for 2 s")
    for kind in ("guard", "supervisor"):
        kill(job.process(kind, 1), signal.SIGCONT)
    assert job.ended(1)["state"] == "lost"


def test_the_clock_leaves_out_what_its_process_did_not_see() -> None:
    clock = ProcessClock()
    clock.turn()
    assert clock.blocked == 0.0 and not clock.napped
    began = time.monotonic()
    time.sleep(process_clock.NAP + 0.5)
    before = clock.now
    assert clock.turn() - before == process_clock.NAP
    assert clock.napped and 0.4 < clock.blocked < time.monotonic() - began - process_clock.NAP + 0.4
    until(lambda: clock.turn() - before > process_clock.NAP and not clock.napped, "it goes on")
