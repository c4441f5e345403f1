"""The command that continues a job without a host is the one that has started it, with two options."""

from __future__ import annotations

import pytest

from clustertool.verbs.run import resume_command


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (
            ["clustertool", "run", "-w", "my job", "--nnodes", "2:4"],
            "clustertool run --resume=a --skip=h -w 'my job' --nnodes 2:4",
        ),
        (
            ["inv", "-f", "x.yaml", "run", "--resume", "b", "--json"],
            "inv -f x.yaml run --resume=a --skip=h --json",
        ),
        (["clustertool", "run", "--resume", "--skip", "g"], "clustertool run --resume=a --skip=h --skip g"),
        (["clustertool", "run", "--resume=b", "-w", "."], "clustertool run --resume=a --skip=h -w ."),
        (
            ["clusterrun", "--nnodes=2:4", "train.py", "run", "--resume", "c"],
            "clusterrun --resume=a --skip=h --nnodes=2:4 train.py run --resume c",
        ),
    ],
)
def test_two_options_are_added(typed, command):
    assert resume_command(typed, "a", "h") == command
