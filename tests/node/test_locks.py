"""A job's cards are locked on the node: with real jobs, real deaths, and what a hostile neighbour could put into /tmp."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import DeviceInUse
from clustertool.model.facts import Facts, read_facts
from clustertool.node.devices import detect, locks
from tests.node.harness import Bench, Job, Node, kill, read, until
from tests.nvml import Driver, copy


@pytest.fixture
def driver(nvml: Driver, tmp_path: Path) -> Driver:
    return copy(nvml, tmp_path / "driver")


def node_with(bench: Bench, driver: Driver, **given: Any) -> Node:
    return bench.nodes(1, env={"LD_LIBRARY_PATH": str(driver.folder)}, DEVICE_KIND="auto", **given)[0]


def blind(node: Node) -> dict[int, Facts]:
    """What was true before anybody held anything: plans made of it meet the lock on the node."""
    return {0: replace(read_facts(0, node.probe()), locked=())}


def on(bench: Bench, node: Node, devices: str, **given: Any) -> Job:
    return bench.job([node], "echo ready; exec sleep 1000", devices=devices, facts=blind(node), **given)


def locked(node: Node) -> dict[int, str]:
    return {device: job for device, job, _ in node.probe()["locked"]}


def test_two_jobs_one_card(bench: Bench, driver: Driver) -> None:
    """The second gets the name of its owner, starts nothing, and may start once the first has ended."""
    node = node_with(bench, driver)
    first = on(bench, node, "0,1").start().ready()
    assert locked(node) == {0: first.id, 1: first.id}
    second = on(bench, node, "1,2")
    with pytest.raises(DeviceInUse, match=rf"gpu 1 is in use by job {first.id} of user \S+"):
        second.start()
    assert locked(node) == {0: first.id, 1: first.id}  # all of them or none
    third = on(bench, node, "2,3").start().ready()
    first.stop()
    until(lambda: set(locked(node)) == {2, 3}, "the cards of the first job are free")
    fourth = on(bench, node, "0,1").start().ready()
    third.stop()
    fourth.stop()


def test_ranks_of_one_job_share_a_card(bench: Bench, driver: Driver) -> None:
    node = node_with(bench, driver)
    job = on(bench, node, "0", nproc_per_node="2").start().ready()
    assert locked(node) == {0: job.id}
    job.stop()


def test_two_nodes_of_a_job_that_are_one_machine(bench: Bench, driver: Driver) -> None:
    nodes = bench.nodes(2, env={"LD_LIBRARY_PATH": str(driver.folder)}, DEVICE_KIND="auto")
    job = bench.run(nodes, "echo ready; exec sleep 1000", devices="3").ready()
    assert locked(nodes[0]) == locked(nodes[1]) == {3: job.id}
    job.stop()


def test_the_lock_outlives_the_supervisor_and_ends_with_the_job(bench: Bench, driver: Driver) -> None:
    """While the guard still ends the ranks, no other job gets their card."""
    node = node_with(bench, driver)
    job = on(bench, node, "4", policy={"grace": 3}).start().ready()
    job.rank(0)
    guard, supervisor = job.process("guard"), job.process("supervisor")
    os.kill(supervisor.pid, signal.SIGSTOP)  # else it would replace a guard that stands still
    os.kill(guard.pid, signal.SIGSTOP)
    kill(supervisor)
    assert locked(node) == {4: job.id}
    os.kill(guard.pid, signal.SIGCONT)
    until(lambda: locked(node) == {}, "the lock is gone with the guard")
    job.gone()


def test_all_of_the_job_killed_at_once(bench: Bench, driver: Driver) -> None:
    """No file, no reboot and no clean-up is needed."""
    node = node_with(bench, driver)
    job = on(bench, node, "4").start().ready()
    rank = job.rank(0)
    guard, supervisor = job.process("guard"), job.process("supervisor")
    os.kill(supervisor.pid, signal.SIGSTOP)
    kill(guard)
    kill(supervisor)
    kill(rank)
    until(lambda: locked(node) == {})
    again = on(bench, node, "4").start().ready()
    again.stop()


def test_a_job_without_devices_locks_nothing(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    job = bench.run([node], "echo ready; exec sleep 1000", devices="0,1").ready()  # DEVICE_KIND = "cpu"
    assert not [path for path in Path("/tmp").glob("clustertool-devices-*") if job.id.encode() in read(str(path))]
    job.stop()


# -- the locks themselves, in a /tmp of the test's own


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(locks, "_TMP", str(folder))
    monkeypatch.setattr(detect, "library", lambda: "")
    return folder


@contextlib.contextmanager
def taken(ids: list[int], job: str) -> Iterator[locks.DeviceLock]:
    lock = locks.take("xpu", ids, job)
    try:
        yield lock
    finally:
        lock.release()


def test_take_and_release(tmp: Path) -> None:
    with taken([0, 2], "a") as lock:
        assert {key: one["job"] for key, one in locks.locked().items()} == {"xpu0": "a", "xpu2": "a"}
        assert Path(lock.path).stat().st_mode & 0o777 == 0o644
        with pytest.raises(DeviceInUse, match="xpu 2 is in use by job a of user"):
            locks.take("xpu", [1, 2], "b")
        with taken([1], "b"):
            assert sorted(locks.locked()) == ["xpu0", "xpu1", "xpu2"]
    assert locks.locked() == {} and [path.name for path in tmp.iterdir()] == ["clustertool-devices.lock"]


def test_left_files_hold_nothing_and_are_removed(tmp: Path) -> None:
    left = tmp / f"clustertool-devices-{os.getuid()}-1234"
    left.write_text(json.dumps({"job": "dead", "keys": ["xpu0"]}))
    assert locks.locked() == {}
    with taken([0], "a"):
        assert not left.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"job": 1}', b'{"job": "x", "keys": 7}', b"\xff" * 100, b"[" * 5000]
)
def test_nonsense_that_is_locked_is_no_lock(tmp: Path, content: bytes) -> None:
    path = tmp / "clustertool-devices-7-bad"
    path.write_bytes(content)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert locks.locked() == {}
        with taken([0], "a"):
            pass


def test_links_and_pipes_are_not_followed(tmp: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(json.dumps({"job": "x", "keys": ["xpu0"]}))
    (tmp / "clustertool-devices-1-link").symlink_to(target)
    os.mkfifo(tmp / "clustertool-devices-1-pipe")
    (tmp / "clustertool-devices-1-folder").mkdir()
    with open(target) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with taken([0], "a"):
            assert {one["job"] for one in locks.locked().values()} == {"a"}


def test_a_machines_file_that_was_removed_meanwhile_is_made_anew(tmp: Path) -> None:
    path = tmp / "clustertool-devices.lock"
    with taken([0], "a"):
        path.unlink()
        with taken([1], "b"):
            assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="another user's lock needs root to be one")
def test_another_users_lock_is_seen_and_respected(tmp: Path) -> None:
    """As another user: his file is his, our umask does not matter, and his name is reported."""
    tmp.chmod(0o1777)
    for folder in tmp.parents:
        if folder.stat().st_uid == 0 and folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.umask(0o077)
            locks.take("xpu", [5], "theirs")
            os.write(ready[1], b"!")
            os.read(done[0], 1)
            code = 0
        finally:
            os.write(ready[1], b"?")
            os._exit(code)
    try:
        assert os.read(ready[0], 1) == b"!"
        assert locks.locked() == {"xpu5": {"job": "theirs", "user": "nobody"}}
        with pytest.raises(DeviceInUse, match="xpu 5 is in use by job theirs of user nobody"):
            locks.take("xpu", [5], "theirs")  # another user's job of the same name is another job
        with taken([4], "ours"):
            pass
    finally:
        os.write(done[1], b"!")
        assert os.waitpid(child, 0)[1] == 0
    assert locks.locked() == {}
