"""rsync over the open connection: every name arrives, nothing is left behind, and every failure is reported in words."""

from __future__ import annotations

import ast
import contextlib
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

from clustertool.errors import BadAnswer, DispatchError, Interrupted, NotFound, Unreachable
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer import bridge, rsync_session
from clustertool.fleet.transfer.receive import FolderEntry, NodeFolder
from clustertool.fleet.transfer.rsync_session import Copied, pull
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import each
from tests.ssh import sshd
from tests.ssh.links import close_all, open_all, script
from tests.ssh.sshd import until

needs_bash = pytest.mark.skipif(not sshd.READS_BASHRC, reason="needs an account whose login shell is bash")
pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="needs rsync")

ODD = [
    b"plain",
    b"with space",
    b"-dash",
    b"--delete",
    b"new\nline",
    b"quote'\"s",
    b"$HOME",
    b"`id`",
    b"*",
    b"?[a]",
    b"back\\sl",
    b"#hash",
    b";semicolon",
    b"caf\xc3\xa9",
    b"latin\xe9",
    b"\xff\xfe",
    b"~",
    b"a:b",
    b" lead",
    b"trail ",
    b"t\tab",
    b"{a,b}",
]


@pytest.fixture
def node(cluster_of: Any) -> Iterator[tuple[SshLink, sshd.Sshd]]:
    cluster, (server,) = cluster_of(1)
    with SshLink(cluster.hosts[0], cluster) as link:
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
    top = tmp_path / 'it\'s a "work" space'
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


def _content(path: Path) -> dict[bytes, object]:
    """Files and links below a directory, without modes: what is fetched is the user's own."""
    return {name: what[-1] for name, what in _tree(path).items() if what[0] != "dir"}


def test_a_whole_directory(node: Any, source: Path, tmp_path: Path) -> None:
    """Odd names too; links that lead out of it and a fifo stay where they are."""
    (source / "escape").symlink_to("../../../../etc/passwd")
    os.mkfifo(source / "fifo")
    target = tmp_path / "tar get's [x] *" / "sub"
    got = pull(node[0], str(source), target)
    (source / "fifo").unlink()
    meant = _content(source)
    for unsafe in (b"escape", b"dangling"):
        del meant[unsafe]
    assert _content(target) == meant
    assert os.access(target / "run.sh", os.X_OK)
    assert got.files == len(ODD) + 3 and got.bytes > 2000
    (source / "plain").write_bytes(b"1" * 100)  # the same size, within the same second
    again = pull(node[0], str(source), target)
    assert again.files == 1 and again.bytes < got.bytes and (target / "plain").read_bytes() == b"1" * 100


