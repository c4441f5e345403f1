"""Where the laptop has py-spy for the machine of a node."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from clustertool.fleet import stack_tools

ELF = b"\x7fELF" + bytes(14)
ARM, INTEL = ELF + (183).to_bytes(2, "little") + b"arm", ELF + (62).to_bytes(2, "little") + b"intel"


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the programs that are installed here; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stack_tools.sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "scripts").mkdir()
    return tmp_path / "scripts"


def wheel(folder: Path, machine: str, program: bytes, inside: str = "py_spy-0.4.3.data/scripts/py-spy") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"py_spy-0.4.3-py2.py3-none-manylinux1_{machine}.whl", "w") as file:
        file.writestr(inside, program)


def test_the_installed_one_is_for_its_machine_only(scripts: Path) -> None:
    assert stack_tools.installed("x86_64") == b""
    (scripts / "py-spy").write_bytes(INTEL)
    assert (stack_tools.installed("x86_64"), stack_tools.installed("aarch64")) == (INTEL, b"")
    assert stack_tools.installed("riscv64") == b""
    assert stack_tools.source() == "py-spy"


def test_one_of_macos_is_not_for_nodes(scripts: Path) -> None:
    (scripts / "py-spy").write_bytes(b"\xcf\xfa\xed\xfe" + bytes(100))
    assert stack_tools.installed("x86_64") == stack_tools.installed("arm64") == b""
    assert stack_tools.source() == "py-spy by pip, when needed"


def test_wheels_of_the_cache_are_read_and_damaged_ones_ignored(scripts: Path) -> None:
    cache = scripts.parent / "cache" / "clustertool" / "py-spy"
    wheel(cache, "aarch64", ARM)
    wheel(cache, "x86_64", INTEL, inside="other")
    (cache / "py_spy-1-none-any_armv7l.whl").write_bytes(b"no zip")
    assert [stack_tools.installed(machine) for machine in ("aarch64", "x86_64", "armv7l")] == [ARM, b"", b""]
