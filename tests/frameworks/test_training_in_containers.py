"""PyTorch in containers of podman on three machines: it learns exactly what it learns without containers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import containers
from tests.cli import LabSite
from tests.frameworks.examples import TIMEOUT, activate, digits_job, find_venv
from tests.frameworks.test_join_training import learned
from tests.lab.conftest import lab, site

__all__ = ["lab", "site"]  # fixtures: nodes with networks of their own


@pytest.mark.frameworks
@pytest.mark.parametrize("user", ["root", "ann"])
def test_digits(site: Callable[..., LabSite], tmp_path: Path, container_image: Path, digits: Path, user: str) -> None:
    """The losses of all epochs are equal on all ranks, and the models are the same bytes."""
    venv = find_venv("digits-torch")
    nodes = {node: containers.container_node(tmp_path / f"etc{node}", users=("ann",)) for node in range(3)}
    plain = site(3, nodes=nodes)
    containers.put_image(plain, container_image, users=(user,), nodes=[0])
    containers.copy_image(plain, users=(user,))
    three = containers.UserSite.of(plain, user)
    folder = digits_job(three.folder, digits)
    found = []
    for image in ("", containers.IMAGE):
        three.conf(PRELUDE=activate(venv), CONTAINER=containers.settings(volumes=containers.python_volumes(venv)))
        three.inv("run", "-w", folder, "--image", image, "--job-id", "digits", timeout=TIMEOUT).ends(0)
        found.append(learned(three))
        for node in range(3):
            shutil.rmtree(three.jobs(node)[0])
    outside, inside = found
    assert inside == outside
    assert [len(losses) for losses, _ in inside] == [20, 20, 20] and inside[0][1]
    containers.no_containers(three, users=(user,))
