"""A workspace on disk: what is sent, what is left out, what is remembered, and files that change under the reader."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from clustertool.actions.load_workspace import uses_one_port, workspace, workspace_toml
from clustertool.actions.read_request import require_first_lines, require_names
from clustertool.errors import DataError, DispatchError
from clustertool.fleet.dispatch import workspace as w
from clustertool.fleet.dispatch.cache import WorkspaceCache
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.model.dispatch import manifest


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def old(path: Path) -> None:
    """So old that its digest is remembered."""
    os.utime(path, (1, 1))


def restore(shipment: Shipment) -> dict[str, bytes]:
    """{path: content} as a node would make it."""
    by_name = {piece.name: shipment.read(number) for number, piece in enumerate(shipment.pieces) if number}
    found, pack, last = {}, b"", ""
    for row in manifest.read_rows(shipment.text):
        if row[0] == "p":
            pack = by_name.get(row[1], b"")
        elif row[0] == "s":
            found[row[1]] = pack[row[4] : row[4] + row[5]]
        elif row[0] == "f":
            last = row[1]
            found[last] = b""
        elif row[0] == "c":
            found[last] += by_name[row[1]]
    return found


def test_every_name_and_every_kind(job: Path) -> None:
    names = ["-rf", "a b", "new\nline", "é", os.fsdecode(b"\xff\xfe"), ".hidden", "#x", "dir/deep/file", "dir/big"]
    for number, name in enumerate(names):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_bytes(os.urandom(1 << 20) if name == "dir/big" else bytes([number]) * number)
    (job / "empty").mkdir()
    (job / "link").symlink_to("-rf")
    (job / "dangling").symlink_to("/nowhere")
    (job / "to dir").symlink_to("dir")
    found = w.read_workspace(job)
    assert set(found.files) == set(names)
    assert {entry.path: entry.content for entry in found.entries if entry.kind == "link"} == {
        "link": "-rf",
        "dangling": "/nowhere",
        "to dir": "dir",
    }
    assert {entry.path for entry in found.entries if entry.kind == "dir"} == {"dir", "dir/deep", "empty"}
    assert restore(Shipment(found, {})) == {name: (job / name).read_bytes() for name in names}


KEYS = ("", "OPENSSH ", "RSA ", "EC ", "DSA ", "ENCRYPTED ")


def private(kind: str) -> str:
    return f"-----BEGIN {kind}PRIVATE KEY-----\nMIIE\n-----END {kind}PRIVATE KEY-----\n"


def test_private_keys_and_credentials_are_left_out(job: Path) -> None:
    for number, kind in enumerate(KEYS):
        (job / f"key{number}").write_text(private(kind))
    for name in (
        "id_rsa",
        "id_dsa",
        "id_ecdsa",
        "id_ed25519",
        ".netrc",
        ".ssh/config",
        ".aws/credentials",
        "a/.kube/config",
    ):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text("x")
    (job / "big").write_text(private("RSA ") + "x" * 500_000)
    sent = {
        "cert.pem": "-----BEGIN CERTIFICATE-----\nMIIE\n" + private(""),
        "id_rsa.pub": "ssh-rsa AAAA",
        "id_map.txt": "1",
        "netrc": "1",
        "text": "see -----BEGIN PRIVATE KEY-----\n",
        "public": "-----BEGIN PUBLIC KEY-----\n",
        "words": "-----BEGIN PRIVATE KEY----- of a sentence\n",
        ".env": "TOKEN=1",
    }
    for name, text in sent.items():
        (job / name).write_text(text)
    found = w.read_workspace(job)
    assert set(found.files) == set(sent)
    assert {(left.path, left.why) for left in found.left_out} == {
        *((f"key{number}", "private key") for number in range(len(KEYS))),
        *((name, "private key") for name in ("big", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")),
        *((name, "credentials") for name in (".netrc", ".ssh/", ".aws/", "a/.kube/")),
    }
    assert restore(Shipment(found, {})) == {name: text.encode() for name, text in sent.items()}


def test_a_line_of_clusterignore_takes_credentials(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next walk leaves them out again where the line is gone: no digest of them is remembered."""
    monkeypatch.setattr("clustertool.fleet.dispatch.cache._FRESH", 0.0)
    (job / "certs").mkdir()
    (job / ".ssh").mkdir()
    for name in ("certs/key.pem", "server.key"):
        (job / name).write_text(private(""))
    for name in (".netrc", ".ssh/config"):
        (job / name).write_text("x")
    for path in job.rglob("*"):
        old(path)
    (job / ".clusterignore").write_text("!.netrc\n!certs/*.pem\n!.ssh/\nserver.key\n")
    found = w.read_workspace(job)
    assert set(found.files) == {".netrc", "certs/key.pem", ".ssh/config", ".clusterignore"}
    assert [(left.path, left.why) for left in found.left_out] == [("server.key", ".clusterignore")]
    _saved(job, 3)
    assert "certs/key.pem" not in WorkspaceCache(job).digests()
    (job / ".clusterignore").unlink()
    found = w.read_workspace(job)
    assert found.files == () and len(found.left_out) == 4
    _saved(job, 0)


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    warn = remark = note


