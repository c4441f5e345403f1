"""A node that gets on with a long request is waited for, however long it takes; one that is stuck is not."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertool.errors import ClustertoolError, DispatchError, Unreachable
from clustertool.model.dispatch.manifest import text_of
from clustertool.node.ports import claims
from clustertool.node.storage.release_store import Store
from tests.lab.lab import compiler
from tests.node.harness import Bench, Job, Node, request, until

PATIENCE = 4.0  # seconds without progress; the agent reports it once a second
FILES = 100
RELEASE = "2" * 32
SlowNode = Callable[[int], Node]


@pytest.fixture
def slow(bench: Bench, tmp_path: Path) -> SlowNode:
    """slow(60) -> a node where the copy of each file takes 60 ms."""
    if not compiler():
        pytest.skip("needs a C compiler")
    made = tmp_path / "slow.so"
    source = Path(__file__).with_name("slow.c")
    subprocess.run([compiler(), "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)

    def node(milliseconds: int) -> Node:
        return bench.nodes(1, env={"LD_PRELOAD": str(made), "SLOW_MS": str(milliseconds)})[0]

    return node


def job_with_files(bench: Bench, node: Node) -> Job:
    """A job whose workspace has FILES small files."""
    job = bench.job([node])
    store = Store(str(node.root))
    text = b"x" * FILES
    name = hashlib.sha256(text).hexdigest()
    store.add(name, text)
    files = [["s", f"file{number}", 0o644, 10**18, number, 1] for number in range(FILES)]
    store.complete(RELEASE, text_of([["p", name, FILES, ""], *files]))
    job.place_requests[0]["release"] = RELEASE
    return job


def test_a_slow_copy_takes_longer_than_the_patience(bench: Bench, slow: SlowNode) -> None:
    node = slow(60)
    job = job_with_files(bench, node)
    before = time.monotonic()
    node.client.agent.ask(request("place", **job.place_requests[0]), PATIENCE)
    assert time.monotonic() - before > PATIENCE
    assert len(list(job.dir().glob("file*"))) == FILES
    job.start().ended()


def test_a_copy_that_is_stuck_is_an_error(bench: Bench, slow: SlowNode) -> None:
    """The agent's loop is alive, but the copy does not move."""
    node = slow(600_000)
    job = job_with_files(bench, node)
    with pytest.raises(Unreachable, match="no answer to 'place' and no progress for 4 s"):
        node.client.agent.ask(request("place", **job.place_requests[0]), PATIENCE)
    assert node.ask("jobs")["jobs"], "the agent answers"
    os.kill(node.client.pid, signal.SIGKILL)  # it would be in the copy for ten minutes


def test_a_slow_copy_that_is_not_wanted_any_more_is_ended_and_removed(bench: Bench, slow: SlowNode) -> None:
    node = slow(100)
    job = job_with_files(bench, node)
    errors: list[ClustertoolError] = []

    def place() -> None:
        try:
            node.client.agent.ask(request("place", **job.place_requests[0]), 30)
        except ClustertoolError as error:
            errors.append(error)

    thread = threading.Thread(target=place)
    thread.start()
    until(lambda: list(job.dir().glob("file*")), "the copy has begun")
    before = time.monotonic()
    node.client.agent.ask(request("unplace", job_dir=str(job.dir()), token=job.token), PATIENCE)
    assert time.monotonic() - before < PATIENCE
    thread.join(60)
    assert not job.dir().exists()
    assert isinstance(errors[0], DispatchError)


def test_a_slow_copy_ends_with_the_laptop_that_asked_for_it(bench: Bench, slow: SlowNode) -> None:
    node = slow(100)
    job = job_with_files(bench, node)
    node.client.agent.send(request("place", **job.place_requests[0]))
    until(lambda: list(job.dir().glob("file*")), "the copy has begun")
    before = time.monotonic()
    node.client.close()
    assert time.monotonic() - before < PATIENCE * 2
    assert not job.dir().exists()


def test_ports_are_claimed_before_a_slow_copy_and_stay_so(bench: Bench, slow: SlowNode) -> None:
    """Claims of a job that does not run are void after some minutes, if its records are as old."""
    node = slow(100)
    job = job_with_files(bench, node)
    node.client.agent.send(request("place", **job.place_requests[0]))
    records = job.dir() / ".clustertool"
    until(lambda: list(job.dir().glob("file*")), "the copy has begun")
    port = job.place_requests[0]["spec"]["extra_ports"][0]
    assert claims.claimed_ports()[port] == job.id
    old = time.time() - 200  # the claim is not void so far: a claim of another test would remove it
    os.utime(records, (old, old))
    until(lambda: records.stat().st_mtime > old + 100, "the agent keeps it young")
    assert claims.claimed_ports()[port] == job.id
    assert len(list(job.dir().glob("file*"))) < FILES, "the copy goes on"
    node.client.close()
    assert port not in claims.claimed_ports()


def test_a_node_that_is_done_keeps_its_claims_while_others_copy(bench: Bench) -> None:
    """Claims of a job that was placed and never started are void after some minutes, if its records are as old."""
    job = bench.job().place()
    records = job.dir() / ".clustertool"
    old = time.time() - 200  # the claim is not void so far: a claim of another test would remove it
    os.utime(records, (old, old))
    until(lambda: records.stat().st_mtime > old + 100, "the agent keeps it young")
    job.start().ended()
