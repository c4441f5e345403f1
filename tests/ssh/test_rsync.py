"""rsync over the open connection: every name arrives, nothing is left behind, and every failure is told in words."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import DispatchError, Interrupted, NotFound, Unreachable
from clustertool.reach import bridge, rsync
from clustertool.reach.connection import Link, close_all, open_all
from clustertool.reach.fanout import each
from clustertool.reach.rsync import PushOptions, Sent, pull, push
from tests.ssh import sshd
from tests.ssh.sshd import until

needs_bash = pytest.mark.skipif(not sshd.READS_BASHRC, reason="needs an account whose login shell is bash")
pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="needs rsync")

ODD = [
    b"plain", b"with space", b"-dash", b"--delete", b"new\nline", b"quote'\"s", b"$HOME", b"`id`", b"*", b"?[a]", b"back\\sl",
    b"#hash", b";semicolon", b"caf\xc3\xa9", b"latin\xe9", b"\xff\xfe", b"~", b"a:b", b" lead", b"trail ", b"t\tab", b"{a,b}",
]  # fmt: skip


@pytest.fixture
def node(cluster_of: Any) -> Iterator[tuple[Link, sshd.Sshd]]:
    cluster, (server,) = cluster_of(1)
    with Link.open(cluster.hosts[0], cluster) as link:
        yield link, server
    until(lambda: not _rsyncs())


def _tree(path: Path) -> dict[bytes, tuple[str, object]]:
    """Everything below a directory: kind, and mode with content or the link's target."""
    found: dict[bytes, tuple[str, object]] = {}
    top = os.fsencode(path)
    for where, folders, files in os.walk(top):
        for name in folders + files:
            full = os.path.join(where, name)
            mode = os.lstat(full).st_mode
            if stat.S_ISLNK(mode):
                found[os.path.relpath(full, top)] = ("link", os.readlink(full))
            elif stat.S_ISDIR(mode):
                found[os.path.relpath(full, top)] = ("dir", oct(mode))
            else:
                with open(full, "rb") as file:
                    found[os.path.relpath(full, top)] = (oct(mode), file.read())
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A workspace with everything that has ever broken a copy."""
    top = tmp_path / "it's a \"work\" space"
    top.mkdir()
    for number, name in enumerate(ODD):
        with open(os.path.join(os.fsencode(top), name), "wb") as file:
            file.write(b"%d" % number * 100)
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "secret").write_text("s")
    (top / "secret").chmod(0o600)
    (top / "empty dir").mkdir(mode=0o750)
    (top / "deep" / "er" / "est").mkdir(parents=True)
    (top / "deep" / "er" / "est" / "file").write_text("deep")
    (top / "link").symlink_to("plain")
    (top / "dangling").symlink_to("/no/such/place")
    (top / "dirlink").symlink_to("deep")
    return top


def test_a_whole_directory(node: Any, source: Path, tmp_path: Path) -> None:
    link, _ = node
    os.mkfifo(source / "fifo")
    target = tmp_path / "tar get's [x] *" / "sub"
    sent = push(link, source, None, str(target))
    (source / "fifo").unlink()
    assert _tree(target) == _tree(source)
    assert sent.files == len(ODD) + 3 and sent.bytes > 2000
    again = push(link, source, None, str(target))
    assert again.files == 0 and again.bytes < sent.bytes


def test_only_the_named_files(node: Any, source: Path, tmp_path: Path) -> None:
    link, _ = node
    names = [*ODD[:-1], b"deep/er/est/file", b"link", b"empty dir", b"run.sh"]
    sent = push(link, source, names, str(tmp_path / "target"))
    got, meant = _tree(tmp_path / "target"), _tree(source)
    assert got == {name: meant[name] for name in [*names, b"deep", b"deep/er", b"deep/er/est"]}
    assert sent.files == len(ODD) - 1 + 2


def test_a_directory_in_the_list_is_not_descended(node: Any, source: Path, tmp_path: Path) -> None:
    push(node[0], source, [b"deep"], str(tmp_path / "target"))
    assert _tree(tmp_path / "target") == {b"deep": _tree(source)[b"deep"]}


def test_no_files_at_all(node: Any, source: Path, tmp_path: Path) -> None:
    assert push(node[0], source, [], str(tmp_path / "target")).files == 0
    assert _tree(tmp_path / "target") == {}


def test_home_of_the_node(node: Any, source: Path) -> None:
    link, server = node
    push(link, source, [b"plain"], "~/a b/c")
    assert (server.home / "a b" / "c" / "plain").read_bytes() == b"0" * 100


@needs_bash
def test_noise_of_start_files(node: Any, source: Path, tmp_path: Path) -> None:
    link, server = node
    (server.home / ".bashrc").write_text("seq 5000; head -c 100 /dev/urandom; echo e >&2\n")
    push(link, source, None, str(tmp_path / "target"))
    assert _tree(tmp_path / "target") == _tree(source)


@pytest.mark.parametrize("shell", ["tcsh", "fish"])
def test_login_shells(cluster_of: Any, source: Path, tmp_path: Path, shell: str) -> None:
    path = shutil.which(shell)
    if not path:
        pytest.skip(f"needs {shell}")
    cluster, _ = cluster_of(1, extra=[f'ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"'])
    with Link.open(cluster.hosts[0], cluster) as link:
        push(link, source, None, str(tmp_path / "it's a target"))
    assert _tree(tmp_path / "it's a target") == _tree(source)


def test_files_the_node_has_already(node: Any, tmp_path: Path) -> None:
    link, _ = node
    source, first = tmp_path / "source", tmp_path / "first release"
    source.mkdir()
    for number in range(3):
        (source / f"big{number}").write_bytes(os.urandom(400000))
    push(link, source, None, str(first))
    (source / "big0").write_bytes(os.urandom(400000))
    linked = push(link, source, None, str(tmp_path / "second"), options=PushOptions(link_dest=[str(first), str(tmp_path)]))
    assert linked.files == 1 and 400000 < linked.bytes < 500000
    assert (tmp_path / "second" / "big1").stat().st_ino == (first / "big1").stat().st_ino
    copied = push(link, source, None, str(tmp_path / "third"), options=PushOptions(copy_dest=str(first)))
    assert copied.files <= 1 and copied.bytes < 500000
    assert (tmp_path / "third" / "big1").stat().st_ino != (first / "big1").stat().st_ino
    assert _tree(tmp_path / "second") == _tree(tmp_path / "third") == _tree(source)


def test_options(node: Any, source: Path, tmp_path: Path) -> None:
    link, _ = node
    target = tmp_path / "target"
    push(link, source, None, str(target), options=PushOptions(inplace=True))
    (target / "not ours").write_text("x")
    (target / "plain").write_text("X" * 100)
    os.utime(target / "plain", ns=(0, (source / "plain").stat().st_mtime_ns))
    push(link, source, None, str(target))
    assert (target / "not ours").exists() and (target / "plain").read_text() == "X" * 100
    push(link, source, None, str(target), options=PushOptions(delete=True, checksum=True))
    assert _tree(target) == _tree(source)


def test_progress_and_check_are_called(node: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(30_000_000))
    seen: list[tuple[int, int]] = []
    sent = push(node[0], source, None, str(tmp_path / "target"), on_progress=lambda *now: seen.append(now))
    assert {total for _, total in seen} == {30_000_000}
    assert [now for now, _ in seen] == sorted(now for now, _ in seen) and seen[-1][0] <= sent.bytes
    assert 30_000_000 < sent.bytes < 31_000_000


def test_interrupt_in_the_middle(node: Any, tmp_path: Path) -> None:
    link, server = node
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "huge", "wb") as file:
        file.truncate(20 << 30)
    begin = time.monotonic()

    def check() -> None:
        if any((tmp_path / "target").glob(".huge*")):
            raise Interrupted("Ctrl+C")
        assert time.monotonic() - begin < 20

    with pytest.raises(Interrupted):
        push(link, source, None, str(tmp_path / "target"), check=check)
    ended = time.monotonic()
    until(lambda: not _rsyncs())
    until(lambda: not list((tmp_path / "target").iterdir()))  # the node's rsync has cleaned up
    assert time.monotonic() - ended < 5
    assert link.script(b"echo alive\n", 10).stdout == b"alive\n"
    until(lambda: not [thread for thread in threading.enumerate() if "_upward" in thread.name or "_run" in thread.name])


def test_node_that_dies_in_the_middle(node: Any, tmp_path: Path) -> None:
    link, server = node
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "huge", "wb") as file:
        file.truncate(20 << 30)

    def check() -> None:
        if any((tmp_path / "target").glob(".huge*")):
            server.stop()

    with pytest.raises(Unreachable, match="lost"):
        push(link, source, None, str(tmp_path / "target"), check=check)
    assert not _rsyncs()


def test_node_that_freezes_in_the_middle(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsync, "STALL", 2)
    link, server = node
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "huge", "wb") as file:
        file.truncate(20 << 30)
    cut: list[float] = []

    def check() -> None:
        if not cut and any((tmp_path / "target").glob(".huge*")):
            server.cut()
            cut.append(time.monotonic())

    with pytest.raises(DispatchError, match="nothing moved"):
        push(link, source, None, str(tmp_path / "target"), check=check)
    assert time.monotonic() - cut[0] < 10
    server.stop()


def test_fetch(node: Any, source: Path, tmp_path: Path) -> None:
    (source / "escape").symlink_to("../../../../etc/passwd")
    got = pull(node[0], str(source), tmp_path / "here" / "it's")
    meant = _tree(source)
    for unsafe in (b"escape", b"dangling"):
        del meant[unsafe]
    here = _tree(tmp_path / "here" / "it's")
    assert {name: what[-1] for name, what in here.items() if what[0] != "dir"} == {
        name: what[-1] for name, what in meant.items() if what[0] != "dir"
    }
    assert os.access(tmp_path / "here" / "it's" / "run.sh", os.X_OK)
    assert got.files == len(ODD) + 3 and got.bytes > 2000


def test_fetch_of_named_files_and_of_nothing(node: Any, source: Path, tmp_path: Path) -> None:
    pull(node[0], str(source), tmp_path / "here", files=[b"new\nline", b"deep/er/est/file"])
    assert set(_tree(tmp_path / "here")) == {b"new\nline", b"deep", b"deep/er", b"deep/er/est", b"deep/er/est/file"}
    with pytest.raises(NotFound):
        pull(node[0], str(source / "no such thing"), tmp_path / "there")
    assert not (tmp_path / "there").exists()
    with pytest.raises(DispatchError, match="no/such/file"):
        pull(node[0], str(source), tmp_path / "there", files=[b"no/such/file"])


# ---- failures in words


def test_rsync_is_missing_here(node: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DispatchError, match="missing on this machine") as caught:
        push(node[0], source, None, str(tmp_path / "target"))
    assert "package rsync" in caught.value.fix


@needs_bash
def test_rsync_is_missing_there(cluster_of: Any, source: Path, tmp_path: Path) -> None:
    cluster, (server,) = cluster_of(1)
    (server.home / ".bashrc").write_text("PATH=/nonexistent\n")
    with Link.open(cluster.hosts[0], cluster) as link, pytest.raises(DispatchError) as caught:
        push(link, source, None, str(tmp_path / "target"))
    assert "rsync is missing there" in caught.value.what and caught.value.node == link.node


def test_target_that_cannot_be_made(node: Any, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DispatchError, match="file"):
        push(node[0], source, None, str(tmp_path / "file" / "sub"))


def test_full_disk(node: Any, tmp_path: Path) -> None:
    target, source = tmp_path / "target", tmp_path / "source"
    target.mkdir()
    source.mkdir()
    (source / "big").write_bytes(bytes(3 << 20))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)], capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        with pytest.raises(DispatchError, match="a disk is full.*No space left on device") as caught:
            push(node[0], source, None, str(target))
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
    assert "ROOT_DIR" in caught.value.fix and caught.value.node == node[0].node


def test_file_that_vanishes(node: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match="no-such-file"):
        push(node[0], source, [b"plain", b"no-such-file"], str(tmp_path / "target"))


def test_source_is_no_directory(node: Any, tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match="no directory"):
        push(node[0], tmp_path / "nothing", None, str(tmp_path / "target"))


# ---- together, and the bridge by itself


def test_16_nodes_at_once(cluster_of: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"file{number}").write_bytes(os.urandom(10000))
    cluster, servers = cluster_of(16)
    links = open_all(cluster.hosts, cluster).all()

    def one(link: Link) -> Sent:
        return push(link, source, None, str(servers[link.host.index].home / "target"))

    assert {sent.files for sent in each(links, one).all().values()} == {200}
    meant = _tree(source)
    assert all(_tree(server.home / "target") == meant for server in servers)
    close_all(list(links.values()))
    assert not _rsyncs()


def test_much_data_and_new_keys_on_the_way(node: Any, tmp_path: Path) -> None:
    """More than half a gigabyte: paramiko and sshd exchange new keys in the middle of it."""
    source = tmp_path / "source"
    source.mkdir()
    block = os.urandom(1 << 20)
    with open(source / "huge", "wb") as file:
        for number in range(560):
            file.write(number.to_bytes(4, "big") + block[4:])
    begin = time.monotonic()
    sent = push(node[0], source, None, str(tmp_path / "target"))
    assert sent.bytes > 560 << 20 and time.monotonic() - begin < 30
    assert (tmp_path / "target" / "huge").stat().st_size == 560 << 20
    shutil.rmtree(tmp_path / "target")


def test_the_bridge_passes_pipes_words_and_code(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    words = ["rsync", "--server", "a b", "new\nline", "\udcff"]
    child = subprocess.Popen(
        [sys.executable, "-SE", bridge.__file__, str(theirs.fileno()), "host", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    got, pipes = rsync._receive(ours)
    assert got == [os.fsencode(word) for word in words]
    assert child.stdin and child.stdout
    child.stdin.write(b"down")
    child.stdin.close()
    assert os.read(pipes[0], 100) == b"down"
    os.write(pipes[1], b"up")
    for pipe in pipes:
        os.close(pipe)
    assert child.stdout.read() == b"up"  # the bridge holds no end of it
    ours.send(b"\x17")
    assert child.wait(10) == 23


def test_the_bridge_ends_with_the_tool() -> None:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-SE", bridge.__file__, str(theirs.fileno()), "host"], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    ours.close()
    assert child.wait(10) != 0


def test_the_bridge_imports_little() -> None:
    with open(bridge.__file__) as file:
        tree = ast.parse(file.read())
    assert {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names} == {
        "_socket", "os", "struct", "sys",
    }  # fmt: skip


def _rsyncs() -> list[int]:
    """Living rsync and bridge processes of this test run."""
    found = []
    for pid in sshd.descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0].endswith(b"rsync") or any(word.endswith(b"bridge.py") for word in command):
            found.append(pid)
    return found
