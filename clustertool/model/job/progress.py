"""This module reads the progress of a program from its log: the last step (iteration, batch) and epoch in a part of it.

Pure. It understands `step=12`, `global step 12`, `Iter: [12/100]`, `batch 12`, `epoch=3`, `'epoch': 0.25`, and tqdm's bars.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

_SPACE = r"\s{0,9}"  # not more: three in a row take the third power of their length
_NUMBER = rf"""['"]?{_SPACE}[=:#]?{_SPACE}[\[(]?{_SPACE}"""
_STEP = re.compile(rf"(?i)(?:\b|_)(?:step|iteration|iter|batch){_NUMBER}(\d{{1,15}})(?![\w.])")
_BAR = re.compile(r"\|\s*(\d{1,15})/\d+ \[")
_EPOCH = re.compile(rf"(?i)\bepoch{_NUMBER}(\d{{1,9}}(?:\.\d{{1,9}})?)")


class StepProgress(NamedTuple):
    """The epoch and the step that a program has printed last; None for one that it does not print."""

    epoch: Optional[float]
    step: Optional[float]


def find_step(text: str) -> Optional[StepProgress]:
    """Find the last whole line with a step, and return this and the epoch in it; without a step, the last epoch.

    None if there is neither. A line ends with a newline or, for bars, a carriage return.
    """
    whole = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    fallback = None
    for line in reversed(whole.replace("\r", "\n").split("\n")):
        steps = _STEP.findall(line) or _BAR.findall(line)
        epochs = _EPOCH.findall(line)
        epoch = float(epochs[-1]) if epochs else None
        if steps:
            return StepProgress(epoch, float(steps[-1]))
        if epochs and fallback is None:
            fallback = StepProgress(epoch, None)
    return fallback
