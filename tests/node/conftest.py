"""`bench` makes nodes and jobs; at its end it asserts that no process of any job of the test lives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.cable import Cable, CableOf
from tests.node.harness import Bench, Job
from tests.node.joining import JoinBench
from tests.node_code import CACHE, NodeCode


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, node_code: NodeCode) -> Path:
    """One home for all tests, which has the node's code."""
    made = tmp_path_factory.mktemp("home")
    node_code.put_into(made)
    return made


@pytest.fixture
def bench(tmp_path: Path, home: Path, node_code: NodeCode) -> Iterator[Bench]:
    made = Bench(tmp_path, home, home / CACHE / node_code.name)
    yield made
    made.end()


@pytest.fixture
def join_bench(tmp_path: Path, home: Path) -> Iterator[JoinBench]:
    """Makes machines that join a job; at its end it asserts that no process of them lives."""
    made = JoinBench(tmp_path, home)
    yield made
    made.end()


@pytest.fixture
def cable_of() -> Iterator[CableOf]:
    """Put a cable between the coordinator and every other node of a job that is not placed yet."""
    made: list[Cable] = []

    def make(job: Job) -> Cable:
        cable = Cable(job.plan.coordinator)
        made.append(cable)
        cable.of(job, range(1, len(job.nodes)))
        return cable

    yield make
    for cable in made:
        cable.close()


class Disk:
    """An ext4 file system in a file, mounted at `path`. crash() shows what a power cut at this moment would leave of it."""

    def __init__(self, top: Path) -> None:
        self.path, self._image, self._mounted = top / "disk", top / "image", []
        with open(self._image, "wb") as file:
            file.truncate(64 << 20)
        path = f"{os.environ['PATH']}:/sbin:/usr/sbin"
        made = subprocess.run(["env", f"PATH={path}", "mkfs.ext4", "-q", "-F", str(self._image)], check=False)
        if made.returncode or not self._mount(self._image, self.path):
            pytest.skip("needs root, mkfs.ext4 and the right to mount a loop device")

    def _mount(self, image: Path, path: Path) -> bool:
        path.mkdir()
        done = subprocess.run(["mount", "-o", "loop,commit=600", str(image), str(path)], check=False)
        self._mounted += [] if done.returncode else [path]
        return not done.returncode

    def crash(self) -> Path:
        """A copy of the file system as it is on the disk now, without what the system has in memory only."""
        number = len(self._mounted)
        copy = self._image.with_name(f"image{number}")
        subprocess.run(["cp", "--sparse=always", str(self._image), str(copy)], check=True)
        assert self._mount(copy, self.path.with_name(f"crashed{number}"))
        return self._mounted[-1]

    def end(self) -> None:
        for path in self._mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.getuid():
        pytest.skip("needs root")
    made = Disk(tmp_path)
    yield made
    made.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], check=False).returncode
    ):
        pytest.skip("needs root and the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
