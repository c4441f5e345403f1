"""This module reads growth.jsonl, the supervisor's record of how logs have grown (model/job/usage.py).

A log has no times itself. The time of a byte is that of the first record in which the log is long enough to have it.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Dict, Iterator, Tuple

from clustertool.model.paths import OURS
from clustertool.node.jobs.rank_log import line_start
from clustertool.node.storage import files

_LATEST = 1e11  # seconds since the epoch; the laptop refuses a later time


def read(job: int) -> Iterator[Tuple[float, str, int]]:
    """(time by this node's clock, log, size), in order of time. `job`: the descriptor of the job's directory."""
    try:
        fd = files.open_read(job, f"{OURS}/growth.jsonl")
    except OSError:  # nothing has grown, or it cannot be known
        return
    with open(fd, "rb") as growth:
        for line in growth:
            # A line can be torn by a crash, or not ours.
            with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                t, name, size = json.loads(line)
                t, size = float(t), int(size)
                if 0 <= t < _LATEST and size >= 0:
                    yield t, str(name), size


def sizes_at(job: int, t: float) -> Dict[str, int]:
    """The size that each log had at a time, as far as it is recorded."""
    return {name: size for at, name, size in read(job) if at < t}


def offset_at(fd: int, before: int, t: float) -> int:
    """Where the first line of a log begins that was completed at time `t` or later. `before`: its recorded size at `t`.

    Nothing that is later is left out: where the records are coarse, some older lines follow.
    """
    about = os.fstat(fd)
    if about.st_mtime < t:
        return line_start(fd, about.st_size)
    return line_start(fd, before) if before <= about.st_size else 0  # else its program has truncated it
