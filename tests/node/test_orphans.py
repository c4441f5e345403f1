"""The records of a job are removed while it runs: the job ends, and what no supervisor ends any more is found."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.jobs import remains
from clustertool.node.jobs.queries import OrphanRecord
from tests.node import programs as p
from tests.node.harness import Bench, Job, Node, kill, until

CLEAN = {"state": "clean", "survivors": []}


@pytest.fixture
def apart(bench: Bench) -> Iterator[Callable[..., list[Node]]]:
    """Nodes with mounts of their own: their orphans are none of commands that other tests run at the same time."""
    with subprocess.Popen(["unshare", "-m", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE) as inside:
        if not inside.stdout or not inside.stdout.readline():
            pytest.skip("needs root for a mount namespace")

        def make(count: int = 1) -> list[Node]:
            nodes = bench.nodes(count)
            for node in nodes:
                node.shell = ("nsenter", "-m", "-t", str(inside.pid), "/bin/sh")
            return nodes

        yield make
        bench.end()
        inside.kill()


def remove_directory(path: Path) -> None:
    """As `rm -rf` until nothing is left: the tool writes there at the same time."""
    until(lambda: shutil.rmtree(path, ignore_errors=True) or not path.exists(), "it is removed")


def remove_records(job: Job, node: int) -> None:
    """As a program does that cleans up around it."""
    remove_directory(job.dir(node) / ".clustertool")
    for entry in Path(job.nodes[node].root, ".clustertool/jobs").iterdir():
        entry.unlink()


@pytest.mark.parametrize(
    "what, node",
    [
        ("directory", 0),
        ("records", 1),
        pytest.param("directory", 1, marks=pytest.mark.chaos),
        pytest.param("records", 0, marks=pytest.mark.chaos),
    ],
)
def test_a_supervisor_without_records_ends_the_job_on_all_nodes(
    bench: Bench, apart: Callable[..., list[Node]], node: int, what: str
) -> None:
    job = bench.run(apart(2), p.PLAIN).ready()
    frames = job.follow(node)
    other = 1 - node
    if what == "directory":
        remove_directory(job.dir(node))
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


def kill_caretakers(job: Job, node: int = 0) -> None:
    """Both at once: neither sees the end of the other one."""
    keepers = [job.process(kind, node) for kind in ("supervisor", "guard")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for keeper in keepers:
            os.kill(keeper.pid, number)


def listed(node: Node) -> Any:
    return node.ask("jobs", job="")


def test_ranks_without_supervisor_and_guard_are_named_until_they_are_ended(bench: Bench) -> None:
    nodes = bench.nodes(1)
    job = bench.run(nodes, p.PLAIN, per_node=2).ready()
    assert listed(nodes[0])["jobs"][0]["left"] == []
    kill_caretakers(job)
    (found,) = until(lambda: [one for one in listed(nodes[0])["jobs"] if one["left"]], "they are listed")
    assert (found["state"], found["left"]) == ("lost", [["trainer", 0], ["trainer", 1]])
    ((name, count),) = nodes[0].probe(earlier=dict.fromkeys(("asked", "resume", "name", "owner", "workspace"), ""))[
        "leftovers"
    ]
    assert (name, count >= 2) == (job.id, True), "a new job is warned"
    assert job.stop() == CLEAN
    assert listed(nodes[0])["jobs"][0]["left"] == []


def test_ranks_that_wiped_their_environment_are_found_by_the_record(bench: Bench) -> None:
    nodes = bench.nodes(1)
    job = bench.run(nodes, p.ENV_WIPED).ready()
    reported = set(job.reported(count=1))
    until(lambda: job.seen() >= reported, "all are recorded")
    kill_caretakers(job)
    kill(job.rank())
    (found,) = until(lambda: [one for one in listed(nodes[0])["jobs"] if one["left"]], "it is listed")
    assert found["left"] == [["trainer", 0]]
    assert job.stop() == CLEAN


def test_processes_without_a_record_are_a_job_that_may_run(bench: Bench, apart: Callable[..., list[Node]]) -> None:
    """ROOT_DIR is gone: they are a job of this ROOT_DIR, and a line for the users of others."""
    nodes, others = apart(), apart()
    job = bench.run(nodes, p.SETSID, per_node=2).ready()
    assert (listed(nodes[0])["orphans"], listed(others[0])["orphans"]) == ([], [])
    kill_caretakers(job)
    remove_directory(nodes[0].root)
    (found,) = listed(nodes[0])["jobs"]
    assert (found["id"], found["state"], found["left"]) == (job.id, "unknown", [["trainer", 0], ["trainer", 1]])
    assert found["reason"].startswith(f"{job.dir()} was removed, and processes of the job run: ")
    foreign = listed(others[0])
    assert (foreign["jobs"], [place for place, _ in foreign["orphans"]]) == ([], [str(job.dir())])
    assert [what for _, _, what, _ in others[0].probe(job={})["problems"] if str(job.dir()) in what]
    stop = {"by": "test", "code": 143, "grace": 0.5, "force": False}
    assert others[0].ask("stop", job="", **stop)["jobs"] == {} and job.living()
    assert nodes[0].ask("stop", job="", **stop)["jobs"] == {job.id: CLEAN}
    assert not job.living()
    assert listed(nodes[0])["jobs"] == [] and not nodes[0].root.exists()


def test_a_frozen_supervisor_without_a_record_is_ended_too(bench: Bench, apart: Callable[..., list[Node]]) -> None:
    nodes = apart()
    job = bench.run(nodes, p.PLAIN).ready()
    for kind in ("supervisor", "guard"):
        kill(job.process(kind), signal.SIGSTOP)
    remove_directory(nodes[0].root)
    assert nodes[0].ask("stop", job="", by="test", code=143, grace=0.5, force=False)["jobs"] == {job.id: CLEAN}
    job.gone()


@pytest.mark.parametrize(
    "mark, output, rank, found",
    [
        ("x/0/1", "{}/JOBx/output", "3", [("x/0/1", [("trainer", 3)])]),
        ("x/0/2", "{}/JOBx/output", "²", [("x/0/2", [])]),
        ("x/0/3", "{}/JOBx/output", "9" * 5000, [("x/0/3", [])]),
        ("x/²/4", "{}/JOBx/output", "0", [("x/²/4", [("trainer", 0)])]),
        ("x/0/5", "{}" + "/a" * 3000 + "/JOBx/output", "0", []),
    ],
)
def test_variables_of_a_process_are_what_its_program_has_made_of_them(
    tmp_path: Path, mark: str, output: str, rank: str, found: list[tuple[str, list[tuple[str, int]]]]
) -> None:
    (tmp_path / "JOBx/.clustertool").mkdir(parents=True)
    (tmp_path / "JOBx/.clustertool/marker").touch()  # for commands of other tests it is no orphan
    own = {"MARK": mark, "OUTPUT": output.format(tmp_path), "ROLE": "trainer", "RANK": rank}
    env = {**os.environ, **{f"CLUSTERTOOL_{name}": value for name, value in own.items()}}
    pipe = subprocess.PIPE  # while a process executes another program, it shows no variables
    with subprocess.Popen(["sh", "-c", "echo; read line"], env=env, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout and process.stdout.readline()
            there = [one for one in remains.find_living().values() if one.processes[0].pid == process.pid]
            records = [OrphanRecord(one) for one in there]
        finally:
            process.kill()
    assert [(one.remains.mark, sorted(one.remains.ranks)) for one in records] == found
