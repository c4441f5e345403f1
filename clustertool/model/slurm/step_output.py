"""This module reads the output of srun and its tasks, which join the job: slurm.out of a submission."""

from __future__ import annotations

import re
from typing import Tuple

_MOST = 10  # lines
_LONGEST = 300  # characters of a line
_TASK_END = re.compile(r"srun: error: \S+ tasks? \S+: Exited with exit code ([0-9]{1,3})")


def read_output(text: str) -> Tuple[Tuple[str, ...], int]:
    """The last different lines, without those of srun about the ends of tasks, and the highest exit code of a task, 0 if there
    is none."""
    lines = [line.rstrip()[:_LONGEST] for line in text.splitlines() if line.strip()]
    codes = [int(found[1]) for found in map(_TASK_END.match, lines) if found]
    shown = [line for line in lines if not _TASK_END.match(line)]
    last_of_each = dict.fromkeys(reversed(shown))  # each node writes the same error
    return tuple(reversed([*last_of_each][:_MOST])), max(codes, default=0)
