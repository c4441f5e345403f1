"""The example jobs as tests run them: a copy with data, on nodes whose PRELUDE activates the framework.

The virtual environments are made by scripts/frameworks.sh, which `make test` and `make test-frameworks` call. Without
one its tests skip with the reason; with DEMAND_FRAMEWORKS=1 they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli import REPO, Done, LoopSite

TIMEOUT = 300.0  # four processes that import a framework for the first time, on a machine with other work


class Example:
    """A workspace of the project on a cluster whose nodes have its framework."""

    def __init__(self, site: LoopSite, workspace: Path) -> None:
        self.site, self.workspace = site, workspace

    def run(self, *args: object) -> Done:
        return self.site.inv("run", "--workspace", self.workspace, *args, timeout=TIMEOUT)

    def change(self, old: str, new: str) -> None:
        """Another train.py."""
        program = self.workspace / "train.py"
        text = program.read_text()
        assert text.count(old) == 1
        program.write_text(text.replace(old, new))

    def outputs(self) -> list[list[str]]:
        """For each node, what the newest job has left in output/."""
        return [
            sorted(path.name for path in (self.site.jobs(node)[-1] / "output").iterdir())
            for node in range(self.site.count)
        ]


def activate(venv: Path) -> str:
    return f". '{venv}/bin/activate'"


def digits_job(top: Path, data: Path) -> Path:
    """A copy of the workspace digits-torch in a folder, with this data."""
    folder = top / "digits"
    shutil.copytree(REPO / "workspaces/digits-torch", folder, ignore=shutil.ignore_patterns("data", "output"))
    shutil.copytree(data, folder / "data")
    return folder


def curve(done: Done, rank: int, name: str = "loss") -> list[float]:
    """What a trainer has printed as `name=...`, epoch by epoch."""
    return [float(value) for value in re.findall(rf"^\[trainer {rank} .*\b{name}=([0-9.]+)", done.out, re.M)]


def find_venv(name: str) -> Path:
    venv = REPO / ".frameworks" / name
    if not (venv / ".ready").exists():
        log = venv.with_name(name + ".log")
        errors = [line for line in log.read_text().splitlines() if "error" in line.lower()] if log.exists() else []
        why = f"no .frameworks/{name}: {errors[-1] if errors else 'make test-frameworks makes it'}"
        pytest.fail(why) if os.environ.get("DEMAND_FRAMEWORKS") == "1" else pytest.skip(why)
    return venv


def prepare(out: Path, *args: str) -> Path:
    program = REPO / "workspaces" / "digits-data" / "prepare.py"
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # or all of scikit-learn is compiled again and again
    subprocess.run([find_venv("digits-data") / "bin" / "python", program, "--out", out, *args], env=env, check=True)
    return out