def test_an_env_file_is_sent_with_a_warning_and_keys_are_the_first_in_the_line(job: Path) -> None:
    caller = Lines()
    for number in range(9):
        (job / f"a{number}").mkdir()
        (job / f"a{number}/__pycache__").mkdir()
    (job / "z").write_text(private(""))
    for name in (".env", "b/.env"):
        (job / name).parent.mkdir(exist_ok=True)
        (job / name).write_text("TOKEN=1")
    assert {".env", "b/.env"} == set(workspace(caller, job).files)  # type: ignore[arg-type]
    left, *env = caller.lines
    assert left.startswith("left out: z (private key, 59 B), a0/__pycache__/ ")
    assert left.endswith(" and 2 more; a line !z in .clusterignore takes it")
    assert [line.partition(" is sent too")[0] for line in env] == [".env", "b/.env"]
    (job / ".clusterignore").write_text("!.env\n")
    del caller.lines[:]
    workspace(caller, job)  # type: ignore[arg-type]
    assert len(caller.lines) == 1


def write(job: Path, *names: str) -> None:
    for name in names:
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text(name)


def sent_and_left(job: Path) -> tuple[set[str], dict[str, str]]:
    found = w.read_workspace(job)
    return set(found.files) - {w.IGNORE_FILE}, {left.path: left.why for left in found.left_out}


def test_folders_of_earlier_jobs_are_left_out_and_named(job: Path) -> None:
    write(job, "log/workerlog.0", "output/model", "a/log/data", "a/output/data", "got/.clustertool-logs", "got/x.py")
    (job / "sub").mkdir()
    assert sent_and_left(job) == (
        {"a/log/data", "a/output/data"},
        {"log/": "logs of jobs", "output/": "results of jobs", "got/": "logs of jobs"},
    )


@pytest.mark.parametrize("code", ["__init__.py", "space.py"])
@pytest.mark.parametrize("name", ["log", "output"])
def test_a_package_with_the_name_of_a_folder_of_jobs_is_sent_without_logs(job: Path, name: str, code: str) -> None:
    inside = {f"{name}/{code}", f"{name}/data.json", f"{name}/deep/train.log"}
    write(job, *inside, f"{name}/workerlog.0", f"{name}/attempt1/workerlog.0", f"{name}/train.log")
    (job / name / "endpoints.log").symlink_to("../JOB20260102-030405-abcd/log/endpoints.log")
    logs = ("workerlog.0", "attempt1/", "train.log", "endpoints.log")
    assert sent_and_left(job) == (inside, {f"{name}/{log}": "logs of jobs" for log in logs})


