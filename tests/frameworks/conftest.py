"""Real frameworks: `example("digits-torch")` is that workspace with its data, and two nodes that have what it needs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli import REPO, LoopSite
from tests.frameworks.examples import Example, activate, find_venv, prepare
from tests.ssh.conftest import embedded, laptop, site, ssh_keys, start

__all__ = ["embedded", "laptop", "site", "ssh_keys", "start"]  # fixtures


@pytest.fixture(scope="session")
def venv() -> Callable[[str], Path]:
    """venv("digits-torch") -> the virtual environment for that workspace."""
    return find_venv


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' data, made by the scikit-learn that nodes do not have; four trainers share six files unevenly.

    The folder had a shard of a former run. The first worker that needs the data makes them: scikit-learn takes 1.2 s of CPU.
    """
    workers_own = tmp_path_factory.getbasetemp()
    folder = (workers_own.parent if "PYTEST_XDIST_WORKER" in os.environ else workers_own) / "digits-data"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")  # what another worker has begun and not ended is made again
            part.mkdir(exist_ok=True)
            (part / "train.txt-00007").write_text("a run with more shards")
            prepare(part, "--shards", "6").rename(folder)
    return folder


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For what frameworks leave behind in /tmp; short, for it becomes part of the names of their sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def example(site: Callable[..., LoopSite], digits: Path, scratch: Path) -> Callable[[str], Example]:
    def make(name: str) -> Example:
        venv, two = find_venv(name), site(2)
        folder = two.folder / name
        shutil.copytree(
            REPO / "workspaces" / name, folder, ignore=shutil.ignore_patterns("data", "output", "__pycache__")
        )
        shutil.copytree(digits, folder / "data")
        two.conf(PRELUDE=activate(venv), ENV={"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"})
        return Example(two, folder)

    return make