def test_nothing_is_there(node: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        pull(node[0], str(source / "no such thing"), tmp_path / "there")
    assert not (tmp_path / "there").exists()


@needs_bash
def test_noise_of_start_files(node: Any, source: Path, tmp_path: Path) -> None:
    link, server = node
    (server.home / ".bashrc").write_text("seq 5000; head -c 100 /dev/urandom; echo e >&2\n")
    (source / "dangling").unlink()
    pull(link, str(source), tmp_path / "target")
    assert _content(tmp_path / "target") == _content(source)


@pytest.mark.parametrize("shell", ["tcsh", "fish"])
def test_login_shells(cluster_of: Any, source: Path, tmp_path: Path, shell: str) -> None:
    path = shutil.which(shell)
    if not path:
        pytest.skip(f"needs {shell}")
    cluster, _ = cluster_of(1, extra=[f'ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"'])
    with SshLink(cluster.hosts[0], cluster) as link:
        (source / "dangling").unlink()
        pull(link, str(source), tmp_path / "it's a target")
    assert _content(tmp_path / "it's a target") == _content(source)


def _huge(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "huge", "wb") as file:
        file.truncate(20 << 30)
    return source


def _arrives(target: Path) -> bool:
    """Whether rsync writes data of the file. It removes the file at its end only from a moment after it has made it."""
    return any(path.stat().st_size for path in target.glob(".huge*"))


def test_interrupt_in_the_middle(node: Any, tmp_path: Path) -> None:
    link, server = node
    source = _huge(tmp_path)
    before = set(threading.enumerate())
    begin = time.monotonic()

    def check() -> None:
        if _arrives(tmp_path / "target"):
            raise Interrupted("Ctrl+C")
        assert time.monotonic() - begin < 60

    with pytest.raises(Interrupted):
        pull(link, str(source), tmp_path / "target", check)
    ended = time.monotonic()
    until(lambda: not _rsyncs())
    until(lambda: not list((tmp_path / "target").iterdir()))  # rsync has cleaned up
    assert time.monotonic() - ended < 20
    assert script(link, b"echo alive\n", 10).stdout == b"alive\n"
    until(
        lambda: (
            not [
                thread
                for thread in {*threading.enumerate()} - before
                if thread.name.endswith(("(_upward)", "(_serve)"))
            ]
        )
    )


def test_node_that_dies_in_the_middle(node: Any, tmp_path: Path) -> None:
    link, server = node
    source = _huge(tmp_path)

    def check() -> None:
        if any((tmp_path / "target").glob(".huge*")):
            server.stop()

    with pytest.raises(Unreachable, match="lost"):
        pull(link, str(source), tmp_path / "target", check)
    until(lambda: not _rsyncs())


def test_node_that_freezes_in_the_middle(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsync_session, "STALL", 2)
    link, server = node
    source = _huge(tmp_path)
    cut: list[float] = []

    def check() -> None:
        if not cut and any((tmp_path / "target").glob(".huge*")):
            server.cut()
            cut.append(time.monotonic())

    with pytest.raises(DispatchError, match="nothing moved"):
        pull(link, str(source), tmp_path / "target", check)
    assert time.monotonic() - cut[0] < 20
    server.stop()


# ---- failures in words


def test_rsync_is_missing_here(node: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DispatchError, match="missing on this machine") as caught:
        pull(node[0], str(source), tmp_path / "target")
    assert "package rsync" in caught.value.fix


@needs_bash
def test_rsync_is_missing_there(cluster_of: Any, source: Path, tmp_path: Path) -> None:
    cluster, (server,) = cluster_of(1)
    (server.home / ".bashrc").write_text("PATH=/nonexistent\n")
    with SshLink(cluster.hosts[0], cluster) as link, pytest.raises(DispatchError) as caught:
        pull(link, str(source), tmp_path / "target")
    assert "rsync is missing there" in caught.value.what and caught.value.node == link.node


def test_without_rsync_the_files_come_in_frames(
    cluster_of: Any, source: Path, tmp_path: Path, rsync_hidden: None
) -> None:
    """The same files as with it, and none again that has not changed."""
    (source / "escape").symlink_to("../../../../etc/passwd")
    (source / "far").symlink_to("deep/../../x")
    (source / "big").write_bytes(os.urandom(1_300_000))
    os.mkfifo(source / "fifo")
    target = tmp_path / "target"
    with fleet_of(cluster_of) as fleet:
        got = NodeFolder(fleet, 0, str(source)).receive(target, check=lambda: None)
        (source / "fifo").unlink()
        meant = _content(source)
        for unsafe in (b"escape", b"dangling", b"far"):
            del meant[unsafe]
        assert _content(target) == meant and (target / "empty dir").is_dir()
        assert os.access(target / "run.sh", os.X_OK) and not os.access(target / "secret", os.X_OK)
        assert got.files == len(ODD) + 4 and got.bytes > 1_300_000
        (source / "plain").write_bytes(b"1" * 100)
        again = NodeFolder(fleet, 0, str(source)).receive(target, check=lambda: None)
        assert (again.files, again.bytes) == (1, 100) and (target / "plain").read_bytes() == b"1" * 100
        with pytest.raises(NotFound):
            NodeFolder(fleet, 0, str(source / "nothing")).receive(tmp_path / "there", check=lambda: None)
        assert not (tmp_path / "there").exists()


def test_without_rsync_what_cannot_be_read_is_listed_and_all_else_is_copied(
    cluster_of: Any, source: Path, tmp_path: Path, rsync_hidden: None
) -> None:
    """A file that vanishes between the list and the copy takes the place of one without rights: root reads all."""
    target = tmp_path / "target"
    with fleet_of(cluster_of) as fleet:
        listed = [
            *NodeFolder(fleet, 0, str(source)).entries(),
            FolderEntry("closed", "unreadable", False, 0, 0, "Permission denied"),
        ]
        (source / "plain").unlink()
        with pytest.raises(DispatchError) as caught:
            NodeFolder(fleet, 0, str(source)).receive(target, lambda: None, listed)
        assert caught.value.what.splitlines() == [
            "'closed' cannot be read: Permission denied",
            "'plain' cannot be read: No such file or directory",
        ]
        assert caught.value.node == fleet.name(0) and "all else was copied" in caught.value.fix
        meant = _content(source)
        del meant[b"dangling"]
        assert _content(target) == meant


def test_frames_write_through_no_link(cluster_of: Any, source: Path, tmp_path: Path, rsync_hidden: None) -> None:
    """A link here that has the name of a folder there."""
    (tmp_path / "target").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "target/deep").symlink_to("../outside")
    with fleet_of(cluster_of) as fleet, pytest.raises(DispatchError, match="cannot be written"):
        NodeFolder(fleet, 0, str(source)).receive(tmp_path / "target", check=lambda: None)
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("path", ["../out", "/out", "a/../../out", "", "a//b", "a\0b"])
def test_a_node_that_names_a_file_outside(path: str) -> None:
    with pytest.raises(BadAnswer):
        assert not FolderEntry(path, "file", False, 0, 0, "").parts