def test_a_package_to_which_log_dir_has_written_is_sent(job: Path) -> None:
    write(job, "src/log/__init__.py", "src/log/.clustertool-logs", "src/log/workerlog.1")
    left = {"src/log/.clustertool-logs": "the tool's own", "src/log/workerlog.1": "logs of jobs"}
    assert sent_and_left(job) == ({"src/log/__init__.py"}, left)


def test_what_git_tracks_in_log_and_output_is_sent(job: Path) -> None:
    write(job, "log/sub/config.yaml", "log/sub/old", "output/.gitkeep", "output/model")
    for command in (["init", "-q"], ["add", "log/sub/config.yaml", "output/.gitkeep"]):
        subprocess.run(["git", *command], cwd=job, check=True)
    sent, left = sent_and_left(job)
    assert sent == {"log/sub/config.yaml", "output/.gitkeep"}
    assert left == {".git/": "version control", "log/sub/old": "logs of jobs", "output/model": "results of jobs"}


@pytest.mark.parametrize("folder", ["log", "output", "got"])
@pytest.mark.parametrize(
    ("line", "sent"),
    [("!{}/", {"a", "b/c"}), ("!{}", {"a", "b/c"}), ("!/{}/**", {"a", "b/c"}), ("!{}/a", {"a"}), ("!{}/b/*", {"b/c"})],
)
def test_a_line_of_clusterignore_takes_folders_of_jobs(job: Path, folder: str, line: str, sent: set[str]) -> None:
    write(job, f"{folder}/a", f"{folder}/b/c")
    if folder == "got":
        (job / "got/.clustertool-logs").touch()
    (job / w.IGNORE_FILE).write_text(line.format(folder) + "\n")
    assert sent_and_left(job)[0] == {f"{folder}/{name}" for name in sent}


@pytest.mark.parametrize(
    ("path", "kind", "output"),
    [("log", "file", "output"), ("log", "link", "output"), ("output", "file", "output"), ("a", "file", "a/b")],
)
def test_a_file_in_the_place_of_a_folder_of_the_job_is_named(path: str, kind: str, output: str, job: Path) -> None:
    found = w.Workspace(job, (manifest.Entry(path, kind, 0o644, 0, ""),))
    with pytest.raises(DataError, match=f"'{path}' of the workspace is in the place of the job's folder") as caught:
        require_names(found, output)
    assert ".clusterignore" in caught.value.fix
    require_names(w.Workspace(job, (manifest.Entry(f"{path}x", kind, 0o644, 0, ""),)), output)


def test_a_byte_order_mark_and_windows_line_ends_in_our_files(job: Path) -> None:
    write(job, "big", "other")
    (job / w.IGNORE_FILE).write_bytes(b"\xef\xbb\xbfbig\r\nother\r\n")
    (job / "job.toml").write_bytes(b'\xef\xbb\xbfname = "x"\r\n')
    assert set(w.read_workspace(job).files) == {w.IGNORE_FILE, "job.toml"}
    assert workspace_toml(job) == {"name": "x"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (b"#!/bin/sh\r\necho\r\n", "first line has a Windows line end"),
        (b"\xef\xbb\xbf#!/bin/sh\necho\n", "a byte order mark"),
        (b"#!/bin/sh\necho\r\n", ""),
        (b"\x7fELF\r\n", ""),
        (b"", ""),
    ],
)
def test_a_script_whose_interpreter_the_kernel_does_not_find(job: Path, text: bytes, wrong: str) -> None:
    (job / "run.sh").write_bytes(text)
    found = w.read_workspace(job)
    require_first_lines(found, [["bash", "run.sh"], ["/bin/run.sh"], ["run.sh"]])
    with pytest.raises(DataError, match=f"run.sh cannot be started: .*{wrong}") if wrong else nullcontext():
        require_first_lines(found, [["./run.sh", "a"]])


