"""The start lock of a typed command, and the digest of a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clustertool.errors import UsageError
from clustertool.fleet.joining import typed_machine

HOLD = """
import sys
from clustertool.fleet.joining import typed_machine
lock = typed_machine.take_lock("the command", sys.argv[1])
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_second_start_names_the_process_of_the_first() -> None:
    key = f"test-{os.getpid()}"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, key], stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "holds\n"
        for _ in range(3):  # asking does not use it up
            with pytest.raises(UsageError) as caught:
                typed_machine.take_lock("the command", key)
            assert f"the command runs on this machine already: process {first.pid} (" in caught.value.what
            assert sys.executable in caught.value.what
            assert f"kill {first.pid}" in caught.value.fix
        other = typed_machine.take_lock("the command", key, "another job")
        assert other is not None
        other.close()
        first.communicate("")
    again = typed_machine.take_lock("the command", key)
    assert again is not None, "it ends with its process, and leaves nothing behind"
    again.close()


def test_a_name_that_another_user_has_taken_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"other-{os.getpid()}"
    taken = typed_machine.take_lock("the command", key)
    assert taken is not None
    real = typed_machine._holder
    monkeypatch.setattr(typed_machine, "_holder", lambda name: real(name)._replace(uid=os.getuid() + 1))
    with taken:
        assert typed_machine.take_lock("the command", key) is None


def test_a_name_that_never_listens_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not report the user of such a socket."""
    key = f"silent-{os.getpid()}"
    monkeypatch.setattr(typed_machine, "_PATIENCE", 0.1)
    monkeypatch.setattr(socket.socket, "listen", lambda self, backlog: None)
    silent = typed_machine.take_lock("the command", key)
    assert silent is not None
    with silent:
        assert typed_machine.take_lock("the command", key) is None


def test_the_digest_of_a_folder_covers_its_program(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "package/model.py").write_text("")
    first = typed_machine.folder_digest(tmp_path)
    for path in ("model.pt", "log/workerlog.0", "output/x.py", ".git/config", "package/__pycache__/m.py", "venv/a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("other")
        if path.startswith("venv"):
            (tmp_path / "venv/pyvenv.cfg").write_text("")
        assert typed_machine.folder_digest(tmp_path) == first, path
    for path, text in (("train.py", "print(2)\n"), ("conf/a.yaml", "lr: 1"), ("package/model.py", "x = 1")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        assert typed_machine.folder_digest(tmp_path) != first, path
        first = typed_machine.folder_digest(tmp_path)
    assert list(typed_machine.folder_files(tmp_path)) == ["model.pt", "train.py", "conf/a.yaml", "package/model.py"]


def test_a_folder_with_too_many_files_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_machine, "_MOST", 3)
    for number in range(4):
        (tmp_path / f"{number}.py").write_text("")
    assert typed_machine.folder_digest(tmp_path) == ""
