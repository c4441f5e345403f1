"""What another user puts into /tmp, or takes by name, does not stop this user's jobs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clustertool.errors import DeviceInUse, PortInUse, PreflightError
from clustertool.node.devices import detect, locks
from clustertool.node.ports import claims, reservations
from clustertool.node.system import file_lock, private_directory
from tests.lab.lab import FIRST_UID
from tests.node.harness import until

OTHER = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="another user needs root")


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /tmp of the test's own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    for above in folder.parents:
        if above.stat().st_uid == os.getuid() and not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o011)
    monkeypatch.setattr(private_directory, "_TMP", str(folder))
    monkeypatch.setattr(locks, "_TMP", str(folder))
    monkeypatch.setattr(locks, "_PATIENCE", 0.2)
    monkeypatch.setattr(detect, "library", lambda: "")
    return folder


@contextlib.contextmanager
def another_user(work: Callable[[], object]) -> Iterator[int]:
    """A process of another user, its pid; `work` is done when this begins, and it lives until this ends."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            kept = work()
            os.write(ready[1], b"!")
            os.read(done[0], 1)
            del kept
        finally:
            os._exit(0)
    try:
        assert select.select([ready[0]], [], [], 20)[0] and os.read(ready[0], 1) == b"!"
        yield child
    finally:
        os.write(done[1], b"!")
        os.waitpid(child, 0)


# -- claims


def test_the_directory_of_claims_is_private_and_found_again(tmp: Path) -> None:
    assert private_directory.find() == "" and claims.claimed_ports() == {}
    claims.take_back("none", "/")
    assert list(tmp.iterdir()) == [], "nothing is made to take back nothing"
    made = Path(private_directory.make("ports.json"))
    assert made.parent == tmp and made.name.startswith(f"clustertool-{os.getuid()}-")
    assert made.stat().st_mode & 0o777 == 0o700
    assert private_directory.make("ports.json") == str(made) and list(tmp.iterdir()) == [made]


@root_only
def test_what_others_put_in_its_place_is_not_used(tmp: Path, tmp_path: Path) -> None:
    me = os.getuid()
    for name in (f"clustertool-{me}", f"clustertool-{me}-theirs"):
        (tmp / name).mkdir(mode=0o700)
        os.chown(tmp / name, OTHER, OTHER)
    (tmp / f"clustertool-{me}-open").mkdir()
    (tmp / f"clustertool-{me}-open").chmod(0o770)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp / f"clustertool-{me}-link").symlink_to(tmp_path / "mine")
    (tmp / f"clustertool-{me}-file").touch(mode=0o700)
    before = set(tmp.iterdir())
    made = Path(private_directory.make("ports.json"))
    assert made not in before and made.stat().st_uid == me
    assert private_directory.find() == str(made)


