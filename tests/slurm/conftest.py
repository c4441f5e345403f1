"""Clusters of Slurm for tests: each is closed, and proved gone, when its tests end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import SOON, until
from tests.node_code import NodeCode
from tests.slurm.slurm_lab import SlurmLab, why_no_slurm
from tests.slurm.slurm_site import SlurmSite


@pytest.fixture(scope="session")
def slurm_here() -> None:
    """Skip where Slurm is not installed. DEMAND_ENGINES=1: fail."""
    reason = why_no_slurm()
    if reason and os.environ.get("DEMAND_ENGINES") == "1":
        pytest.fail(f"DEMAND_ENGINES=1, but {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture
def slurm(slurm_here: None, node_code: NodeCode, tmp_path: Path) -> Iterator[Callable[..., SlurmSite]]:
    """`slurm(3, login=Node(hide=("sbatch",))) -> SlurmSite`: a folder on the laptop of a new cluster that a test may break."""
    with contextlib.ExitStack() as clusters:

        def make(nodes: int = 3, **options: Any) -> SlurmSite:
            number = len(list(tmp_path.glob("site*")))
            lab = clusters.enter_context(SlurmLab(nodes, tmp_path / f"lab{number}", **options))
            node_code.put_into(lab.home(0))
            return clusters.enter_context(contextlib.closing(SlurmSite(tmp_path / f"site{number}", lab)))

        yield make


@pytest.fixture(scope="session")
def three_nodes(slurm_here: None, node_code: NodeCode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with SlurmLab(3, tmp_path_factory.mktemp("slurm") / "lab") as lab:
        node_code.put_into(lab.home(0))
        yield lab


@pytest.fixture
def queue(three_nodes: SlurmLab, tmp_path: Path) -> Iterator[SlurmSite]:
    """A folder on the laptop of a cluster of 3 nodes that all tests share: its queue, nodes and file system are empty."""
    site = SlurmSite(tmp_path / "site", three_nodes)
    kept = set(site.shared.iterdir())  # mount points of the hosts, and the node's code
    try:
        yield site
        until(lambda: not three_nodes.slurm("squeue", "--noheader"), SOON, lambda: "the queue to be empty")
    finally:
        three_nodes.cancel_all()
        site.close()
        for path in set(site.shared.iterdir()) - kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
