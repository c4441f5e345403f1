"""What a node tells `inv top` once a second, of real jobs, and what that costs it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.jobs.live_sample import LiveSampler
from tests.node.harness import Bench, Node, cpu, kill, until
from tests.node.test_nvml import sample
from tests.nvml import Driver, copy

TALKS = "i=0; while :; do i=$((i+1)); echo step $i; sleep 0.05; done"


@pytest.fixture
def driver(nvml: Driver, tmp_path: Path) -> Driver:
    return copy(nvml, tmp_path / "driver")


def glance(node: Node, job: str = "") -> dict[str, Any]:
    from clustertool.fleet import node_bundle

    return node.ask("glance", nvml=node_bundle.nvml()[0], job=job)


def ranks(node: Node, job: str = "") -> dict[int, dict[str, Any]]:
    return {rank["rank"]: rank for one in glance(node, job)["jobs"] for rank in one["ranks"]}


def test_a_job_from_its_start_to_its_end(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    assert glance(node)["jobs"] == []
    job = bench.run([node], TALKS, per_node=2)
    until(lambda: all(rank["line"].startswith("step ") for rank in ranks(node).values()) and len(ranks(node)) == 2)
    found = glance(node)
    [one] = found["jobs"]
    assert (one["job"], one["node"]) == (job.id, 0) and one["heartbeat"] < 30
    assert one["ranks"][0]["pid"] == job.rank(0).pid and one["ranks"][1]["log"] == "log/workerlog.1"
    assert one["ranks"][0]["memory"] > 100_000 and one["ranks"][0]["seconds"] >= 0
    before = ranks(node)[0]["line"]
    until(lambda: ranks(node)[0]["line"] != before, "its last line moves")
    assert glance(node, job.id[:-1])["jobs"] and not glance(node, "another")["jobs"]
    assert found["cpu"][1] > found["cpu"][0] > 0 and found["memory"][1] > found["memory"][0] > 0
    job.stop()
    until(lambda: glance(node)["jobs"] == [], "a job that has ended is gone")


def test_ranks_that_end_one_by_one(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    job = bench.run([node], "[ $RANK = 0 ] && exit 0; echo ready; exec sleep 1000", per_node=2)
    until(lambda: {number: rank["state"] for number, rank in ranks(node).items()} == {0: "done", 1: "running"})
    assert "seconds" not in ranks(node)[0]
    job.stop()


def test_a_job_that_lost_its_supervisor_shows_the_age_of_its_heartbeat(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    job = bench.run([node], "echo ready; exec sleep 1000").ready()
    glance(node)
    kill(job.process("guard"))
    until(lambda: len(job.events(kind="guard")) > 1)
    kill(job.process("supervisor"))
    job.gone()
    until(lambda: all("seconds" not in rank for rank in ranks(node).values()), "its rank is gone")
    assert ranks(node)[0]["state"] == "stopped", "by the guard"


def test_a_rank_of_a_machine_that_crashed_is_lost(bench: Bench) -> None:
    """Its records end in the middle: no event says that it has ended, and no process of it is there."""
    node = bench.nodes(1)[0]
    job = bench.run([node], "echo step 8; echo ready; exec sleep 1000").ready()
    assert ranks(node)[0]["state"] == "running" and ranks(node)[0]["quiet"] < 60
    for kind in ("supervisor", "guard"):
        kill(job.process(kind), signal.SIGSTOP)  # neither of them records an end
    for process in (job.process("guard"), job.process("supervisor"), job.rank()):
        kill(process)
    assert ranks(node)[0]["state"] == "lost"
    reported = node.ask("status", job=job.id)
    assert (reported["supervised"], reported["output"][0][:4]) == (False, ["trainer", 0, None, 8.0])


def test_the_places_of_all_ranks_are_named_now_and_then(bench: Bench) -> None:
    nodes = bench.nodes(2)
    job = bench.run(nodes, "echo ready; exec sleep 1000", per_node=2).ready()
    samples = [glance(nodes[0])["jobs"][0] for _ in range(21)]
    job.stop()
    assert sum("plan" in sample for sample in samples) in (2, 3)
    plan = next(sample["plan"] for sample in samples if "plan" in sample)
    assert plan["places"] == [["trainer", 0, 0, 2, 2]] and len(plan["nodes"]) == 2


def test_progress_bars_and_silence(tmp_path: Path) -> None:
    from clustertool.node.jobs.live_sample import _last_line
    from clustertool.node.storage import files

    job = tmp_path / "JOBx"
    files.make_root(str(tmp_path))
    descriptor = files.make_job_dir(str(job))
    for text, line in (
        (b"", ""),
        (b"one\ntwo\n\n  \n", "two"),
        (b"10%\r20%\r30%\r", "30%"),
        (b"a\nhalf a li", "half a li"),
        (b"x" * 5000, "x" * 160),
        (b"\xff\xfe\n", "\\xff\\xfe"),
    ):
        files.create(descriptor, "log/workerlog.0", text, exclusive=False)
        assert _last_line(str(job), "log/workerlog.0")[0] == line


def test_devices_are_reported_in_short(bench: Bench, driver: Driver) -> None:
    node = bench.nodes(1, env={"LD_LIBRARY_PATH": str(driver.folder)})[0]
    sample(node)
    import os

    driver.runs((2, os.getpid(), 1024))
    found = glance(node)
    assert [device["index"] for device in found["devices"]] == list(range(8)) and found["kind"] == "gpu"
    busy = found["devices"][2]
    assert (busy["utilisation"], busy["memory_used"] >> 20, len(busy["users"])) == (92, 1024, 1)
    assert "uuid" not in busy and "processes" not in busy


def test_it_costs_less_than_a_hundredth_of_a_core(bench: Bench, driver: Driver) -> None:
    """CPU of the agent for each glance, with eight cards, eight ranks that print, and two hundred old jobs next to them."""
    node = bench.nodes(1, env={"LD_LIBRARY_PATH": str(driver.folder)})[0]
    node.root.mkdir()
    for number in range(200):
        ours = node.root / f"JOBold{number}" / ".clustertool"
        ours.mkdir(parents=True)
        (ours / "marker").touch()
        (ours / "events.jsonl").write_text('{"e":"job","id":"old"}\n{"e":"ended","t":1}\n')
    sample(node)
    job = bench.run([node], TALKS, per_node=8)
    until(lambda: len(ranks(node)) == 8)
    before, samples = cpu(node.client.pid), 60
    for _ in range(samples):
        assert len(ranks(node)) == 8
    each = (cpu(node.client.pid) - before) / samples
    job.stop()
    assert each < 0.01, f"{1000 * each:.1f} ms of CPU for a glance"


def test_job_directories_are_listed_only_when_one_comes_or_goes(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clustertool.node.jobs import live_sample as module

    calls = []
    monkeypatch.setattr(module, "find", lambda *_: calls.append(1) or [])
    one = LiveSampler(str(tmp_path), "entry", "none")
    for _ in range(5):
        one._list_jobs()
    assert len(calls) == 1
    (tmp_path / "JOBnew").mkdir()
    one._list_jobs()
    assert len(calls) == 2


def test_a_tool_that_costs_much_is_run_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of a maker's tool is worth fifty seconds of one percent; what it printed last stays."""
    from clustertool.node.devices import detect, read

    tool = tmp_path / "npu-smi"
    recorded = Path(__file__).parents[1] / "data" / "smi" / "npu-smi.txt"
    burn = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done"
    tool.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\n{burn}\ncat {recorded}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(detect, "detect_cards", lambda: ("npu", [0, 1]))
    pulse = read.PacedReader("none")
    for _ in range(3):
        assert [device["model"] for device in pulse.now()["devices"]] == ["910B2", "910B2"]
    assert (tmp_path / "runs").read_text().count("run") == 1
