"""Which jobs may have written a folder: those whose path leads there, with their times on the clock of its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clustertool.node.jobs.writers import spans
from clustertool.node.system.node_context import NodeContext

ENTRY = "ann@10.0.0.1:22"


def leave(root: Path, job: str, work_dir: Path | None = None, ended: bool = True) -> Path:
    """The records of a job that has worked in `work_dir`, or in its own directory."""
    ours = root / f"JOB{job}/.clustertool"
    ours.mkdir(parents=True, mode=0o700)
    (ours / "marker").touch()
    folder = str(work_dir or ours.parent)
    events: list[dict[str, object]] = [
        {"t": 1, "type": "job", "id": job, "entry": ENTRY, "work_dir": folder, "created": 1.0}
    ]
    if ended:
        events.append({"t": 2, "type": "ended", "state": "succeeded", "code": 0, "source": "job", "reason": "done"})
    (ours / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return ours.parent


def found(root: Path, job: str, folder: Path, path: str = "output") -> dict[str, tuple[int, int | None]]:
    answer = spans(NodeContext(str(root), ENTRY), {"job": job, "dir": str(folder / path), "path": path})
    return {name: (start, end) for name, start, end in answer["spans"]}


def test_the_jobs_of_one_folder_by_the_times_of_their_records(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    for folder in (work, other):
        (folder / "output").mkdir(parents=True)
    jobs = {name: leave(work / ".clustertool", name, work) for name in ("a", "b")}
    leave(work / ".clustertool", "c", other)
    times = found(work / ".clustertool", "a", work)
    assert set(times) == {"a", "b"}
    for name, place in jobs.items():
        made = (place / ".clustertool/marker").stat().st_ctime_ns
        assert times[name] == (made, (place / ".clustertool/events.jsonl").stat().st_ctime_ns)


def test_a_shared_root_has_one_span_for_all_nodes_of_a_job(tmp_path: Path) -> None:
    root = tmp_path / ".clustertool"
    (tmp_path / "output").mkdir()
    leave(root, "a", tmp_path)
    for node in (0, 1):
        leave(root / f"node{node}", "b", tmp_path)
    times = found(root, "a", tmp_path)
    ends = [(root / f"node{node}/JOBb/.clustertool/events.jsonl").stat().st_ctime_ns for node in (0, 1)]
    assert times["b"][1] == max(ends)


@pytest.mark.parametrize(("name", "own"), [("JOBa", True), ("JOBa-node3", True), ("JOBa-b", False), ("results", False)])
def test_a_link_of_the_output(tmp_path: Path, name: str, own: bool) -> None:
    """To the folder of the job on a volume of pods, or to one that other jobs may have, too."""
    root, place = tmp_path / "root", leave(tmp_path / "root", "a")
    (tmp_path / "volume" / name).mkdir(parents=True)
    os.symlink(tmp_path / "volume" / name, place / "output")
    (leave(root, "b") / "output").symlink_to(tmp_path / "volume" / name)
    assert set(found(root, "a", place)) == (set() if own else {"a", "b"})


def test_the_own_directory_is_of_no_other_job(tmp_path: Path) -> None:
    place = leave(tmp_path / "root", "a")
    (place / "output").mkdir()
    assert found(tmp_path / "root", "a", place) == {}
