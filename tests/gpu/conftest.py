"""A real NVIDIA GPU on this machine, and a Python whose PyTorch uses it. Without one of them a test skips, with the reason;
with DEMAND_GPU=1, as in `make test-gpu`, it fails.

TORCH_PYTHON names that Python; by default it is the first python3 on PATH. clustertool itself runs in the interpreter of the
tests. No sshd is needed: jobs run on this machine alone, as clusterrun does it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from clustertool.node.devices import detect
from tests.cli import REPO, Done, HereSite
from tests.node.conftest import bench, home

__all__ = ["bench", "home"]  # fixtures

TIMEOUT = 300.0  # the first import of a framework on a machine with a cold disk
CHECK = """
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("torch " + torch.__version__ + " sees no GPU")
"""


def unable(why: str) -> NoReturn:
    pytest.fail(why) if os.environ.get("DEMAND_GPU") == "1" else pytest.skip(why)


@pytest.fixture(scope="session")
def gpus() -> tuple[int, ...]:
    """The numbers of the GPUs."""
    kind, ids = detect.detect_cards()
    if kind != "gpu":
        unable("needs an NVIDIA GPU, and there is none here")
    return tuple(ids)


@pytest.fixture(scope="session")
def torch_python(gpus: tuple[int, ...]) -> Path:
    """A Python with PyTorch that sees the GPUs."""
    name = os.environ.get("TORCH_PYTHON") or shutil.which("python3")
    if not name:
        unable("needs a python3 with PyTorch: set TORCH_PYTHON")
    done = subprocess.run([name, "-c", CHECK], capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        last = (done.stderr.strip() or "no reason").splitlines()[-1]
        unable(f"needs PyTorch with CUDA; set TORCH_PYTHON: {name}: {last}")
    return Path(name)


def driver() -> dict[str, str]:
    """Where the driver's libraries are, if the system does not know them."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


class GpuSite(HereSite):
    """This machine alone, with the driver's libraries and a framework for the ranks."""

    def __init__(self, folder: Path, home: Path, python: Path) -> None:
        super().__init__(folder, home)
        # An activated environment: python3 of the ranks is the framework's, and not that of the tests.
        self._env = {"PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parent.parent)}
        self._env.update(driver())
        self._env["PYTHONPATH"] = os.pathsep.join(
            path for path in (str(REPO), os.environ.get("PYTHONPATH", "")) if path
        )

    def module(self, name: str, *args: object, **variables: str) -> Done:
        """Run `python -m NAME ARGS`: the commands need not be installed."""
        program = [sys.executable, "-m", name]
        return self.inv(*args, program=program, env={**self._env, **variables}, timeout=TIMEOUT)


@pytest.fixture
def here(tmp_path: Path, torch_python: Path) -> Iterator[GpuSite]:
    home = tmp_path / "home"
    home.mkdir()
    site = GpuSite(tmp_path / "folder", home, torch_python)
    yield site
    site.close()
