"""`bench` makes nodes and jobs; at its end it asserts that no process of any job of the test lives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.harness import Bench


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all tests, so that the node's code is compiled once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def bench(tmp_path: Path, home: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, home)
    yield made
    made.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], check=False).returncode:
        pytest.skip("needs root and the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
