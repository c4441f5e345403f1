"""This module reads a rank's progress from the end of its log: the last epoch and step, and the time of the last output."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple, Optional

from clustertool.model.job import progress as steps
from clustertool.node.storage import files

_PIECE = 8192


class RankProgress(NamedTuple):
    """`output`: when the log was written last (or made, if it is empty), by this node's clock. `size`: its bytes."""

    epoch: Optional[float]
    step: Optional[float]
    output: float
    size: int


def progress(job: int, log: str, piece: int = _PIECE) -> Optional[RankProgress]:
    """None where there is no such log. `job`: the descriptor of its directory; `piece`: bytes in which a step is searched."""
    with contextlib.suppress(OSError):
        fd = files.open_read(job, log)
        try:
            about = os.fstat(fd)
            start = max(0, about.st_size - piece)
            found = steps.find(os.pread(fd, piece, start).decode("utf-8", "replace"))
        finally:
            os.close(fd)
        epoch, step = found or (None, None)
        return RankProgress(epoch, step, round(about.st_mtime, 2), about.st_size)
    return None
