"""How far a training program is, read from what it prints: the last step (iteration, batch) and epoch in a piece of its log.

Pure. Understood are `step=12`, `global step 12`, `Iter: [12/100]`, `batch 12`, `epoch=3`, `'epoch': 0.25`, and tqdm's bars.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

_NUMBER = r"""['"]?\s*[=:#]?\s*[\[(]?\s*"""
_STEP = re.compile(rf"(?i)(?:\b|_)(?:step|iteration|iter|batch){_NUMBER}(\d{{1,15}})(?![\w.])")
_BAR = re.compile(r"\|\s*(\d{1,15})/\d+ \[")
_EPOCH = re.compile(rf"(?i)\bepoch{_NUMBER}(\d{{1,9}}(?:\.\d{{1,9}})?)")


class Progress(NamedTuple):
    """What is not told is None."""

    epoch: Optional[float]
    step: Optional[float]


def find(text: str) -> Optional[Progress]:
    """Of the last whole line that tells a step, or at least an epoch. A line ends with a newline or, as bars do, a return."""
    whole = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    fallback = None
    for line in reversed(whole.replace("\r", "\n").split("\n")):
        steps = _STEP.findall(line) or _BAR.findall(line)
        epochs = _EPOCH.findall(line)
        epoch = float(epochs[-1]) if epochs else None
        if steps:
            return Progress(epoch, float(steps[-1]))
        if epochs and fallback is None:
            fallback = Progress(epoch, None)
    return fallback
