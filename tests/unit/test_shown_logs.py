"""A folder on a node shows the logs of the newest job, as on the laptop (test_local_logs.py): links of ours, nothing old."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.storage import shown_logs


def placed(root: Path, job: str, node: int, *, shared: bool = False, log_dir: str = "log") -> Any:
    """The spec of a node whose job has its log folder, with one trainer that has the number of the node."""
    base = root / ".clustertool" / (f"node{node}" if shared else "")
    logs = base / f"JOB{job}/log"
    logs.mkdir(parents=True)
    (logs / "endpoints.log").write_text(job)
    (logs / f"workerlog.{node}").write_text(job)
    return {
        "job": job,
        "root": str(root / ".clustertool"),
        "job_dir": str(logs.parent),
        "work_dir": str(root),
        "log_dir": log_dir,
        "header": {"nodes": ["node0", "node1"]},
        "processes": [{"role": "trainer", "log": f"log/workerlog.{node}"}],
    }


def show(spec: Any) -> Path:
    folder = Path(os.path.normpath(os.path.join(spec["work_dir"], spec["log_dir"])))
    shown_logs.show(spec)
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.exists()}


def test_logs_of_another_launcher_make_room(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for name in ("workerlog.0", "workerlog.7", "mine.txt"):
        (log / name).write_text("old")
    (log / "train.log").symlink_to("/nowhere")
    assert show(placed(tmp_path, "A", 0)) == log
    kept = {"workerlog.0.old": "old", "workerlog.7.old": "old", "mine.txt": "old"}
    assert (log / "train.log.old").is_symlink()
    (log / "train.log.old").unlink()
    assert texts(log) == {**kept, "workerlog.0": "A", "endpoints.log": "A"}
    show(placed(tmp_path, "B", 1))
    assert texts(log) == {**kept, "workerlog.1": "B", "endpoints.log": "B"}, "no log of job A is shown for one of B"


def test_a_link_is_replaced_by_that_of_the_newest_job(tmp_path: Path) -> None:
    for job in ("A", "B"):
        assert texts(show(placed(tmp_path, job, 0))) == {"workerlog.0": job, "endpoints.log": job}
    assert (tmp_path / "log").is_symlink()


@pytest.mark.parametrize("outside", [False, True])
def test_nodes_that_share_the_folder_show_the_logs_of_each_other(tmp_path: Path, outside: bool) -> None:
    """In a shared folder with its ROOT_DIR, or in any folder by an absolute path."""
    given: Any = {"log_dir": str(tmp_path / "all")} if outside else {"shared": True}
    roots = [tmp_path / f"machine{node}" if outside else tmp_path for node in (0, 1)]
    for job in ("A", "B"):
        specs = [placed(roots[node], job, node, **given) for node in (0, 1)]
        folders = [show(spec) for spec in (*specs, specs[0])]
        assert texts(folders[0]) == {"workerlog.0": job, "workerlog.1": job, "endpoints.log": job}


def test_a_link_of_another_node_that_comes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, spec = tmp_path / "log", placed(tmp_path, "A", 1, shared=True)
    log.mkdir()
    (log / "workerlog.1").write_text("old")
    really = os.rename

    def late(old: str, new: str) -> None:
        monkeypatch.setattr(os, "rename", really)
        show(spec)
        really(old, new)

    monkeypatch.setattr(os, "rename", late)
    shown_logs.clear(str(log), "A")
    assert texts(log) == {"workerlog.1": "A", "workerlog.1.old": "old", "endpoints.log": "A"}
