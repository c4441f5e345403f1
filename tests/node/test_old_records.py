"""Records of jobs that version 0.1.0 made on two nodes stay readable: `jobs`, `status` and `report` say of them what that did.

tests/data/records-0.1.0 has the files of those nodes, as that version wrote them, and in expected/ its answers.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertool.actions import read_status
from clustertool.actions.find_jobs import merge_answers
from clustertool.model.job.state_names import JobState, RankState, StopState
from clustertool.model.wire.answers import check_answer
from clustertool.model.wire.messages import REQUESTS
from clustertool.node.system.node_context import NodeContext
from clustertool.watch.report_model import build_report_model

DATA = Path(__file__).resolve().parents[1] / "data" / "records-0.1.0"
ENDED = ["succeeded", "failed", "restarted", "stopped", "servers"]
OF_FILES = {"output"}  # the time at which a log was written; a copy has another one
OF_NOW = {"since", "lost"}  # of ranks and nodes that are lost: a copy has no fifo, whose time is the last heartbeat


@pytest.fixture
def nodes(tmp_path: Path) -> list[NodeContext]:
    """The questions that the two nodes answer, now on this machine."""
    found = []
    for node in range(2):
        root = tmp_path / f"node{node}"
        shutil.copytree(DATA / f"node{node}", root)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)
            if path.suffix in (".json", ".jsonl"):
                path.write_text(path.read_text().replace('"recorded-host"', json.dumps(os.uname().nodename)))
        found.append(NodeContext(str(root), f"root@127.0.0.{node + 1}:28023"))
    return found


def ask(nodes: list[NodeContext], question: str, **fields: Any) -> dict[int, Any]:
    """The answers as they come over the wire."""
    found = {}
    module, _, name = REQUESTS[question].handler.partition(":")
    handle = getattr(importlib.import_module(f"clustertool.node.{module}"), name)
    for index, node in enumerate(nodes):
        found[index] = json.loads(json.dumps(handle(node, fields)))
        check_answer(REQUESTS[question], found[index])
    return found


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: without(one, names) for name, one in value.items() if name not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def expected(name: str) -> Any:
    return json.loads((DATA / "expected" / f"{name}.json").read_text())


@pytest.mark.parametrize("job", [*ENDED, "lost"])
def test_status_is_what_it_was(nodes: list[NodeContext], job: str) -> None:
    volatile = OF_FILES | (OF_NOW if job == "lost" else set())
    found = json.loads(json.dumps(read_status.as_dict(ask(nodes, "status", job=job))))
    before = without(expected(f"status-{job}"), volatile)
    assert known_then(without(found, volatile), before) == before


def known_then(found: Any, before: Any) -> Any:
    """Leave out what later versions have added to an answer."""
    if isinstance(found, dict) and isinstance(before, dict):
        return {name: known_then(value, before[name]) for name, value in found.items() if name in before}
    if isinstance(found, list) and isinstance(before, list):
        return [*map(known_then, found, before), *found[len(before) :]]
    return found


def test_jobs_are_what_they_were_but_for_the_placed_one(nodes: list[NodeContext]) -> None:
    found = {job["id"]: job for job in merge_answers(ask(nodes, "jobs", job=""))}
    before = {job["id"]: job for job in expected("jobs")["jobs"]}
    assert list(found) == list(before)
    assert before["placed"]["state"] == "lost"
    assert found["placed"]["state"] is JobState.STARTING
    for name, job in before.items():
        if name != "placed":
            assert {key: found[name][key] for key in job} == job


@pytest.mark.parametrize("job", [*ENDED, "lost", "placed"])
def test_jobs_and_status_show_the_same_state_and_times(nodes: list[NodeContext], job: str) -> None:
    (listed,) = merge_answers(ask(nodes, "jobs", job=job, exact=True))
    shown = read_status.as_dict(ask(nodes, "status", job=job))
    assert shown["state"] is listed["state"]
    assert (listed["started"], listed["ended"]) == pytest.approx((shown["started"], shown["ended"]), abs=0.01)
    assert (listed["started"] is None, listed["ended"] is None) == (job == "placed", job not in ENDED)
    assert bool(shown["waits"]) == (job == "placed")


def test_a_job_that_never_started_has_its_name_and_ranks(nodes: list[NodeContext]) -> None:
    shown = read_status.as_dict(ask(nodes, "status", job="placed"))
    assert (shown["job"], shown["mode"], shown["command"]) == ("placed", "collective", "python3 -u train.py")
    assert [(p["rank"], p["node"], p["state"]) for p in shown["processes"]] == [(0, 0, "waiting"), (1, 1, "waiting")]


def test_a_report_has_the_spans_of_all_attempts(nodes: list[NodeContext]) -> None:
    answers = ask(nodes, "report", job="restarted", points=40)
    story = build_report_model(read_status.read(answers), answers, str)
    assert (story.state, story.attempts) == (JobState.SUCCEEDED, 2)
    spans = {rank.rank: [(span.attempt, span.state) for span in rank.spans] for rank in story.ranks}
    assert spans == {
        0: [(0, RankState.STOPPED), (1, RankState.DONE)],
        1: [(0, RankState.FAILED), (1, RankState.DONE)],
    }
    assert all(a.end <= b.start for rank in story.ranks for a, b in zip(rank.spans, rank.spans[1:]))
    assert all(0 < rank.usage.cpu < 10 and rank.usage.memory > 1e6 for rank in story.ranks)


@pytest.mark.parametrize("job, state", [("failed", StopState.ENDED_ALREADY), ("lost", StopState.ENDED_ALREADY)])
def test_a_stop_finds_nothing(nodes: list[NodeContext], job: str, state: StopState) -> None:
    answers = ask(nodes, "stop", job=job, exact=True, by="inv stop", code=143, grace=0.0, force=True)
    assert {answer["jobs"][job]["state"] for answer in answers.values()} == {state}
