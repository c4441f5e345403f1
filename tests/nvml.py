"""A node's NVIDIA driver for the tests: tests/data/nvml.c as libnvidia-ml.so.1, found by LD_LIBRARY_PATH as the real one is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli import Site

SOURCE = Path(__file__).with_name("data") / "nvml.c"
LIBRARY = "libnvidia-ml.so.1"
SICK = 5


class Driver:
    """`folder` is for LD_LIBRARY_PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def runs(self, *processes: tuple[int, int, int]) -> None:
        """What computes on the cards now: (card, pid, MiB)."""
        part = self.folder / "part"
        part.write_text("".join(f"{card} {pid} {mib}\n" for card, pid, mib in processes))
        part.replace(self.folder / "processes")

    def hangs(self, yes: bool = True) -> None:
        (self.folder / "hang").touch() if yes else (self.folder / "hang").unlink()

    def loses_a_card(self) -> None:
        (self.folder / "lost").touch()


def make(folder: Path) -> Driver:
    """Compile it; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler (package gcc) for a libnvidia-ml.so.1")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / LIBRARY
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return Driver(folder)


def give(site: Site, compiled: Driver, *nodes: int) -> list[Driver]:
    """These nodes of a site get a driver of their own, by a start file of the login."""
    for node in nodes:
        in_start_file(site.home(node), site.home(node) / "driver")
    return [copy(compiled, site.home(node) / "driver") for node in nodes]


def in_start_file(home: Path, folder: Path) -> None:
    (home / ".bashrc").write_text(f'export LD_LIBRARY_PATH="{folder}"\n')


def copy(compiled: Driver, folder: Path) -> Driver:
    folder.mkdir(parents=True)
    (folder / LIBRARY).write_bytes((compiled.folder / LIBRARY).read_bytes())
    return Driver(folder)
