"""digits-torch and digits-paddle continue on other nodes, in other numbers, with the losses of an undisturbed training."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.cli import Done
from tests.frameworks.examples import Example, curve

pytestmark = pytest.mark.frameworks


def resumed(done: Done, rank: int) -> list[str]:
    """What a trainer has printed at its start."""
    return re.findall(rf"^\[trainer {rank} .*\] resumed at (step \d+ \(from rank \d+\))$", done.out, re.M)


@pytest.mark.parametrize("name", ["digits-torch", "digits-paddle"])
def test_other_nodes_continue_the_same_training(example: Callable[[str], Example], name: str) -> None:
    """The second node of the second job has no files. The last job has the second node only."""
    digits = example(name)
    first, second = digits.site.name(0), digits.site.name(1)
    whole = curve(digits.run("--script", "train.py --epochs 7").ends(0), 0)
    assert len(whole) == 7
    a = digits.run("--job-id", "a", "--only", first, "--script", "train.py --epochs 4").ends(0)
    newest = digits.site.jobs(0)[-1] / "output/checkpoints/step-000000048"
    newest.write_bytes(newest.read_bytes()[:-1])
    options = ("--all-ranks", "--nproc-per-node", 2, "--script", "train.py --epochs 6")
    b = digits.run("--job-id", "b", "--resume", "a", *options).ends(0)
    assert [resumed(b, rank) for rank in range(4)] == [["step 36 (from rank 0)"]] * 4
    c = digits.run("--job-id", "c", "--resume", "b", "--only", second, "--script", "train.py --epochs 7").ends(0)
    assert (resumed(a, 0), resumed(c, 0)) == ([], ["step 72 (from rank 0)"])
    assert curve(a, 0) == pytest.approx(whole[:4], abs=1e-4)
    assert [curve(b, rank) for rank in range(4)] == [pytest.approx(whole[3:6], abs=1e-4)] * 4
    assert curve(c, 0) == pytest.approx(whole[6:], abs=1e-4)
