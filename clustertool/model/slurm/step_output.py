"""This module reads the output of srun and its tasks, which join the job: slurm.out of a submission."""

from __future__ import annotations

import re
from typing import NamedTuple, Tuple

_MOST = 10  # lines
_LONGEST = 300  # characters of a line
_TASK_END = re.compile(r"srun: error: \S+ tasks? \S+: Exited with exit code ([0-9]{1,3})")


class StepOutput(NamedTuple):
    """lines: the last different ones. code: the highest exit code of a task, 0 if there is none."""

    lines: Tuple[str, ...]
    code: int

    @property
    def reason(self) -> str:
        """The last line that is no continuation of another one."""
        return next((line for line in reversed(self.lines) if not line.startswith(" ")), "")


def read_output(text: str) -> StepOutput:
    """Read the lines of an output, without those of srun about the ends of tasks, and the exit codes of these."""
    lines = [line.rstrip()[:_LONGEST] for line in text.splitlines() if line.strip()]
    codes = [int(found[1]) for found in map(_TASK_END.match, lines) if found]
    shown = [line for line in lines if not _TASK_END.match(line)]
    last_of_each = dict.fromkeys(reversed(shown))  # each node writes the same error
    return StepOutput(tuple(reversed([*last_of_each][:_MOST])), max(codes, default=0))
