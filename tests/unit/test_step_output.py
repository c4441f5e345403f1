"""What srun and its tasks have printed: the lines to show, and the exit code of the tasks."""

from __future__ import annotations

import pytest

from clustertool.model.slurm.slurm_answers import read_output

FAILED = """\
srun: cluster configuration lacks support for cpu binding
clustertool join: --nproc-per-node gpu: node0 has none
  fix: give a number, or auto
clustertool join: --nproc-per-node gpu: node0 has none
  fix: give a number, or auto
srun: error: node0: task 0: Exited with exit code 64
srun: error: node1: task 1: Exited with exit code 64
"""


@pytest.mark.parametrize(
    ("text", "lines", "code"),
    [
        ("", (), 0),
        (FAILED, tuple(FAILED.splitlines()[:3]), 64),
        (
            "slurmstepd: error: execve(): python9: No such file\nsrun: error: n1: tasks 0-1: Exited with exit code 2\n",
            1,
            2,
        ),
        ("srun: error: node0: task 0: Killed\n", 1, 0),
        ("x" * 1000 + "\n" + "\n".join(map(str, range(30))), tuple(map(str, range(20, 30))), 0),
    ],
)
def test_the_last_lines_and_the_code(text: str, lines: tuple[str, ...] | int, code: int) -> None:
    found = read_output(text)
    assert found[1] == code
    assert found[0] == lines or len(found[0]) == lines
