"""Which devices a node has, by its device files: kinds, and the ids by which programs know them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clustertool.node.devices import detect


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def node(tmp: Path, files: list[str], topology: list[str] | None = None) -> tuple[str, str]:
    """A /dev with these files and a /sys with these nodes of the kernel's topology."""
    dev, sys = tmp / "dev", tmp / "sys"
    dev.mkdir()
    for name in files:
        (dev / name).touch()
    for number, properties in enumerate(topology or ()):
        folder = sys / "class/kfd/kfd/topology/nodes" / str(number)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(properties)
    return str(dev), str(sys)


CPU = "cpu_cores_count 32\nsimd_count 0\nvendor_id 0\n"
HYGON = "cpu_cores_count 0\nsimd_count 320\nvendor_id 7572\n"
AMD = "cpu_cores_count 0\nsimd_count 8\nvendor_id 4098\n"


@pytest.mark.parametrize(
    "files, topology, expected",
    [
        ([], None, ("cpu", [])),
        (["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"], None, ("gpu", [0, 1, 2])),
        (["nvidia3"], None, ("gpu", [0])),  # a container with one of four
        (["nvidiactl", "nvidia-modeset"], None, ("cpu", [])),
        (["xpu0", "xpu5", "xpuctrl"], None, ("xpu", [0, 5])),
        (["davinci0", "davinci7", "davinci_manager"], None, ("npu", [0, 7])),
        (["kfd"], [CPU, HYGON, HYGON], ("dcu", [0, 1])),
        (["mkfd", "kfd"], [CPU, CPU, HYGON], ("dcu", [0])),
        (["kfd"], [CPU, AMD], ("cpu", [])),  # AMD's own cards, and the graphics of a laptop
        ([], [CPU, HYGON], ("cpu", [])),  # a container without the driver's file
    ],
)
def test_found(tmp_path: Path, files: list[str], topology: list[str] | None, expected: tuple[str, list[int]]) -> None:
    assert detect.detect_cards(*node(tmp_path, files, topology)) == expected


def test_models_are_read_from_the_driver_in_the_order_of_the_bus(tmp_path: Path) -> None:
    for bus, model in (("0000:41:00.0", "NVIDIA A100-SXM4-80GB"), ("0000:01:00.0", "NVIDIA T4")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 20\n")
    assert detect.models(2, str(tmp_path)) == ["NVIDIA T4", "NVIDIA A100-SXM4-80GB"]
    assert detect.models(1, str(tmp_path)) == [], "which one of them this container has is not known"
    (tmp_path / "0000:41:00.0/information").write_text("")
    assert detect.models(2, str(tmp_path)) == detect.models(1, str(tmp_path / "no")) == []


def test_keys_are_the_machines_own_names(tmp_path: Path) -> None:
    """Card 0 of a container and card 3 of its machine are one card."""
    dev, _ = node(tmp_path, ["nvidia3", "nvidia7"])
    assert detect.keys("gpu", [0, 1, 2], dev) == {0: "nvidia3", 1: "nvidia7", 2: "nvidia2"}
    assert detect.keys("npu", [4], dev) == {4: "davinci4"}
    assert detect.keys("dcu", [1], dev) == {1: "dcu1"}


def test_a_library_that_is_none_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / detect.LIBRARY).write_text("nonsense")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert detect.library() == str(tmp_path / detect.LIBRARY)
    assert detect.detect_cards(*node(tmp_path, [])) == ("cpu", [])


def test_a_library_that_crashes_or_hangs_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does so in a process of its own."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("needs a C compiler (package gcc)")
    monkeypatch.setattr(detect, "_PATIENCE", 0.5)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    for body in ("abort()", "for (;;) pause()"):
        source = f"#include <stdlib.h>\n#include <unistd.h>\nint nvmlInit_v2(void) {{ {body}; return 0; }}\n"
        (tmp_path / "library.c").write_text(source)
        argv = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / detect.LIBRARY), str(tmp_path / "library.c")]
        subprocess.run(argv, check=True)
        assert detect.detect_cards(str(tmp_path / "dev"), str(tmp_path / "sys")) == ("cpu", [])


def test_within() -> None:
    import threading

    never = threading.Event()
    assert detect.within(5.0, lambda: 3, "late") == 3
    assert detect.within(0.05, never.wait, "late") == "late"
    never.set()
    with pytest.raises(ValueError, match="bad"):
        detect.within(5.0, lambda: int("bad"), 0)
