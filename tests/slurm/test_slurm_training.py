"""The examples learn in Slurm what they learn by ssh on the same machines.

docs/slurm.md has a table of it. UPDATE_PAGES=1 writes it.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cases import small_word2vec
from tests.cli import HELLO
from tests.frameworks.examples import TIMEOUT, activate, digits_job, find_venv, prepare
from tests.slurm import page
from tests.slurm.engine_runs import SLURM, SSH, use
from tests.slurm.slurm_site import SlurmSite

NODES = 3
LOSS = r"\bloss=([0-9.]+)"
WHOLE = r"^trained steps=\d+ loss=([0-9.]+)"  # of a whole training; the other lines of word2vec come by the clock


class Learned(NamedTuple):
    """ranks: of each node, by role. losses: of each rank, in the order of the steps."""

    ranks: list[list[str]]
    losses: dict[str, list[str]]


def learns(
    site: SlurmSite, engine: str, folder: Path, *options: object, prelude: str = "", loss: str = LOSS
) -> Learned:
    use(site, engine, prelude=prelude)
    site.inv("run", "--workspace", folder, *options, timeout=TIMEOUT).ends(0)
    nodes = site.jobs_of_nodes()
    logs = [{path.name: path.read_text() for path in sorted((job / "log").glob("*log.*"))} for job in nodes]
    for job in nodes:
        shutil.rmtree(job)
    site.gone()
    losses = {name: re.findall(loss, text, re.M) for its in logs for name, text in its.items()}
    return Learned([list(its) for its in logs], losses)


def both(site: SlurmSite, folder: Path, *options: object, **texts: str) -> tuple[Learned, Learned]:
    return (learns(site, SSH, folder, *options, **texts), learns(site, SLURM, folder, *options, **texts))


def row(name: str, mode: str, learned: Learned) -> None:
    """The row of an example: its ranks on each node, and its last losses."""
    ranks = "; ".join(" ".join(its) for its in learned.ranks)
    last = dict.fromkeys(losses[-1] for losses in learned.losses.values() if losses)
    page.check_row("training", name, [mode, ranks], [", ".join(last) or "none"])


@pytest.mark.engines
def test_hello(queue: SlurmSite) -> None:
    ssh, slurm = both(queue, HELLO, "--nproc-per-node", 2)
    assert slurm == ssh
    assert slurm.ranks == [
        ["workerlog.0", "workerlog.1"],
        ["workerlog.2", "workerlog.3"],
        ["workerlog.4", "workerlog.5"],
    ]
    row("hello", "collective", slurm)


@pytest.mark.engines
def test_word2vec(queue: SlurmSite) -> None:
    """In sync mode pservers sum what trainers send in the order of the trainers, so all losses are equal."""
    folder = small_word2vec(queue.folder)
    prelude = f"export PATH={Path(sys.executable).parent}:$PATH"
    ssh, slurm = both(queue, folder, "--server-num", 1, "--worker-num", 1, prelude=prelude, loss=WHOLE)
    assert slurm.ranks == ssh.ranks == [[f"serverlog.{node}", f"workerlog.{node}"] for node in range(NODES)]
    assert slurm.losses == ssh.losses
    assert slurm.losses["workerlog.0"]
    row("word2vec", "ps", slurm)


@pytest.mark.engines
def test_digits_torch(queue: SlurmSite, tmp_path: Path) -> None:
    """All losses of all epochs are equal."""
    venv = find_venv("digits-torch")
    folder = digits_job(queue.folder, prepare(tmp_path / "digits", "--shards", "6"))
    ssh, slurm = both(queue, folder, "--nproc-per-node", 1, prelude=activate(venv))
    assert slurm == ssh
    assert [len(losses) for losses in slurm.losses.values()] == [20] * NODES
    row("digits-torch", "collective", slurm)
