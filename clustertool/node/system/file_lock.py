"""Take the flock of an open file, with or without a time limit."""

from __future__ import annotations

import fcntl
import time

_POLL = 0.01


def try_lock(fd: int, how: int) -> bool:
    """Lock an open file without waiting. how: fcntl.LOCK_EX or LOCK_SH.

    Returns False if another process has the lock, or the file system has no locks.
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_within(fd: int, how: int, seconds: float) -> bool:
    """Lock an open file as try_lock() does, trying again for up to `seconds`. Return whether it is locked."""
    end = time.monotonic() + seconds
    while not try_lock(fd, how):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True
