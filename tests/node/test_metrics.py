"""The numbers that ranks print: from their logs to the answers of nodes, and to METRICS_FILE of the coordinator's node."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from clustertool.model import shape
from clustertool.model.job.progress import Metrics, prometheus_text
from clustertool.model.wire.spec_types import Spec
from clustertool.node.storage import files
from clustertool.node.supervisor.node_monitor import RankMetrics, UsageRecorder, metrics_file
from tests.node.harness import Bench, Job, until

STEPS = "i=0; while :; do i=$((i+1)); echo step=$i/10000 loss=$RANK.5; sleep 0.05; done"


def written(path: Path) -> dict[str, float]:
    """The values in a file of metrics by name and labels; {} without the file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def rows(job: Job, node: int, **request: Any) -> list[tuple[int, int, Metrics]]:
    """(rank, attempt, numbers) of the answer of a node."""
    answer = job.nodes[node].ask("report", job=job.id, points=1000, **request)
    return [(rank, attempt, shape.read(Metrics, row)) for _, rank, attempt, _, row in answer["metrics"]]


def test_numbers_of_two_nodes(bench: Bench) -> None:
    file = bench.tmp / "{job}.prom"
    job = bench.run(bench.nodes(2, METRICS_FILE=str(file)), STEPS, per_node=2)
    place = bench.tmp / f"{job.id}.prom"
    names = [f'clustertool_loss{{job="{job.id}",role="trainer",rank="{rank}"}}' for rank in range(4)]
    until(lambda: all(name in written(place) for name in names), f"the losses of four ranks: {written(place)}", 30.0)
    assert [written(place)[name] for name in names] == [0.5, 1.5, 2.5, 3.5]
    assert place.stat().st_mode & 0o777 == 0o644
    until(lambda: len(rows(job, 1)) >= 4, "two records of two ranks")
    status = job.nodes[1].ask("status", job=job.id)
    newest = {rank: shape.read(Metrics, row) for _, rank, _, _, row in status["metrics"]}
    assert {rank: one.loss for rank, one in newest.items()} == {2: 2.5, 3: 3.5}
    assert all(one.total_steps == 10000 and one.percent and one.steps_per_second for one in newest.values())
    few = job.nodes[1].ask("report", job=job.id, points=1)["metrics"]
    assert sorted(rank for _, rank, *_ in few) == [2, 3]
    job.stop()
    job.gone()
    assert not place.exists(), "the numbers of a job that has ended are no present ones"
    assert [one.step for rank, _, one in rows(job, 0) if rank == 0][-1] == job.log(0).count(b"\n")


def test_numbers_of_attempts(bench: Bench) -> None:
    program = "echo step=$((5 + CLUSTERTOOL_ATTEMPT)) loss=nan; exit $((3 - 3 * CLUSTERTOOL_ATTEMPT))"
    job = bench.run(None, program, policy={"max_restarts": 1})
    job.ended()
    job.gone()
    assert [(attempt, one.step) for _, attempt, one in rows(job, 0)][-1] == (1, 6)


NUMBERS = {("trainer", 1): Metrics(step=3, loss=float("nan")), ("trainer", 0): Metrics(step=4, loss=float("inf"))}


def test_the_file_is_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    with files.closing(os.open(tmp_path, os.O_RDONLY)) as job:
        recorder = UsageRecorder(job, metrics=RankMetrics(job, "j", str(path)))
        recorder.write_metrics(NUMBERS)
        until(path.exists, "it is written")
        assert path.read_text() == prometheus_text("j", NUMBERS)
        path.unlink()
        recorder.write_metrics(NUMBERS)
        time.sleep(0.2)
        assert not path.exists(), "it is not written at each turn"
        path.touch()
        recorder.close()
    assert os.listdir(tmp_path) == []


def test_only_the_coordinator_writes(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"node": 0, "lead": {"node": 0}}
    assert metrics_file(cast(Spec, {**spec, "metrics_file": "/a.prom"})) == "/a.prom"
    assert metrics_file(cast(Spec, {**spec, "metrics_file": "/a.prom", "node": 1})) == ""
    assert metrics_file(cast(Spec, spec)) == ""
    with files.closing(os.open(tmp_path, os.O_RDONLY)) as job:
        recorder = UsageRecorder(job, metrics=RankMetrics(job, "j"))
        recorder.write_metrics(NUMBERS)
        recorder.close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = RankMetrics(-1, "j", str(tmp_path / "missing/a.prom"))
    for _ in range(3):
        metrics.write_file(NUMBERS)
    assert capfd.readouterr().err.count("cannot be written: No such file or directory") == 1


def test_the_format_of_prometheus() -> None:
    assert prometheus_text("j", NUMBERS) == (
        "# TYPE clustertool_step gauge\n"
        'clustertool_step{job="j",role="trainer",rank="0"} 4\n'
        'clustertool_step{job="j",role="trainer",rank="1"} 3\n'
        "# TYPE clustertool_loss gauge\n"
        'clustertool_loss{job="j",role="trainer",rank="0"} inf\n'
        'clustertool_loss{job="j",role="trainer",rank="1"} nan\n'
    )