def test_the_oldest_of_several_is_used_by_all_that_make_one_at_once(tmp: Path) -> None:
    found: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        found.append(private_directory.make("ports.json"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and [str(path) for path in tmp.iterdir()] == found[:1]


def test_one_that_was_made_during_the_search_is_not_used_at_once(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one may be missing in the list."""
    list_of, lists = os.listdir, []
    newer, older = (tmp / f"clustertool-{os.getuid()}-{name}" for name in ("newer", "older"))

    def listed(path: str) -> list[str]:
        if not lists:
            older.mkdir(0o700)
            time.sleep(0.05)
            newer.mkdir(0o700)
        lists.append([name for name in list_of(path) if lists or name == newer.name])
        return lists[-1]

    monkeypatch.setattr(private_directory.os, "listdir", listed)
    assert private_directory.find() == str(older)
    assert lists[0] == [newer.name]


def test_a_tmp_that_is_not_there_is_named_once(tmp: Path) -> None:
    tmp.rmdir()
    assert private_directory.trouble()[0] == f"{tmp} cannot be examined: No such file or directory"
    assert private_directory.low_space() == ("", "")


@root_only
def test_a_full_or_read_only_tmp_is_named(tmp: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "none", str(tmp)], check=True)
    try:
        assert private_directory.trouble() == ("", "")
        assert private_directory.low_space()[0].endswith(f"KiB free in {tmp}"), "programs need more"
        made = Path(private_directory.make("ports.json"))
        with contextlib.suppress(OSError), open(tmp / "fill", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert private_directory.trouble()[0] == f"{tmp} is full"
        (made / "ports.json").unlink()
        made.rmdir()
        with contextlib.suppress(OSError), open(tmp / "fill", "ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.raises(PreflightError, match=f"{tmp} cannot be written: No space left on device"):
            claims.claim(range(1000, 6000), "job", "/base")
        subprocess.run(["mount", "-o", "remount,ro", str(tmp)], check=True)
        assert private_directory.trouble()[0] == f"{tmp} is read-only"
        if not private_directory.find():
            with pytest.raises(PreflightError, match=f"{tmp} cannot be written: Read-only file system"):
                claims.claim([1000], "job", "/base")
    finally:
        subprocess.run(["umount", "-l", str(tmp)], check=True)


# -- device locks


def trap(tmp: Path, kind: str) -> contextlib.AbstractContextManager[object]:
    path = tmp / "clustertool-devices.lock"
    if kind in ("locked", "closed"):

        def hold() -> object:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.fchmod(fd, 0o644 if kind == "locked" else 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            return fd

        return another_user(hold)
    {"link": lambda: path.symlink_to(tmp / "no"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    return contextlib.nullcontext()


@root_only
@pytest.mark.parametrize("kind", ["locked", "link", "pipe", "folder"])
def test_jobs_take_devices_without_the_lock_of_the_machine(tmp: Path, kind: str) -> None:
    with trap(tmp, kind):
        why = locks.trouble()
        assert f"{tmp}/clustertool-devices.lock (of user " in why
        assert ("has been locked for 0.2 s by process" in why and "of user nobody" in why) == (kind == "locked"), why
        first = locks.take("xpu", [0, 1], "a")
        with pytest.raises(DeviceInUse, match="xpu 1 is in use by job a of user root"):
            locks.take("xpu", [1, 2], "b")
        second = locks.take("xpu", [2], "b")
        assert {key: one["job"] for key, one in locks.locked().items()} == {"xpu0": "a", "xpu1": "a", "xpu2": "b"}
        first.release()
        second.release()
    assert not (tmp / "no").exists()


@root_only
def test_two_that_take_one_card_at_once_without_the_lock_never_both_get_it(tmp: Path) -> None:
    (tmp / "clustertool-devices.lock").mkdir()
    got: list[locks.DeviceLock] = []
    start = threading.Barrier(4)

    def take(job: str) -> None:
        start.wait()
        with contextlib.suppress(DeviceInUse):
            got.append(locks.take("xpu", [0], job))

    for _ in range(5):
        threads = [threading.Thread(target=take, args=(f"job{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) <= 1
        while got:
            got.pop().release()


def test_a_lock_file_that_was_removed_before_it_was_locked(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_lock = file_lock.try_lock
    cleaned: list[str] = []

    def late(fd: int, how: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if how == fcntl.LOCK_EX and "clustertool-devices-" in path and not cleaned:
            cleaned.append(path)
            os.unlink(path)
        return try_lock(fd, how)

    monkeypatch.setattr(file_lock, "try_lock", late)
    lock = locks.take("xpu", [0], "a")
    assert cleaned and lock.path != cleaned[0] and list(locks.locked()) == ["xpu0"]
    lock.release()


# -- port names


def name(port: int, uid: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(f"\0clustertool/port/{port}/{uid}")
    if kind == socket.SOCK_STREAM:
        sock.listen(16)
    return sock


@root_only
def test_a_port_name_of_another_user_is_that_users() -> None:
    mine = reservations.Reservations()
    with another_user(lambda: name(7, OTHER)):
        assert reservations.holder(7, reservations.reserved_ports()[7]) == "a job of user nobody"
        with pytest.raises(PortInUse, match="port 7 is in use by a job of user nobody"):
            mine.take([7])
    mine.close()
    mine.take([7])
    mine.close()


@root_only
@pytest.mark.parametrize("kind, user", [(socket.SOCK_STREAM, "user nobody"), (socket.SOCK_DGRAM, "another user")])
def test_a_name_that_another_user_has_taken_in_our_name_is_not_ours(kind: socket.SocketKind, user: str) -> None:
    mine = reservations.Reservations()
    with another_user(lambda: name(7, os.getuid(), kind)):
        assert reservations.holder(7, reservations.reserved_ports()[7]) == f"a job of {user}"
        with pytest.raises(PortInUse, match=f"port 7 is in use by a job of {user}"):
            mine.take([7])
    mine.close()


def test_a_name_does_not_block_where_many_ask_whose_it_is() -> None:
    mine = reservations.Reservations()
    mine.take([7])
    asked = 0
    while reservations.owner(7, os.getuid()) == os.getuid():
        asked += 1
        assert asked < 10_000
    mine.turn()
    assert reservations.owner(7, os.getuid()) == os.getuid()
    reservations.Reservations().take([7])
    mine.close()


# -- all of it, with real users


def test_a_user_runs_jobs_whatever_another_one_has_put_into_tmp(lab, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """bob takes what ann's jobs use on a node: her jobs run all the same, and check tells her."""
    from tests.cli import LabSite
    from tests.lab.lab import Node

    nodes = lab(1, nodes={0: Node(users=("ann", "bob"))})
    as_bob = ["setpriv", f"--reuid={FIRST_UID + 1}", f"--regid={FIRST_UID + 1}", "--clear-groups"]
    if nodes.exec(0, [*as_bob, "python3", "-c", "import ssl"]).returncode:
        pytest.skip("other users than root have no python3 here")
    squat = f"""
import fcntl, os, time
for name in ("clustertool-{FIRST_UID}", "clustertool-{FIRST_UID}-1", "clustertool-new-{FIRST_UID}-1"):
    os.mkdir("/tmp/" + name, 0o700)
file = open("/tmp/clustertool-devices.lock", "w")
os.chmod(file.name, 0o644)
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(600)
"""
    site = LabSite(tmp_path / "ann", nodes)
    site.conf(USER="ann", PYTHON="python3")
    site.workspace(train_py="print('ran')")
    thread = threading.Thread(
        target=lambda: nodes.exec(0, [*as_bob, "timeout", "100", "python3", "-c", squat], timeout=120)
    )
    thread.start()

    def end_of_bob() -> None:
        for process in nodes.processes(0):
            if squat in process.argv:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, 9)
        thread.join(30)

    try:
        until(lambda: (nodes.tmp(0) / "clustertool-devices.lock").exists(), "bob is ready")
        until(
            lambda: [p for p in nodes.processes(0) if squat in p.argv and "timeout" not in p.argv],
            "bob's program lives",
        )
        assert "ran" in site.inv("run", "-w", "job").ends(0).out
        cells = json.loads(site.inv("check", "--json").ends(0).out)["nodes"][0]["findings"]
        assert cells["devices"]["level"] == "warn"
        assert "clustertool-devices.lock (of user bob) has been locked for 2 s" in cells["devices"]["text"]
        end_of_bob()
        mounted = nodes.exec(0, ["mount", "-o", "remount,ro,bind", "/tmp"])
        assert not mounted.returncode, mounted
        done = site.inv("run", "-w", "job").ends(69)
        assert "/tmp is read-only" in done.err and "ROOT_DIR" not in done.err
        assert "/tmp is read-only" in site.inv("check").ends(69).out
    finally:
        end_of_bob()
        site.close()


def test_claims_that_stay_locked_end_in_an_error(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_directory, "_PATIENCE", 0.2)
    with open(os.path.join(private_directory.make("ports.json"), "ports.json"), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for act in (
            claims.claimed_ports,
            lambda: claims.claim([6170], "j", "/base"),
            lambda: claims.take_back("j", "/base"),
        ):
            with pytest.raises(PreflightError, match=r"ports.json has been locked for 0.2 s"):
                act()
    assert claims.claimed_ports() == {}


def test_claims_of_a_long_job_are_touched_and_their_directory_is_not_changed(tmp: Path) -> None:
    """The change time of the directory decides which one is the oldest."""
    place = private_directory.make("ports.json")
    path, before = os.path.join(place, "ports.json"), os.stat(place).st_ctime_ns
    os.utime(path, (1, 1))
    claims.touch()
    assert os.stat(path).st_mtime > 1e9
    assert os.stat(place).st_ctime_ns == before