def test_sockets_and_pipes_are_left_out_and_named(job: Path) -> None:
    os.mkfifo(job / "pipe")
    write(job, "a", "__pycache__/a")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(job / "sock"))
        assert sent_and_left(job) == ({"a"}, {"pipe": "pipe", "sock": "socket", "__pycache__/": "compiled code"})
    caller = Lines()
    workspace(caller, job)  # type: ignore[arg-type]
    assert caller.lines[0].startswith("left out: pipe (pipe, 0 B), sock (socket, 0 B), __pycache__/ ")


@pytest.fixture
def of_user(job: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace of an ordinary user, as whom the test runs: root reads everything."""
    folder = Path(tempfile.mkdtemp())
    try:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            os.seteuid(65534)
        (folder / "job").mkdir()
        yield folder / "job"
    finally:
        os.seteuid(os.getuid())
        for path in (folder / "job", *(folder / "job").rglob("*")):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


def test_all_that_cannot_be_read_is_in_one_list(of_user: Path) -> None:
    write(of_user, "a", "b", "closed/x", "names/x", "in/deep/closed/x", "skipped/x", "venv/pyvenv.cfg", "log/x", "good")
    for path, mode in (("a", 0), ("b", 0), ("closed", 0), ("names", 0o400), ("in/deep/closed", 0o100), ("log", 0)):
        (of_user / path).chmod(mode)
    (of_user / "skipped").chmod(0)
    (of_user / w.IGNORE_FILE).write_text("skipped\n")
    with pytest.raises(DataError) as caught:
        w.read_workspace(of_user)
    paths = ("a", "b", "closed/", "in/deep/closed/", "names/")
    assert caught.value.what == "; ".join(f"{path!r} cannot be read: Permission denied" for path in paths)
    assert caught.value.fix == "give rights, or name it in .clusterignore"
    (of_user / w.IGNORE_FILE).write_text("skipped\n/a\nb\nclosed\nnames\n")
    assert set(w.read_workspace(of_user).files) == {"good", w.IGNORE_FILE}


def test_a_clusterignore_and_a_workspace_that_cannot_be_read(of_user: Path) -> None:
    write(of_user, "a", w.IGNORE_FILE)
    (of_user / w.IGNORE_FILE).chmod(0)
    with pytest.raises(DataError, match="'.clusterignore' cannot be read: Permission denied"):
        w.read_workspace(of_user)
    (of_user / w.IGNORE_FILE).chmod(0o600)
    write(of_user, "sub/.gitignore")
    (of_user / "sub/.gitignore").chmod(0)
    with pytest.raises(DataError, match="^'sub/.gitignore' cannot be read: Permission denied\n"):
        w.read_workspace(of_user, [".gitignore"])
    (of_user / w.IGNORE_FILE).chmod(0)
    for mode in (0, 0o400, 0o100):
        of_user.chmod(mode)
        with pytest.raises(DataError, match=f"'{of_user}' cannot be read: Permission denied|'.clusterignore' cannot"):
            w.read_workspace(of_user)
    of_user.chmod(0)
    with pytest.raises(DataError, match="job.toml cannot be read: Permission denied"):
        workspace_toml(of_user)
    of_user.chmod(0o700)
    of_user.parent.chmod(0)
    with pytest.raises(DataError, match="job.toml cannot be read: Permission denied"):
        workspace_toml(of_user)
    of_user.parent.chmod(0o700)


def test_a_tree_that_is_too_deep_is_named_and_may_be_excluded(job: Path) -> None:
    made, name = os.getcwd(), "d" * 250
    try:
        (job / "a").mkdir()
        os.chdir(job / "a")
        for _ in range(20):
            os.mkdir(name)
            os.chdir(name)
    finally:
        os.chdir(made)
    with pytest.raises(DataError, match=r"^'a/ddd.{190,200}' cannot be read: File name too long"):
        w.read_workspace(job)
    (job / w.IGNORE_FILE).write_text("a/\n")
    assert set(w.read_workspace(job).files) == {w.IGNORE_FILE}


def test_what_vanishes_is_left_out(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder before it is listed, a file before it is read."""
    write(job, "gone/x", "a", "b", "big")
    (job / "link").symlink_to("a")
    scan, real = os.scandir, os.open

    def scandir(path: bytes) -> object:
        if path.endswith(b"gone/"):
            os.unlink(path + b"x")
            os.rmdir(path)
        return scan(path)

    def opened(path: bytes, *flags: int) -> int:
        if os.fspath(path).endswith(b"/b"):
            os.unlink(path)
        return real(path, *flags)

    monkeypatch.setattr(w.os, "scandir", scandir)
    monkeypatch.setattr(w.os, "open", opened)
    found = w.read_workspace(job)
    assert {entry.path for entry in found.entries} == {"a", "big", "link"}
    assert {left.path: left.why for left in found.left_out} == dict.fromkeys(("gone/", "b"), w.VANISHED)
    monkeypatch.undo()
    assert restore(Shipment(found, {})) == {"a": b"a", "big": b"big"}


@pytest.mark.parametrize("size", [10, 100_000, 3 << 20])
def test_a_file_that_grows_is_sent_as_it_was(job: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is read, and afterwards. Its digest is not remembered."""
    monkeypatch.setattr("clustertool.fleet.dispatch.cache._FRESH", 0.0)
    first = os.urandom(size)
    (job / "events").write_bytes(first)
    real = w.read_exactly

    def read(fd: int, size: int, at: int) -> bytes:
        data = real(fd, size, at)
        with (job / "events").open("ab") as file:
            file.write(b"more")
        return data

    monkeypatch.setattr(w, "read_exactly", read)
    found = w.read_workspace(job)
    caller = Lines()
    workspace(caller, job)  # type: ignore[arg-type]
    assert caller.lines == ["written to while it was read: events; sent is what was there at first"]
    monkeypatch.setattr(w, "read_exactly", real)
    assert (found.size, found.grown) == (size, ("events",))
    with (job / "events").open("ab") as file:
        file.write(b"more")
    assert restore(Shipment(found, {})) == {"events": first}
    _saved(job, 0)


def test_a_file_that_is_replaced_before_it_is_read_is_sent_as_a_whole(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As editors save it."""
    write(job, "a")
    real = os.open

    def opened(path: bytes, *flags: int) -> int:
        (job / "new").write_text("longer than it was")
        (job / "new").rename(job / "a")
        return real(path, *flags)

    monkeypatch.setattr(w.os, "open", opened)
    found = w.read_workspace(job)
    monkeypatch.undo()
    assert restore(Shipment(found, {})) == {"a": b"longer than it was"} and not found.grown


def test_the_release_does_not_hang_on_times_but_on_content_and_modes(job: Path) -> None:
    (job / "a").write_text("1")
    first = w.read_workspace(job).release
    old(job / "a")
    assert w.read_workspace(job).release == first
    (job / "a").chmod(0o755)
    second = w.read_workspace(job).release
    (job / "a").write_text("2")
    assert len({first, second, w.read_workspace(job).release}) == 3


def test_only_files_with_another_status_are_read_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (job / name).write_text(name)
        old(job / name)
    monkeypatch.setattr("clustertool.fleet.dispatch.cache._FRESH", 0.0)  # ctime cannot be set
    first = w.read_workspace(job)
    _saved(job, 3)
    (job / "b").write_text("B")
    second = w.read_workspace(job)
    assert set(first.read) == {"a", "b", "c"} and set(second.read) == {"b"}
    assert second.release != first.release
    assert restore(Shipment(second, {})) == {"a": b"a", "b": b"B", "c": b"c"}


def _saved(job: Path, count: int) -> None:
    import threading

    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(10)
    assert len(WorkspaceCache(job).digests()) == count


def test_a_file_that_was_just_written_is_never_taken_from_memory(job: Path) -> None:
    """Within one tick of the clock it may change again without a trace."""
    (job / "a").write_text("1")
    w.read_workspace(job)
    _saved(job, 0)


def test_damaged_memory_is_no_memory(job: Path) -> None:
    (job / "a").write_text("1")
    first = w.read_workspace(job)
    Shipment(first, {})
    for path in WorkspaceCache(job)._dir.iterdir():
        path.write_bytes(b"[[[")
    assert w.read_workspace(job).release == first.release
    assert restore(Shipment(w.read_workspace(job), {}, (first.release,))) == {"a": b"1"}


def test_a_file_that_changes_while_it_is_sent_is_named(job: Path) -> None:
    (job / "same").write_bytes(b"s" * 300_000)
    (job / "big").write_bytes(os.urandom(2 << 20))
    shipment = Shipment(w.read_workspace(job), {})
    (job / "big").write_bytes(os.urandom(2 << 20))
    changed = 0
    for number, piece in enumerate(shipment.pieces):
        try:
            assert number == 0 or manifest.name_of(shipment.read(number)) == piece.name
        except DispatchError as error:
            assert "'big' changed while it was sent" in error.what
            changed += 1
    assert changed == 2


@pytest.mark.parametrize("now", [b"y" * 5000, b"y" * 6000, b"y" * 100], ids=["other", "longer", "shorter"])
def test_a_small_file_that_changes_after_it_was_read_is_named(
    job: Path, now: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is known from last time, its bytes are read when packs are made: they must be the same."""
    for name in "abc":
        (job / name).write_bytes(name.encode() * 5000)
        old(job / name)
    monkeypatch.setattr("clustertool.fleet.dispatch.cache._FRESH", 0.0)
    w.read_workspace(job)
    _saved(job, 3)
    found = w.read_workspace(job)
    assert not found.read
    (job / "b").write_bytes(now)
    with pytest.raises(DispatchError, match="'b' changed while it was sent"):
        Shipment(found, {})


@pytest.mark.parametrize("texts", [("oneA", "oneB"), ("x", "")], ids=["rewritten", "shorter"])
def test_a_file_that_changes_while_it_is_read_is_named(
    job: Path, texts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(job, "b")
    (job / "a").write_text("one")
    contents = iter(texts * 9)

    def read(fd: int, size: int, at: int) -> bytes:
        (job / "a").write_text(next(contents)[::-1])
        return os.pread(fd, size, at)

    monkeypatch.setattr(w, "read_exactly", read)
    with pytest.raises(DataError, match="'a' changes while it is read") as caught:
        w.read_workspace(job)
    assert caught.value.fix == "try again when nothing writes it, or name it in .clusterignore"


def test_the_packs_of_the_last_release_are_used_again_where_all_have_it(job: Path) -> None:
    for number in range(60):
        (job / f"f{number}").write_bytes(os.urandom(20_000))
    before = w.read_workspace(job)
    first = Shipment(before, {}, (), ("a:/root", "b:/root"))
    (job / "f7").write_text("new")
    after = w.read_workspace(job)
    delta = Shipment(after, {}, (before.release,), ("b:/root",))
    new = {piece.name for piece in delta.pieces[1:]} - {piece.name for piece in first.pieces[1:]}
    assert [delta.read(at) for at, piece in enumerate(delta.pieces) if piece.name in new] == [b"new"]
    assert restore(Shipment(after, {})) == {f"f{n}": (job / f"f{n}").read_bytes() for n in range(60)}, (
        "a new node: all anew"
    )


def test_a_node_that_has_a_release_in_other_packs_gets_what_can_be_read(job: Path) -> None:
    """B has the release in packs with a file that is no more; A got it in others, and so did a bundle, and another folder."""
    b, a = ("b:/root",), ("a:/root",)
    for number in range(5):
        (job / f"f{number}").write_bytes(os.urandom(2_000))
    have: tuple[str, ...] = ()
    for step in range(12):
        (job / "f3").write_text(str(step))
        found = w.read_workspace(job)
        if step % 4 == 2:
            Shipment(found, {}, (), a)
        elif step % 4 == 3:
            Shipment(found, {})
        else:
            ship = Shipment(found, {}, have, b)
            new = [at for at, piece in enumerate(ship.pieces) if at and "f3" in {p[0] for p in ship._parts[piece.name]}]
            assert new and all(ship.read(at) for at in new)
            if step % 4 == 0:
                assert restore(ship) == {f"f{n}": (job / f"f{n}").read_bytes() for n in range(5)}
        have = (found.release,)


def test_rarely_intended_settings_are_reported(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w, "_LARGE", 1000)
    for name in ("checkpoints/1/a", "checkpoints/2/b", "model.pt", "data.bin", "small.pt", "sub/wandb/x"):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_bytes(b"x" * (10 if name.startswith("small") else 800 if "/" in name else 2000))
    assert w.accidents(w.read_workspace(job)) == [("model.pt", 2000), ("checkpoints/", 1600)]


def test_what_comes_from_memory_is_read_in_one_thread_and_what_is_waited_for_side_by_side() -> None:
    """Threads that do not wait only fight over the interpreter: 20,000 files took twice as long with four of them."""
    here = threading.get_ident()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):  # on a busy machine it may seem as if one was waited for
            crew = w._Readers(pool)
            if set(crew.each(lambda _: threading.get_ident(), range(1000))) == {here}:
                break
        else:
            raise AssertionError("never in this thread alone")
        waiting: list[int] = []
        most = 0

        def wait(number: int) -> tuple[int, int]:
            nonlocal most
            waiting.append(number)
            most = max(most, len(waiting))
            time.sleep(0.1)
            waiting.remove(number)
            return number, threading.get_ident()

        found = list(crew.each(wait, range(9)))
        assert [number for number, _ in found] == list(range(9))
        assert most > 1, "they wait one after another"
        assert here not in {owner for _, owner in found[1:]}
        assert here not in set(crew.each(lambda _: threading.get_ident(), range(9))), "the next will have to wait, too"


def test_after_a_problem_no_large_file_is_read(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is certain: they are only opened, since one of them may be unreadable, too."""
    for number in range(40):
        (job / f"big{number}").write_bytes(bytes(w.SMALL + 1))
    (job / "tiny").write_bytes(b"1")
    real, read = w._read_pieces, []

    def pieces(fd: int, size: int) -> object:
        if size == 1:
            raise OSError(5, "Input/output error")
        read.append(size)
        return real(fd, size)

    monkeypatch.setattr(w, "_read_pieces", pieces)
    with pytest.raises(DataError, match="^'tiny' cannot be read: Input/output error"):
        w.read_workspace(job)
    assert read == []


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("import paddle.v2 as paddle", True),
        ("from paddle import v2", True),
        ("port = os.environ['PADDLE_INIT_PORT']", True),
        ("os.getenv('PADDLE_INIT_PORTS_NUM')", False),
        ("import paddle", False),
    ],
)
def test_a_program_that_connects_to_all_pservers_at_one_port(job: Path, text: str, one: bool) -> None:
    """As Paddle v2 does; also a module of the program, but no notes about it."""
    (job / "train.py").write_text("import lib.start")
    (job / "notes.txt").write_text("PADDLE_INIT_PORT")
    (job / "lib").mkdir()
    (job / "lib/start.py").write_text(f"import os\n{text}\n")
    assert uses_one_port(w.read_workspace(job)) is one


def test_a_program_that_cannot_be_read_is_left_to_the_dispatch(job: Path) -> None:
    (job / "train.py").write_text("import paddle.v2")
    found = w.read_workspace(job)
    (job / "train.py").unlink()
    (job / "train.py").symlink_to("/proc/self/mem")  # a file whose first byte root cannot read either
    assert not uses_one_port(found)
