"""The cards in the record of a job: read next to it, by a process that goes with it, whatever the driver does."""

from __future__ import annotations

import base64
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertool.fleet import node_bundle
from clustertool.fleet.joining import join_bundle
from clustertool.model.config.elastic_keys import ElasticSettings
from clustertool.model.facts import Facts, read_facts
from clustertool.node.devices import locks
from clustertool.node.system import processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, Node, Process, alive, cpu, descriptors, kill, pythons, read, sample, until
from tests.node.joining import JoinBench, tasks
from tests.nvml import Driver, copy

MIB = 1 << 20


@pytest.fixture
def driver(nvml: Driver, tmp_path: Path) -> Driver:
    return copy(nvml, tmp_path / "driver")


def node_with(bench: Bench, driver: Driver, kind: str = "auto", python: str = sys.executable) -> Node:
    """A node with a driver, to which the module has been sent, as `run` does."""
    node = bench.nodes(1, python=python, env={"LD_LIBRARY_PATH": str(driver.folder)}, DEVICE_KIND=kind)[0]
    digest, data = node_bundle.nvml()
    node.ask("file", kind="nvml", digest=digest, data=base64.b64encode(data).decode())
    return node


def with_a(node: Node, kind: str) -> dict[int, Facts]:
    """As if it had a card of this kind."""
    return {0: replace(read_facts(0, node.probe()), devices=(0,), device_kind=kind)}


def lines(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(str(job.dir() / ".clustertool/usage.jsonl")).split(b"\n")[:-1]]


def with_cards(job: Job, after: float = 0.0) -> list[Any]:
    return [line["d"] for line in lines(job) if "d" in line and line["t"] > after]


def gauges(job: Job) -> list[Process]:
    """All that this job ever had; the harness counts them with whatever must not live on."""
    return [Process(event["pid"], event["start"]) for event in job.events() if event["type"] == "gauge"]


@pytest.mark.parametrize("python", sorted({pythons()[0], sys.executable}))
def test_the_jobs_cards_are_in_the_record(bench: Bench, driver: Driver, python: str) -> None:
    node = node_with(bench, driver, python=python)
    driver.runs((1, 999_999_999, 3000))
    job = bench.run([node], p.PLAIN, devices="0,1").ready()
    found = until(lambda: with_cards(job), "a line with cards")[0]
    assert found == [
        [0, 0.0, 0, 81920 * MIB],
        [1, 91.0, 3000 * MIB, 81920 * MIB],
    ]  # its own, and that of no other process
    (gauge,) = gauges(job)
    assert read(f"/proc/{gauge.pid}/comm") == b"ct-gauge\n"
    cards = job.nodes[0].ask("report", job=job.id, points=100)["cards"]
    assert [(card["index"], card["total"]) for card in cards] == [(0, 81920 * MIB), (1, 81920 * MIB)]
    job.stop()
    job.gone()


def test_an_agent_that_has_read_the_cards_can_start_a_job(bench: Bench, driver: Driver) -> None:
    """--devices auto: NVML has begun in the process that becomes the supervisor."""
    node = node_with(bench, driver)
    assert node.ask("devices", nvml=node_bundle.nvml()[0])["problem"] == ""
    job = bench.run([node], p.PLAIN, devices="7").ready()
    assert until(lambda: with_cards(job), "a line with cards")[0] == [[7, 0.0, 0, 81920 * MIB]]
    job.stop()
    job.gone()


def test_a_driver_that_hangs_costs_only_the_cards(bench: Bench, driver: Driver) -> None:
    node = node_with(bench, driver)
    driver.hangs()
    job = bench.run([node], p.PLAIN, devices="0").ready()
    until(lambda: len(lines(job)) >= 3, "ranks are recorded all the same", 60.0)
    assert not with_cards(job)
    assert alive(gauges(job)[0])
    job.stop()
    job.gone()


def test_a_job_that_ends_by_itself_leaves_none(bench: Bench, driver: Driver) -> None:
    node = node_with(bench, driver)
    job = bench.run([node], "until [ -e go ]; do sleep 0.2; done", devices="0")
    until(lambda: with_cards(job), "a line with cards")
    (job.dir() / "go").touch()
    job.gone()
    assert job.events()[-1]["code"] == 0


