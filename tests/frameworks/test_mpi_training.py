"""PyTorch as ranks of mpirun on three machines: it learns exactly what it learns by ssh."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import mpi
from tests.cli import LabSite
from tests.frameworks.examples import TIMEOUT, activate, digits_job, find_venv
from tests.frameworks.test_join_training import learned
from tests.lab.conftest import lab, site
from tests.mpi import Mpi

__all__ = ["lab", "site"]  # fixtures: nodes with networks of their own


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", mpi.each(*mpi.BOTH))
def test_digits_with_gloo(site: Callable[..., LabSite], digits: Path, kind: Mpi) -> None:
    """The ranks connect by MASTER_ADDR. The losses of all epochs are equal on all ranks, and the models are the same bytes."""
    venv = find_venv("digits-torch")
    three = mpi.use(site(3), kind, python=False, prelude=(activate(venv), *kind.prelude(python=False)))
    folder = digits_job(three.folder, digits)
    found = []
    for mode in ("collective", "mpi"):
        three.inv("run", "-w", folder, "--mode", mode, "--job-id", "digits", timeout=TIMEOUT).ends(0)
        found.append(learned(three))
        for node in range(3):
            shutil.rmtree(three.jobs(node)[0])
    by_ssh, by_mpi = found
    assert by_mpi == by_ssh
    assert [len(losses) for losses, _ in by_ssh] == [20, 20, 20] and by_ssh[0][1]
