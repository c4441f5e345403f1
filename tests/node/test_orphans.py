"""The records of a job are removed while it runs: the job ends, and what no supervisor ends any more is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.node import programs as p
from tests.node.harness import Bench, Job, until


def remove_records(job: Job, node: int) -> None:
    """As a program does that cleans up around it."""
    shutil.rmtree(job.dir(node) / ".clustertool")
    for entry in Path(job.nodes[node].root, ".clustertool/jobs").iterdir():
        entry.unlink()


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("what", ["directory", "records"])
def test_a_supervisor_without_records_ends_the_job_on_all_nodes(bench: Bench, node: int, what: str) -> None:
    job = bench.run(bench.nodes(2), p.PLAIN).ready()
    frames = job.follow(node)
    other = 1 - node
    if what == "directory":
        shutil.rmtree(job.dir(node))
    else:
        remove_records(job, node)
    outcome = job.ended(other)
    assert (outcome["state"], outcome["code"]) == ("lost", 75)
    verb, name = "was" if what == "directory" else "were", job.nodes[node].host.name
    assert outcome["reason"] == f"the {what} of the job {verb} removed on {name}"
    job.gone()
    assert job.dir(node).exists() == (what == "records")
    until(lambda: frames.ended, "the follower has read all")
    assert [event["reason"] for event in frames.events if event["type"] == "ended"] == [outcome["reason"]]