def test_one_that_is_killed_is_replaced_and_a_frozen_one_is_no_bar(bench: Bench, driver: Driver) -> None:
    job = bench.run([node_with(bench, driver)], p.PLAIN, devices="0").ready()
    until(lambda: with_cards(job), "a line with cards")
    kill(gauges(job)[0])
    at = time.time()
    until(lambda: len(gauges(job)) == 2 and with_cards(job, after=at), "another gauge's line", 60.0)
    kill(gauges(job)[1], signal.SIGSTOP)
    before = len(lines(job))
    until(lambda: len(lines(job)) >= before + 2, "lines without cards", 60.0)
    job.stop()
    job.gone()


def test_it_does_not_outlive_a_supervisor_that_is_killed(bench: Bench, driver: Driver) -> None:
    job = bench.run([node_with(bench, driver)], p.PLAIN, devices="0").ready()
    (gauge,) = until(lambda: gauges(job), "a gauge")
    driver.hangs()
    supervisor = next(event for event in job.events() if event["type"] == "supervisor")
    kill(Process(supervisor["pid"], supervisor["start"]))
    until(lambda: not alive(gauge), "the gauge is gone")
    job.gone()


def test_it_holds_nothing_of_the_supervisors(bench: Bench, driver: Driver) -> None:
    """A lock or a port that it held would stay taken when the job is over and it hangs."""
    job = bench.run([node_with(bench, driver)], p.PLAIN, devices="0").ready()
    until(lambda: with_cards(job), "a line with cards")
    (gauge,) = gauges(job)
    targets = descriptors(gauge.pid)
    sockets = [target for target in targets if target.startswith("socket:")]
    others = {target for target in targets if target not in sockets}
    assert len(sockets) == 1
    assert others <= {"/dev/null", str(job.dir() / ".clustertool/supervisor.err")}
    job.stop()
    job.gone()


FAILS_ONCE = "[ $CLUSTERTOOL_ATTEMPT = 0 ] || exec sleep 600; until [ -e go ]; do sleep 0.05; done; exit 9"


def test_a_restart_waits_until_the_memory_of_the_cards_is_free(bench: Bench, driver: Driver) -> None:
    job = bench.run([node_with(bench, driver)], FAILS_ONCE, devices="0,1", policy={"max_restarts": 1})
    until(lambda: with_cards(job), "a line with cards")
    driver.runs((0, 999_999_999, 3000), (1, 999_999_999, 500))
    (job.dir() / "go").touch()
    (event,) = job.until("memory-in-use")
    assert (event["devices"], event["used"], event["seconds"]) == ([0], 3000 * MIB, 60)
    job.nodes[0].ask("attached", job=job.id, laptop="", notified="")  # the supervisor answers
    assert len(job.events(0, "started")) == 1, "that of the first attempt"
    driver.runs()
    job.until("started", count=2)
    job.stop()
    job.gone()
    assert len(job.events(0, "memory-in-use")) == 1


def test_a_stop_ends_the_wait_for_memory(bench: Bench, driver: Driver) -> None:
    job = bench.run([node_with(bench, driver)], FAILS_ONCE, devices="0", policy={"max_restarts": 1})
    until(lambda: with_cards(job), "a line with cards")
    driver.runs((0, 999_999_999, 3000))
    (job.dir() / "go").touch()
    job.until("memory-in-use")
    job.stop(code=130)
    assert (job.ended()["state"], job.ended()["code"]) == ("stopped", 130)
    job.gone()
    assert len(job.events(0, "started")) == 1


def test_a_restart_does_not_wait_for_memory_that_was_in_use_before(bench: Bench, driver: Driver) -> None:
    node = node_with(bench, driver)
    driver.runs((0, 999_999_999, 3000))
    job = bench.run([node], FAILS_ONCE, devices="0", policy={"max_restarts": 1})
    until(lambda: with_cards(job), "a line with cards")
    (job.dir() / "go").touch()
    job.until("started", count=2)
    assert not job.events(0, "memory-in-use")
    job.stop()
    job.gone()


@pytest.mark.chaos
def test_what_it_costs(bench: Bench, driver: Driver) -> None:
    job = bench.run([node_with(bench, driver)], p.PLAIN, devices="0,1,2,3,4,5,6,7").ready()
    until(lambda: len(with_cards(job)) >= 2, "two lines with cards")
    (gauge,) = gauges(job)
    used, at = cpu(gauge.pid), time.monotonic()
    number = len(with_cards(job))
    until(lambda: len(with_cards(job)) >= number + 3, "three more", 60.0)
    assert cpu(gauge.pid) - used <= 0.01 * (time.monotonic() - at) + 0.01  # a clock tick
    job.stop()
    job.gone()


