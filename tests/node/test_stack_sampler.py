"""Stacks of real ranks: by py-spy as the laptop sends it, from /proc for all others, and never at the supervisor's expense."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import NotFound, PreflightError
from clustertool.fleet import stack_tools
from clustertool.fleet.node_bundle import digest_of
from clustertool.model.job.stacks import ProcessSample, gather
from clustertool.model.shape import read
from clustertool.show.stack_view import place
from tests import proc_files
from tests.node.harness import Bench, Job, Node, cpu, kill, pids, pythons, until
from tests.node.harness import read as read_file
from tests.node.programs import one_each

SLEEPS = """
import sys, time
def load():
    time.sleep(1000)
print("ready", flush=True)
load()
"""
WAITS_FOR_A_LOCK = """
import threading
lock = threading.Lock()
lock.acquire()
def reader():
    lock.acquire()
thread = threading.Thread(target=reader, name="reader")
thread.start()
print("ready", flush=True)
def step():
    thread.join()
step()
"""
HAS_A_LOADER = """
import os, time
def next_batch():
    time.sleep(1000)
if os.fork() == 0:
    next_batch()
print("ready", flush=True)
def step():
    os.wait()
step()
"""
RUNS = """
print("ready", flush=True)
def compute():
    while True:
        pass
compute()
"""
# By CLONE_VFORK the parent waits in state D until the child ends.
IS_BLOCKED = """
import ctypes, platform, time
print("ready", flush=True)
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
if ctypes.CDLL(None).syscall(clone, 0x4000 | 17, 0, 0, 0, 0) == 0:
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def py_spy() -> bytes:
    program = stack_tools.installed(platform.machine())
    assert program, "the extra `test` brings py-spy"
    return program


def rank(text: str, python: str = sys.executable) -> list[str]:
    return [python, "-u", "-S", "-E", "-c", text]


def send(node: Node, program: bytes) -> str:
    """The digest by which the node keeps a program."""
    digest = digest_of(program)
    node.ask("file", kind="py-spy", digest=digest, data=base64.b64encode(zlib.compress(program)).decode())
    return digest


def answer(job: Job, tool: str = "", node: int = 0, **more: Any) -> dict[str, Any]:
    fields = {"role": "", "ranks": "", "native": False, "seconds": 20.0, **more}
    return job.nodes[node].ask("stacks", job=job.id, tool=tool, **fields)


def samples(job: Job, tool: str = "", **more: Any) -> list[ProcessSample]:
    found = answer(job, tool, **more)
    assert found["fault"] == ""
    return [read(ProcessSample, one) for one in found["samples"]]


def places(found: list[ProcessSample]) -> dict[tuple[int, ...], list[str]]:
    """Of ranks, the places of their main threads, other threads and children."""
    shown: dict[tuple[int, ...], list[str]] = {}
    for group in gather(found):
        shown.setdefault(group.ranks, []).append(place(group))
    return shown


def samplers(job: Job) -> list[int]:
    """The children of the supervisor that sample."""
    (supervisor,) = job.events(0, "supervisor")
    named = [pid for pid in pids() if read_file(f"/proc/{pid}/comm") == b"ct-stacks\n"]
    return [pid for pid in named if (proc_files.stat(pid) or ["", "0"])[1] == str(supervisor["pid"])]


