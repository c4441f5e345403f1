"""This module ties a process, by prctl(2), to the processes that it starts, and to the one that has started it.

They are apart from processes.py: an agent does not need them, and to import ctypes takes 1.5 ms of CPU time.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)  # once: a forked child of a process with threads must not load it


def become_subreaper() -> None:
    """Make the kernel give orphaned descendants to this process instead of init. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """Make the kernel send the signal `number` (0: none) to this process when the thread that started it ends.

    Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def allow_reader(pid: int) -> None:
    """Allow the process `pid` and its descendants to read the stacks of this one, also of the program that it executes.

    A kernel with yama (ptrace_scope 1) otherwise allows this to ancestors only. Ignores the error of a kernel without yama.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2) with one value. Raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