def test_without_cards_of_its_own_or_a_driver_there_is_none(bench: Bench, driver: Driver) -> None:
    without = bench.run([node_with(bench, driver, "cpu")], p.PLAIN).ready()
    nodes = bench.nodes(1, DEVICE_KIND="gpu")
    bare = bench.run(nodes, p.PLAIN, devices="0", facts=with_a(nodes[0], "gpu")).ready()
    for job in (without, bare):
        until(lambda job=job: len(lines(job)) >= 2, "two lines")
        assert not gauges(job) and not with_cards(job)
        job.stop()
        job.gone()


def test_a_makers_tool_that_hangs_goes_with_it(bench: Bench, tmp_path: Path) -> None:
    tool = tmp_path / "bin/npu-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho $$ > "$0.pid"\nexec sleep 1000\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:/usr/bin:/bin"
    nodes = bench.nodes(1, env={"PATH": path}, DEVICE_KIND="npu")
    job = bench.run(nodes, p.PLAIN, devices="0", facts=with_a(nodes[0], "npu")).ready()
    until(lambda: read(f"{tool}.pid").strip(), "the tool runs")
    found = sample(int(read(f"{tool}.pid")))
    assert found is not None and processes.descendants(gauges(job)[0].pid)
    job.stop()
    job.gone()
    until(lambda: not alive(found[0]), "the tool is gone")


def test_devices_that_an_engine_has_allocated(
    join_bench: JoinBench, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are used as its variable names them. A lock does not count, and none is taken. Loads are recorded by position; the
    module that reads them is in the bundle.
    """
    driver.runs((3, 999_999_999, 3000))
    (machine,) = join_bench.job(1, "echo $CUDA_VISIBLE_DEVICES $FLAGS_selected_gpus; exec sleep 600", cluster={})
    join = replace(machine.join, cluster=replace(machine.join.cluster, device_kind="auto"), engine="slurm")
    names, home = "3,GPU-b", join_bench.tmp / "home of no module"
    home.mkdir()
    tasks([machine], HOME=str(home), LD_LIBRARY_PATH=str(driver.folder), CUDA_VISIBLE_DEVICES=names)
    path = join_bench.tmp / "bundle.pyz"
    join_bundle.write(path, join)
    machine.argv = [machine.python, str(path), "join", "--report"]
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.folder))
    other = locks.take("gpu", [0, 1, 2, 3], "other")
    try:
        machine.start().until("started")
        for rank in (0, 1):
            machine.says(f"{names} {rank}\n", rank)
        jobs = [lock["job"] for key, lock in locks.locked().items() if key.startswith(str(driver.folder))]
        assert jobs == ["other"] * 4
        usage = machine.job_dir / ".clustertool/usage.jsonl"
        until(lambda: b"[[0,93.0," in read(str(usage)).replace(b" ", b""), "the load of the device with a number")
    finally:
        other.release()
    machine.signal(signal.SIGTERM)
    assert machine.wait() == 143


def test_an_epoch_waits_for_memory_that_ranks_of_the_epoch_before_have_used(
    join_bench: JoinBench, driver: Driver
) -> None:
    command = FAILS_ONCE.replace("exit 9", "exit 101")
    (machine,) = join_bench.job(1, command, cluster={"device_kind": "auto"}, options={"devices": "0"})
    join = replace(machine.join, job=replace(machine.join.job, elastic=ElasticSettings(1, 1, timeout=20.0)))
    path = join_bench.tmp / "bundle.pyz"
    join_bundle.write(path, join)
    machine.env = {**machine.env, "LD_LIBRARY_PATH": str(driver.folder)}
    machine.argv = [machine.python, str(path), "join", "--report"]
    machine.start().until("started")
    usage = machine.job_dir / ".clustertool/usage.jsonl"
    until(lambda: b'"d"' in read(str(usage)), "a line with devices")
    driver.runs((0, 999_999_999, 3000))
    (machine.job_dir / "go").touch()
    until(lambda: machine.events("memory-in-use"), "the epoch waits")
    assert len(machine.events("started")) == 1
    driver.runs()
    until(lambda: len(machine.events("started")) == 2, "the ranks of the epoch start")
    machine.signal(signal.SIGTERM)
    assert machine.wait() == 143
