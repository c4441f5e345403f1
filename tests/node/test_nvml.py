"""Devices through the shipped agent: the very module that goes to nodes, with a library of the tests' own below it."""

from __future__ import annotations

import base64
import json
import os
import pwd
import zlib
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import PreflightError
from clustertool.fleet import node_bundle
from tests.node.harness import Bench, Node, until
from tests.nvml import SICK, Driver, copy

MIB = 1 << 20
USER = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def driver(nvml: Driver, tmp_path: Path) -> Driver:
    return copy(nvml, tmp_path / "driver")


def node_with(bench: Bench, driver: Driver, **given: Any) -> Node:
    return bench.nodes(1, env={"LD_LIBRARY_PATH": str(driver.folder)}, **given)[0]


def sample(node: Node) -> dict[str, Any]:
    """As devices_of() of fleet/fleet.py asks, one node at a time."""
    digest, data = node_bundle.nvml()
    answer = node.ask("devices", nvml=digest)
    if "need" in answer:
        node.ask("file", kind="nvml", digest=digest, data=base64.b64encode(data).decode())
        answer = node.ask("devices", nvml=digest)
    return answer


def test_eight_cards_one_of_them_sick(bench: Bench, driver: Driver) -> None:
    node = node_with(bench, driver)
    driver.runs((1, os.getpid(), 3000), (1, 999_999_999, 100))
    found = sample(node)
    assert (found["kind"], found["ids"], found["problem"]) == ("gpu", list(range(8)), "")
    assert (found["driver"], found["cuda"]) == ("550.54.15", "12.4")
    devices = found["devices"]
    assert [device["uuid"] for device in devices] == [f"GPU-test-{number}" for number in range(8)]
    first, busy, sick = devices[0], devices[1], devices[SICK]
    assert first == {
        "index": 0,
        "model": "NVIDIA Test 80GB",
        "uuid": "GPU-test-0",
        "memory_total": 81920 * MIB,
        "memory_used": 0,
        "memory_free": 81420 * MIB,
        "utilisation": 0,
        "temperature": 40,
        "power": 70.5,
        "power_limit": 400.0,
        "throttle": [],
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "repair": "",
        "slowdown": 93,
        "compute_mode": "default",
        "persistence": True,
        "processes": [],
        "problem": "",
        "held": None,
    }
    assert (busy["utilisation"], busy["memory_used"]) == (91, 3100 * MIB)
    assert [process["pid"] for process in busy["processes"]] == [os.getpid(), 999_999_999]
    assert (busy["processes"][0]["user"], busy["processes"][0]["memory"]) == (USER, 3000 * MIB)
    assert busy["processes"][1]["user"] == ""  # of a container whose processes are not seen here
    assert (sick["temperature"], sick["ecc_corrected"], sick["ecc_uncorrected"]) == (96, 1234, 7)
    assert (sick["throttle"], sick["compute_mode"], sick["persistence"]) == (
        ["hardware slowdown", "hardware thermal"],
        "exclusive process",
        False,
    )
    assert sick["repair"] == "pending"
    assert devices[7]["ecc_uncorrected"] is None  # a card without ECC
    assert [device["problem"] for device in devices] == [""] * 8


def test_a_card_fell_off_the_bus(bench: Bench, driver: Driver) -> None:
    driver.loses_a_card()
    devices = sample(node_with(bench, driver))["devices"]
    assert [device["problem"] for device in devices] == [""] * 6 + ["GPU is lost", ""]
    assert devices[6]["processes"] == [] and devices[7]["temperature"] == 47


def test_the_module_is_sent_once_and_only_where_it_is_needed(bench: Bench, driver: Driver, tmp_path: Path) -> None:
    digest, data = node_bundle.nvml()
    home = tmp_path / "fresh"
    home.mkdir()
    plain = bench.nodes(1, env={"HOME": str(home)})[0]
    assert plain.ask("devices", nvml=digest)["kind"] == "cpu"
    assert not list(home.rglob("pynvml.py"))
    node = bench.nodes(1, env={"HOME": str(home), "LD_LIBRARY_PATH": str(driver.folder)})[0]
    assert node.ask("devices", nvml=digest)["need"] == digest
    sample(node)
    assert "need" not in node.ask("devices", nvml=digest)
    node.open()
    assert "need" not in node.ask("devices", nvml=digest)


def test_a_module_that_was_changed_on_the_node_is_not_run(bench: Bench, driver: Driver, tmp_path: Path) -> None:
    home = tmp_path / "fresh"
    home.mkdir()
    digest, data = node_bundle.nvml()
    node = bench.nodes(1, env={"HOME": str(home), "LD_LIBRARY_PATH": str(driver.folder)})[0]
    sample(node)
    [kept] = home.rglob("pynvml.py")
    kept.write_text("raise SystemExit('not ours')\n")
    node.open()
    assert node.ask("devices", nvml=digest)["need"] == digest
    assert len(sample(node)["devices"]) == 8
    for wrong in (data[:-1] + b"!", zlib.compress(b"other"), b""):
        with pytest.raises(PreflightError, match="damaged"):
            node.ask("file", kind="nvml", digest=digest, data=base64.b64encode(wrong).decode())


@pytest.mark.skipif(os.getuid() == 0, reason="root can write everywhere")
def test_a_home_that_takes_nothing(bench: Bench, driver: Driver, tmp_path: Path) -> None:
    home = tmp_path / "closed"
    home.mkdir(mode=0o500)
    node = bench.nodes(1, env={"HOME": str(home), "LD_LIBRARY_PATH": str(driver.folder)})[0]
    assert len(sample(node)["devices"]) == 8


def test_no_home(bench: Bench, driver: Driver) -> None:
    """The module then runs from memory."""
    node = bench.nodes(1, env={"HOME": "/proc/no-home", "LD_LIBRARY_PATH": str(driver.folder)})[0]
    assert len(sample(node)["devices"]) == 8


@pytest.mark.chaos
def test_a_driver_that_hangs_does_not_hold_the_agent(bench: Bench, driver: Driver) -> None:
    """It is reported as a problem, at once the second time, and the agent ends when its laptop goes."""
    node = node_with(bench, driver)
    sample(node)
    driver.hangs()
    found = sample(node)
    assert found["problem"].startswith("NVML does not answer for 15 s")
    assert [device["index"] for device in found["devices"]] == list(range(8))
    assert sample(node)["problem"] == found["problem"]
    client, pid = node.client, node.client.pid
    client.close()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the agent ends")


def test_the_job_of_a_process(bench: Bench, driver: Driver) -> None:
    """By the environment of the process, or of who started it."""
    node = node_with(bench, driver)
    job = bench.run([node], "sh -c 'env -i sleep 1000 & echo $! ready; wait'")
    rank = job.rank(0)
    child = int(until(lambda: job.log().split()[:1])[0])
    driver.runs((0, rank.pid, 10), (3, child, 20))
    devices = sample(node)["devices"]
    reported = {"job": job.id, "role": "trainer", "rank": "0", "user": USER}
    for device in (devices[0], devices[3]):
        assert {key: device["processes"][0][key] for key in reported} == reported
    job.stop()


def test_the_probe_counts_what_the_library_shows(bench: Bench, driver: Driver) -> None:
    answer = node_with(bench, driver).probe()
    assert (answer["device_kind"], answer["devices"], answer["devices_seen"]) == ("gpu", list(range(8)), True)
    assert json.dumps(answer["locked"]) == "[]"
