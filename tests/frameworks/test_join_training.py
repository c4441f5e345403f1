"""PyTorch on three machines that join: it learns exactly what it learns by ssh."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from clustertool.actions import load_workspace
from clustertool.model.config.job import Options
from tests.frameworks.examples import TIMEOUT, activate, digits_job, find_venv
from tests.lab.conftest import lab, site
from tests.lab.test_join_machines import by_join

__all__ = ["lab", "site"]  # fixtures: nodes with networks of their own


@pytest.mark.frameworks
def test_digits_by_ssh_and_by_join(site, digits):
    """The losses of all epochs are equal on all ranks, and the models are the same bytes."""
    venv, three = find_venv("digits-torch"), site(3)
    three.conf(PRELUDE=activate(venv))
    folder = digits_job(three.folder, digits)
    three.inv("run", "-w", folder, "--job-id", "digits", timeout=TIMEOUT).ends(0)
    by_ssh = learned(three)
    for node in range(3):
        shutil.rmtree(three.root(node))
    done = by_join(three, folder, "digits", Options(), load_workspace.workspace_toml(folder))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stdout + one.stderr for one in done]
    assert learned(three) == by_ssh
    assert [len(losses) for losses, _ in by_ssh] == [20, 20, 20] and by_ssh[0][1]


def learned(site) -> list[tuple[list[str], bytes]]:
    """For each node the losses of its rank by epoch, and the model."""
    found = []
    for node in range(3):
        (job,) = site.jobs(node)
        model: Path = job / "output/model.pt"
        losses = re.findall(r"\bloss=([0-9.]+)", (job / f"log/workerlog.{node}").read_text())
        found.append((losses, model.read_bytes() if model.exists() else b""))
    return found
