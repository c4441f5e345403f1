"""What makers' tools print, after public documentation (tests/data/smi/README.md), becomes the same facts for every kind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.devices import vendor_tools

TEXTS = Path(__file__).parent.parent / "data" / "smi"
MIB = 1 << 20


def read(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = vendor_tools.TOOLS[kind][2]((TEXTS / f"{name}.txt").read_text())
    return found


def column(found: dict[str, Any], name: str) -> list[Any]:
    return [device[name] for device in found["devices"]]


def test_hy_smi_alone() -> None:
    found = read("dcu", "hy-smi")
    assert column(found, "index") == [0, 1, 2, 3]
    assert column(found, "temperature") == [49, 48, 53, 49]
    assert column(found, "power") == [118.0, 120.0, 116.0, 138.0]
    assert column(found, "power_limit") == [800.0] * 4
    assert column(found, "utilisation") == [0] * 4
    assert column(found, "memory_total") == [None] * 4
    assert found["driver"] == ""


def test_hy_smi_with_memory_and_processes() -> None:
    found = read("dcu", "hy-smi-hcu")
    assert column(found, "utilisation") == [0, 100]
    assert column(found, "memory_total") == [65520 * MIB] * 2
    assert column(found, "memory_used") == [51920 * MIB, 64112 * MIB]
    assert column(found, "memory_free") == [13600 * MIB, 1408 * MIB]
    assert column(found, "model") == ["K100_AI"] * 2
    assert found["driver"] == "6.3.13-V1.12.0a"
    several = {"pid": 3865170, "memory": None}
    assert column(found, "processes") == [[several], [{"pid": 12345, "memory": 512 * MIB}, several]]


def test_xpu_smi() -> None:
    found = read("xpu", "xpu_smi")
    assert column(found, "index") == list(range(8))
    assert column(found, "model") == ["P800 OAM"] * 8
    assert column(found, "temperature") == [37, 41, 36, 36, 40, 40, 39, 40]
    assert column(found, "power") == [88.0, 90.0, 89.0, 89.0, 88.0, 90.0, 90.0, 87.0]
    assert set(column(found, "memory_total")) == {98304 * MIB}  # and not the 96 MiB of its L3
    assert set(column(found, "compute_mode")) == {"default"}
    assert column(found, "processes") == [[]] * 8
    assert found["driver"] == "5.0.21.21"


def test_xpu_smi_at_work() -> None:
    found = read("xpu", "xpu_smi-busy")
    busy, hurt = found["devices"][1], found["devices"][7]
    assert (busy["utilisation"], busy["memory_used"], busy["temperature"]) == (97, 90440 * MIB, 62)
    assert busy["processes"] == [{"pid": 20155, "memory": 90440 * MIB}]
    assert column(found, "ecc_uncorrected") == [0] * 7 + [3]
    assert hurt["processes"] == []


def test_npu_smi() -> None:
    found = read("npu", "npu-smi")
    assert column(found, "index") == [0, 1]
    assert column(found, "model") == ["910B2"] * 2
    assert column(found, "memory_used") == [60126 * MIB, 60235 * MIB]
    assert column(found, "power") == [97.8, 94.9]
    assert [device["processes"][0]["pid"] for device in found["devices"]] == [2759218, 2759615]
    assert column(found, "problem") == ["", ""]
    assert found["driver"] == "25.2.0"


def test_npu_smi_with_two_chips_a_card() -> None:
    """The id that programs know is the Phy-ID; only the first chip tells the card's power."""
    found = read("npu", "npu-smi-chips")
    assert column(found, "index") == [0, 1, 2]
    assert column(found, "power") == [163.6, None, 164.5]
    assert column(found, "utilisation") == [0, 0, 12]
    assert column(found, "problem") == ["", "", "health: Alarm"]
    assert column(found, "processes") == [[], [], [{"pid": 29570, "memory": 3806 * MIB}]]


@pytest.mark.parametrize("kind", sorted(vendor_tools.TOOLS))
@pytest.mark.parametrize("text", ["", "command not found\n", "Error: driver not loaded\n| 0 |\n"])
def test_nonsense_is_no_device(kind: str, text: str) -> None:
    assert vendor_tools.TOOLS[kind][2](text)["devices"] == []


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A maker's tool on PATH: its text is a shell's."""
    path = tmp_path / "npu-smi"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def test_a_tool_is_run(tool: Path) -> None:
    tool.write_text(f'#!/bin/sh\n[ "$*" = info ] && cat {TEXTS / "npu-smi.txt"}\n')
    assert column(vendor_tools.read("npu"), "index") == [0, 1]


def test_a_tool_that_says_nothing_useful(tool: Path) -> None:
    tool.write_text("#!/bin/sh\necho dcmi module initialize failed. ret is -8005\nexit 1\n")
    assert (
        vendor_tools.read("npu")["problem"] == "npu-smi reported no device: dcmi module initialize failed. ret is -8005"
    )


def test_a_tool_that_hangs_is_ended_with_its_children(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/child\nwait\n")
    monkeypatch.setattr(vendor_tools, "PATIENCE", 2.0)
    found = vendor_tools.read("npu")
    assert (found["devices"], found["problem"]) == ([], "npu-smi info does not answer for 2 s: a device hangs?")
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vendor_tools.read("dcu")["problem"] == "there is no hy-smi: only the ids of the devices are known"
