"""Dumps of torch's flight recorder are kept only if they are plain data, and torchfrtrace compares them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.errors import NotFound
from clustertool.fleet import flight_dumps
from clustertool.fleet.transfer.receive import FolderEntry

PLAIN = {
    "version": "2.10",
    "entries": [{"frames": [], "state": "scheduled", "retired": True, "pg": ("0", "default_pg")}],
}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


def gather(monkeypatch: pytest.MonkeyPatch, to: Path, files: dict[str, bytes]) -> tuple[list[str], dict[int, Any]]:
    """Gather from two nodes: the first has these files, the second none."""

    class Folder:
        def __init__(self, fleet: Any, node: int, path: str) -> None:
            assert path == "/home/ann/JOB1/.clustertool/flight"
            self.node = node

        def entries(self) -> list[FolderEntry]:
            if self.node:
                raise NotFound("no such folder", "none", "node1")
            return [FolderEntry(name, "file", False, 0, len(data), "", 0) for name, data in files.items()]

        def receive(self, target: Path, check: Any, only: list[FolderEntry]) -> None:
            for entry in only:
                (target / entry.path).write_bytes(files[entry.path])

    monkeypatch.setattr(flight_dumps, "NodeFolder", Folder)
    answers = dict.fromkeys((0, 1), {"dir": "/home/ann/JOB1"})
    fleet: Any = SimpleNamespace(ask_all=lambda request: answers, failed={})
    return [path.name for path in flight_dumps.gather_dumps(fleet, lambda: None, "1", to)], fleet.failed


def test_only_dumps_with_plain_data_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = pickle.dumps(PLAIN, 2)
    bad = {"rank-2": pickle.dumps(Evil()), "rank-3": good[:-9], "rank-4": b"", "other": good, "rank-x": good}
    found, failed = gather(monkeypatch, tmp_path, {"rank-0": good, "rank-1": pickle.dumps(PLAIN, 4), **bad})
    assert found == ["rank-0", "rank-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == found
    assert list(failed) == [1]


def test_files_of_the_user_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rank-notes.txt").write_text("mine")
    assert gather(monkeypatch, tmp_path, {"rank-0": pickle.dumps(PLAIN, 2)})[0] == ["rank-0"]
    assert (tmp_path / "rank-notes.txt").read_text() == "mine"


def test_without_a_dump_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no rank of job 1 has a dump"):
        gather(monkeypatch, tmp_path, {})


def test_what_torchfrtrace_prints_is_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It sees the dumps and no other file."""
    tool, dump = tmp_path / "torchfrtrace", tmp_path / "rank-0"
    dump.write_bytes(pickle.dumps(PLAIN, 2))
    (tmp_path / "rank-1").write_bytes(pickle.dumps(Evil()))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.executable", str(tmp_path / "elsewhere/python3"))
    assert flight_dumps.compare_dumps([dump]) == ""
    tool.write_text(
        '#!/bin/sh\necho "$1 $2 $3"; ls "$4"; cmp "$4/rank-0" "$COPY" && echo equal\necho trouble >&2\nexit 1\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("COPY", str(dump))
    shown = flight_dumps.compare_dumps([dump])
    assert shown == "--allow-incomplete-ranks --prefix rank-\nrank-0\nequal\ntrouble"
