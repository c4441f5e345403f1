"""Read how busy a machine's processors are and how much memory it has left; zeros for what the kernel does not report."""

from __future__ import annotations

import contextlib
from typing import Tuple


def cpu_ticks() -> Tuple[int, int]:
    """(busy, all) ticks of all cores since boot. Busy is neither idle nor waiting for a disk."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/stat", "rb") as file:
            ticks = [int(text) for text in file.readline().split()[1:9]]  # user and nice include the time of guests
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
    return 0, 0


def memory() -> Tuple[int, int]:
    """(all, available) bytes."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        with open("/proc/meminfo", "rb") as file:
            sizes = {line.split(b":")[0]: int(line.split()[1]) << 10 for line in file.readlines(256)}
        return sizes[b"MemTotal"], sizes[b"MemAvailable"]
    return 0, 0