def test_each_rank_is_where_it_is(bench: Bench, py_spy: bytes) -> None:
    programs = [rank(SLEEPS), rank(WAITS_FOR_A_LOCK), rank(HAS_A_LOADER), rank(SLEEPS), rank(RUNS)]
    programs += [["sh", "-c", "echo ready; sleep 1000 & wait"], rank(IS_BLOCKED)]
    job = bench.run(None, one_each(*programs), per_node=7).ready()
    kill(job.rank(3), signal.SIGSTOP)
    tool = send(job.nodes[0], py_spy)
    kept = job.nodes[0].ask("stack-tools")
    assert (kept["machine"], tool in kept["kept"]) == (platform.machine(), True)

    def settled() -> list[ProcessSample] | None:
        now = samples(job, tool)
        texts = ("4 load", "11 step", "reader", "9 step", "next_batch", "compute", "state D")
        return now if all(text in str(places(now)) for text in texts) else None

    found = until(settled)
    shown = places(found)
    assert shown[(0,)] == ["clock_nanosleep <- <string>:4 load"]
    join = shown[(1,)][0].partition(" <- ")
    assert join[2] == "<string>:11 step" and ("join" in join[0] or "lock" in join[0])
    assert shown[(1,)][1] in ("<string>:6 reader", "futex <- <string>:6 reader")
    assert shown[(2,)] == ["wait4 <- <string>:9 step", "clock_nanosleep <- <string>:4 next_batch"]
    assert shown[(3,)] == ["stopped by a signal (SIGSTOP)"]
    assert shown[(4,)][0] in ("<string>:4 compute", "<string>:5 compute")
    assert [text.rpartition(" ")[2] for text in shown[(5,)]] == ["Python)", "Python)"]  # the shell, and its child
    assert shown[(6,)][0].endswith(" (blocked in the kernel (state D))")
    frozen = next(one for one in found if one.rank == 3)
    assert (frozen.state, frozen.threads) == ("T", ())
    loader = next(one for one in found if one.child and one.rank == 2)
    assert (loader.note, loader.folder) == ("", str(job.dir()))
    # what is chosen
    assert {one.rank for one in samples(job, tool, role="trainer", ranks="0,2")} == {0, 2}
    assert samples(job, tool, role="pserver") == samples(job, tool, role="trainer", ranks="77") == []
    native = samples(job, tool, role="trainer", ranks="0", native=True)[0]
    assert any(".so" in frame.filename for frame in native.threads[0].frames)
    # nothing stays, and no rank was changed
    until(lambda: not samplers(job))
    kill(job.rank(3), signal.SIGCONT)
    assert all(
        read_file(f"/proc/{job.rank(number).pid}/stat").split()[2] in b"SR" for number in range(6) if number != 3
    )
    job.stop()
    job.gone()


def test_without_py_spy_there_is_what_the_kernel_knows(bench: Bench, tmp_path: Path) -> None:
    nodes = bench.nodes(1, env={"HOME": str(tmp_path)})  # no other test has sent it there
    job = bench.run(nodes, one_each(rank(SLEEPS), "mkfifo pipe; echo ready; read line <pipe"), per_node=2).ready()
    until(lambda: "sleep" in str(places(samples(job))))
    first = next(one for one in samples(job) if one.rank == 0)
    assert first.note == "py-spy is missing"
    assert "clock_nanosleep" in [frame.name for frame in first.threads[0].frames]
    assert next(one for one in samples(job) if one.rank == 1).note == "no Python"
    job.stop()
    job.gone()


@pytest.mark.parametrize("python", pythons())
def test_every_python_of_nodes_and_ranks(bench: Bench, py_spy: bytes, python: str) -> None:
    job = bench.run(bench.nodes(1, python=python), one_each(rank(SLEEPS, python))).ready()
    tool = send(job.nodes[0], py_spy)
    until(lambda: "clock_nanosleep" in str(samples(job, tool)) or "select" in str(samples(job, tool)))
    (only,) = samples(job, tool)
    if only.note:  # one that py-spy does not know yet
        assert only.note.startswith("py-spy: ")
    else:
        assert "<string>:4 load" in str(places([only]))
    job.stop()


