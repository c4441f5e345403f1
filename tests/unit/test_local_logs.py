"""Logs in a folder of this machine: what it shows is of the newest job, and nothing of the user's is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertool.errors import DataError
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.fleet.transfer import local_logs
from clustertool.fleet.transfer.local_logs import LocalLogs

NEW = "20260103-030405-newx"


def shown(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}


def test_pieces_of_two_attempts_in_any_order(tmp_path: Path) -> None:
    local_logs.prepare(tmp_path / "a" / "logs")
    logs = LocalLogs(NEW, tmp_path / "a" / "logs")
    logs.write("log/workerlog.0", 4, b"two\n")
    logs.write("log/workerlog.0", 0, b"one\n")
    logs.write("log/attempt1/workerlog.0", 0, b"again\n")
    assert shown(tmp_path / "a" / "logs") == {"workerlog.0": "one\ntwo\n"}
    assert shown(tmp_path / "a" / "logs" / "attempt1") == {"workerlog.0": "again\n"}
    assert (tmp_path / "a" / "logs" / "attempt1").is_symlink()
    assert not logs.failure and logs.written == {"log/workerlog.0", "log/attempt1/workerlog.0"}


def test_an_old_log_is_never_shown_for_the_new_one(tmp_path: Path) -> None:
    old = LocalLogs("20260102-030405-oldx", tmp_path)
    for name in ("workerlog.3", "mpirunlog.0", "mpidaemonlog.1"):
        old.write(f"log/{name}", 0, b"old")
    (tmp_path / "workerlog.0").write_text("of another launcher")
    (tmp_path / "workerlog.0.old").write_text("older")
    (tmp_path / "attempt1").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    local_logs.prepare(tmp_path)
    kept = {"workerlog.0.old": "older", "workerlog.0.old2": "of another launcher", "mine.txt": "mine"}
    assert shown(tmp_path) == kept
    assert (tmp_path / "attempt1.old").is_dir() and not (tmp_path / "attempt1").exists()
    assert (tmp_path / "JOB20260102-030405-oldx" / "workerlog.3").read_text() == "old"
    LocalLogs(NEW, tmp_path).write("log/workerlog.0", 0, b"new")
    assert shown(tmp_path) == {**kept, "workerlog.0": "new"}


def test_the_bytes_of_an_earlier_job_with_the_same_id_are_removed(tmp_path: Path) -> None:
    for text in (b"a long line of the first job", b"short"):
        local_logs.prepare(tmp_path)
        logs = LocalLogs("exp", tmp_path)
        logs.write("log/workerlog.0", 0, text[:3])
        logs.write("log/workerlog.0", 3, text[3:])
    assert (tmp_path / "JOBexp" / "workerlog.0").read_text() == "short"


def test_links_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/mnt/JOBDATA/set")
    local_logs.prepare(tmp_path)
    assert (tmp_path / "data").is_symlink()


def test_a_link_to_the_logs_of_a_job_on_this_machine_is_replaced(tmp_path: Path) -> None:
    """clusterrun without nodes makes log such a link. Its logs must not be written to."""
    records = tmp_path / ".clustertool" / "JOB20260102-030405-oldx" / "log"
    records.mkdir(parents=True)
    (records / "workerlog.0").write_text("old")
    (tmp_path / "log").symlink_to(records)
    local_logs.prepare(tmp_path / "log")
    LocalLogs(NEW, tmp_path / "log").write("log/workerlog.0", 0, b"new")
    assert (records / "workerlog.0").read_text() == "old"
    assert shown(tmp_path / "log") == {"workerlog.0": "new"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="logs cannot be written to"):
        local_logs.prepare(tmp_path / "file")
    logs = LocalLogs(NEW, tmp_path / "file")
    logs.write("log/workerlog.0", 0, b"x")
    assert logs.failure.endswith("Not a directory")


def test_logs_and_results_of_jobs_are_no_part_of_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    Path("train.py").touch()
    local_logs.prepare(Path("mine"))
    LocalLogs(NEW, Path("mine")).write("log/workerlog.0", 0, b"x")
    LocalLogs(NEW, None).write("log/workerlog.0", 0, b"x")
    assert Path(f"JOB{NEW}/log/workerlog.0").read_text() == "x"
    LocalLogs("exp", None).write("log/workerlog.0", 0, b"x")
    Path("JOBS").mkdir()
    found = read_workspace(tmp_path)
    assert [entry.path for entry in found.entries] == ["JOBS", "train.py"]
    assert {left.path: left.why for left in found.left_out} == {
        f"JOB{NEW}/": "results of a job",
        "JOBexp/": "results of a job",
        "mine/": "logs of jobs",
    }