@pytest.mark.parametrize(
    ("path", "link", "inside"),
    [
        ("a", "b", True),
        ("a", "/b", False),
        ("a", "../b", False),
        ("d/a", "../b", True),
        ("d/a", "../../b", False),
        ("d/e/a", "x/../../../b", False),
        ("d/a", "./../b", True),
    ],
)
def test_links_that_stay_inside(path: str, link: str, inside: bool) -> None:
    assert FolderEntry(path, "link", False, 0, 0, link).stays_inside is inside


@pytest.fixture
def rsync_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with all programs but rsync."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            (programs / program.name).unlink(missing_ok=True)
            (programs / program.name).symlink_to(program)
    (programs / "rsync").unlink(missing_ok=True)
    monkeypatch.setenv("PATH", str(programs))


@contextlib.contextmanager
def fleet_of(cluster_of: Any) -> Iterator[Fleet]:
    cluster, _ = cluster_of(1)
    with Fleet(cluster) as fleet:
        fleet.open()
        yield fleet


def test_full_disk(node: Any, tmp_path: Path) -> None:
    target, source = tmp_path / "target", tmp_path / "source"
    target.mkdir()
    source.mkdir()
    (source / "big").write_bytes(bytes(3 << 20))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)], capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        with pytest.raises(DispatchError, match="disk here is full.*No space left on device") as caught:
            pull(node[0], str(source), target)
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
    assert "--to" in caught.value.fix and caught.value.node == node[0].node


# ---- together, and the bridge by itself


def test_6_nodes_at_once(cluster_of: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"file{number}").write_bytes(os.urandom(10000))
    cluster, _ = cluster_of(6)
    links = open_all(cluster.hosts, cluster).all()

    def one(link: SshLink) -> Copied:
        return pull(link, str(source), tmp_path / f"node{link.host.index}")

    assert {got.files for got in each(links, one).all().values()} == {200}
    meant = _content(source)
    assert all(_content(tmp_path / f"node{node}") == meant for node in links)
    close_all(list(links.values()))
    until(lambda: not _rsyncs())


@pytest.mark.chaos
def test_how_long_much_data_takes(node: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    test_much_data_and_new_keys_on_the_way(node, tmp_path)
    assert time.monotonic() - begin < 30


@pytest.mark.chaos
def test_much_data_and_new_keys_on_the_way(node: Any, tmp_path: Path) -> None:
    """More than half a gigabyte: paramiko and sshd exchange new keys in the middle of it."""
    source = tmp_path / "source"
    source.mkdir()
    block = os.urandom(1 << 20)
    with open(source / "huge", "wb") as file:
        for number in range(560):
            file.write(number.to_bytes(4, "big") + block[4:])
    got = pull(node[0], str(source), tmp_path / "target")
    assert got.bytes == 560 << 20
    assert (tmp_path / "target" / "huge").stat().st_size == 560 << 20
    shutil.rmtree(tmp_path / "target")


def test_the_bridge_passes_pipes_arguments_and_code(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    tokens = ["rsync", "--server", "a b", "new\nline", "\udcff"]
    child = subprocess.Popen(
        [sys.executable, "-SE", bridge.__file__, str(theirs.fileno()), "host", *tokens],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    got, pipes = rsync_session._receive_command(ours)
    assert got == [os.fsencode(token) for token in tokens]
    assert child.stdin and child.stdout
    child.stdin.write(b"down")
    child.stdin.close()
    assert os.read(pipes[0], 100) == b"down"
    os.write(pipes[1], b"up")
    for pipe in pipes:
        os.close(pipe)
    assert child.stdout.read() == b"up"  # the bridge holds no end of it
    ours.send(b"\x17")
    assert child.wait(60) == 23


def test_the_bridge_ends_with_the_tool() -> None:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-SE", bridge.__file__, str(theirs.fileno()), "host"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.close()
    assert child.wait(60) != 0


def test_the_bridge_imports_little() -> None:
    with open(bridge.__file__) as file:
        tree = ast.parse(file.read())
    assert {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names} == {
        "os",
        "socket",
        "sys",
    }


def _rsyncs() -> list[int]:
    """Living rsync and bridge processes of this test run."""
    found = []
    for pid in sshd.descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0].endswith(b"rsync") or any(token.endswith(b"bridge.py") for token in command):
            found.append(pid)
    return found
