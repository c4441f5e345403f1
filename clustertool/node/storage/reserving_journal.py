"""A journal reserves room on the disk: the records of a job go on where its ranks fill the disk."""

from __future__ import annotations

import contextlib
import ctypes
import os

from clustertool.node.storage.files import Journal

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


class ReservingJournal(Journal):
    """A journal with room reserved on the disk while it is open: `ahead` bytes, from its end on."""

    def __init__(self, fd: int, ahead: int) -> None:
        super().__init__(fd)
        self._ahead = ahead
        self._reserved = 0  # up to this size
        self._reserve_room()

    def flush(self) -> None:
        """Write the queued lines, and reserve room behind them again."""
        if self._waiting:
            super().flush()
            self._reserve_room()

    def close(self, durable: bool = False) -> None:
        """Write the queued lines, free the rest of the reserved room, and close the file. durable: as of Journal."""
        self.flush()
        if self._reserved:  # no other process writes here meanwhile: this frees blocks, and no line
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size)
        super().close(durable)

    def _reserve_room(self) -> None:
        """Reserve `ahead` bytes behind the end of the file, if less than half of that is reserved."""
        size = os.fstat(self._fd).st_size
        if size + self._ahead // 2 > self._reserved and reserve(self._fd, size, self._ahead):
            self._reserved = size + self._ahead


def reserve(fd: int, start: int, size: int) -> bool:
    """Reserve blocks of a file for `size` bytes from `start` on, so that a full disk still takes them; its length stays.

    Returns False if there is no room, or the file system cannot do it (NFS before 4.2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or libc.fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, _KEEP_SIZE, start, size) == 0)