def test_a_sampler_that_hangs_is_ended_and_the_supervisor_goes_on(bench: Bench, py_spy: bytes, tmp_path: Path) -> None:
    nodes = bench.nodes(1, env={"HOME": str(tmp_path)})  # other tests must not take the program that hangs
    job = bench.run(nodes, one_each(rank(SLEEPS))).ready()
    hangs = send(job.nodes[0], b"#!/bin/sh\nexec sleep 1000\n")
    beats = job.dir() / ".clustertool/control"
    before, began = beats.lstat().st_mtime, time.monotonic()
    (only,) = samples(job, hangs, seconds=1.5)
    assert only.note == "py-spy did not answer in time, and was ended"
    assert time.monotonic() - began < 10
    assert beats.lstat().st_mtime > before
    until(lambda: not samplers(job))
    # one that is stuck itself: the supervisor ends it
    results: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: results.append(answer(job, hangs, seconds=1.0)))
    asking.start()
    os.kill(until(lambda: samplers(job))[0], signal.SIGSTOP)
    asking.join()
    assert results[0]["fault"] == "the sampler did not answer in time, and was ended"
    assert "load" in str(places(samples(job, send(job.nodes[0], py_spy))))
    job.stop()
    job.gone()


def test_requests_at_the_same_time_are_answered_one_after_the_other(bench: Bench, py_spy: bytes) -> None:
    job = bench.run(None, one_each(rank(SLEEPS))).ready()
    tool, node = send(job.nodes[0], py_spy), job.nodes[0]
    most = 0
    clients = [node.open() for _ in range(4)]
    fields = {"job": job.id, "role": "", "ranks": "", "native": False, "seconds": 20.0, "tool": tool}
    found: list[Any] = []
    asking = [threading.Thread(target=lambda one=one: found.append(one.ask("stacks", **fields))) for one in clients]
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking):
        most = max(most, len(samplers(job)))
        time.sleep(0.002)
    assert [len(one["samples"]) for one in found] == [1] * 4
    assert most == 1
    job.stop()


def test_a_supervisor_that_does_not_run_is_named(bench: Bench) -> None:
    job = bench.run(bench.nodes(1, LOSS_TIMEOUT=30), one_each(rank(HAS_A_LOADER))).ready()
    (supervisor,) = job.events(0, "supervisor")
    os.kill(supervisor["pid"], signal.SIGSTOP)
    try:
        assert answer(job)["fault"] == "the supervisor of the job does not answer"
    finally:
        os.kill(supervisor["pid"], signal.SIGCONT)
    assert [(one.rank, one.child) for one in sorted(samples(job), key=lambda one: one.child)] == [(0, False), (0, True)]
    job.stop()
    job.gone()
    assert answer(job)["samples"] == [] and answer(job)["fault"] == ""


def test_stacks_cost_the_supervisor_little(bench: Bench, py_spy: bytes) -> None:
    """It only starts the sampler, which imports what it needs by itself."""
    job = bench.run(None, one_each(rank(SLEEPS))).ready()
    (supervisor,) = job.events(0, "supervisor")
    before = cpu(supervisor["pid"])
    for _ in range(3):
        samples(job, send(job.nodes[0], py_spy))
    assert cpu(supervisor["pid"]) - before < 0.5
    job.stop()


def test_what_is_not_py_spy_is_not_kept(bench: Bench, py_spy: bytes, tmp_path: Path) -> None:
    (node,) = bench.nodes(1, env={"HOME": str(tmp_path)})
    for data in ("", "AAAA", base64.b64encode(zlib.compress(b"other")).decode()):
        with pytest.raises(PreflightError, match="arrived damaged"):
            node.ask("file", kind="py-spy", digest=digest_of(py_spy), data=data)
    tool = send(node, py_spy)
    (kept,) = tmp_path.glob(".cache/clustertool/py-spy-*/py-spy")
    assert (kept.stat().st_mode & 0o777, hashlib.sha256(kept.read_bytes()).hexdigest()[:32]) == (0o700, tool)
    kept.chmod(0o770)  # another user of the group could have changed it
    assert node.ask("stack-tools")["kept"] == []
    assert send(node, py_spy) == tool and node.ask("stack-tools")["kept"] == [tool]
    with pytest.raises(NotFound):
        node.ask("stacks", job="nothing", tool=tool, role="", ranks="", native=False, seconds=1.0)
