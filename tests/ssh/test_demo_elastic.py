"""`make demo-elastic` shows what it says, also after a demonstration before."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import REPO

STEP = re.compile(r"\] step=(\d+) loss=([\d.]+) ranks=(\d)$", re.M)


@pytest.mark.chaos  # a minute and a half
def test_a_node_is_killed_and_the_loss_continues(tmp_path: Path) -> None:
    """The second time its newest job is at first one that has ended."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("scripts", "workspaces"):
        (tmp_path / name).symlink_to(REPO / name)
    for _ in range(2):
        script = tmp_path / "scripts/demo-elastic.sh"
        done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "epoch 1 begins with 3 nodes (1 node left)" in done.stderr
        resumed = int(re.findall(r"resumed at step (\d+)", done.stdout)[0])
        steps = [(int(step), float(loss), int(ranks)) for step, loss, ranks in STEP.findall(done.stdout)]
        before, after = ([row for row in steps if row[2] == ranks] for ranks in (4, 3))
        assert before + after == steps and resumed >= 100
        assert resumed < after[0][0] <= resumed + 10 and after[-1][0] == 500
        assert after[0][1] < before[0][1] and after[-1][1] < after[0][1]
        assert "127.0.0.2" in done.stdout.split("epoch  began")[1], "the table of epochs names the node that left"
