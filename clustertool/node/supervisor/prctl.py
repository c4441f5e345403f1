"""This module ties a process, by prctl(2), to the processes that it starts, and to the one that has started it.

They are apart from processes.py: an agent does not need them, and to import ctypes takes 1.5 ms of CPU time.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make the kernel give orphaned descendants to this process instead of init. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """Make the kernel send the signal `number` (0: none) to this process when the thread that started it ends.

    Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2) with one value. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
