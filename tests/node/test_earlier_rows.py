"""What a node lists of earlier jobs. Programs of a job may change its records; these never lead out of its directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clustertool.model.wire.agent_requests import EarlierWanted
from clustertool.node.jobs.records import find
from clustertool.node.probe import run_probe
from clustertool.node.system.node_context import NodeContext

ENTRY = "ann@10.0.0.1:22"
ENDED = {"t": 2, "type": "ended", "state": "succeeded", "code": 0, "source": "job", "reason": "done"}


def leave(root: Path, job: str, **header: object) -> Path:
    """The records of a job that has ended, with an output."""
    ours = root / f"JOB{job}/.clustertool"
    ours.mkdir(parents=True, mode=0o700)
    (ours / "marker").touch()
    first = {"t": 1, "type": "job", "id": job, "entry": ENTRY, "created": 1.0, "node": 0, "owner": "ann", **header}
    (ours / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (first, ENDED)))
    (root / f"JOB{job}/output").mkdir()
    (root / f"JOB{job}/output/model").touch()
    return root / f"JOB{job}"


def listed(root: Path, **asked: str) -> dict[str, bool]:
    """Job -> whether it has left an output."""
    wanted: EarlierWanted = {"asked": "", "name": "", "resume": "", "owner": "ann", "workspace": "", "keep": ()}
    wanted.update(asked)  # type: ignore[typeddict-item]
    rows = run_probe.list_earlier(NodeContext(str(root), ENTRY), wanted, [])
    return {row["id"]: row["output"] for row in rows}


def test_jobs_are_listed_by_id_name_and_workspace(tmp_path: Path) -> None:
    leave(tmp_path, "X", asked="X", job_name="X", workspace="/w")
    leave(tmp_path, "X-2", asked="X", job_name="X", workspace="/v")
    leave(tmp_path, "2026-a", job_name="bert", workspace="/w")
    leave(tmp_path, "2026-b", owner="bob", workspace="/w")
    assert set(listed(tmp_path, asked="X")) == {"X", "X-2"}
    assert set(listed(tmp_path, asked="2026")) == set()
    assert set(listed(tmp_path, name="bert")) == {"2026-a"}
    assert set(listed(tmp_path, workspace="/w")) == {"X", "2026-a"}, "of another user's laptop it is another workspace"
    assert set(listed(tmp_path, resume="2026")) == {"2026-a", "2026-b"}
    assert set(listed(tmp_path, resume="bert")) == {"2026-a"}
    assert listed(tmp_path) == {}


@pytest.mark.parametrize(
    "output", ["../../../etc", "/etc", "..", "", ".clustertool/../..", "a\0b", 7, ["output"], None]
)
def test_the_output_of_a_damaged_record_stays_in_the_jobs_directory(tmp_path: Path, output: object) -> None:
    job = leave(tmp_path, "X", output=output)
    (record,) = find(str(tmp_path), ENTRY, "host", "X", exact=True)
    assert record.output == str(job / "output")


def test_damaged_names_are_no_names(tmp_path: Path) -> None:
    leave(tmp_path, "X", asked=["X"], job_name={"a": 1}, workspace=7, owner="o" * 10_000)
    assert listed(tmp_path, asked="X", name="X", workspace="/w") == {"X": True}


def test_few_rows_are_sent(tmp_path: Path) -> None:
    for number in range(30):
        leave(tmp_path, f"J{number}", workspace="/w", created=float(number))
    assert list(listed(tmp_path, workspace="/w")) == [f"J{number}" for number in range(29, 9, -1)], "the newest ones"


def test_an_output_that_is_empty_is_none(tmp_path: Path) -> None:
    os.unlink(leave(tmp_path, "X", asked="X") / "output/model")
    assert listed(tmp_path, asked="X") == {"X": False}
