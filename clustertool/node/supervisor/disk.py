"""A disk that is full is told of when it happens: logs lose lines then, and what fails then may have failed of it."""

from __future__ import annotations

import contextlib
import os

_LITTLE = 64 << 10  # bytes; less is full
_ROOM = 256 << 10  # full until there is as much again


class Disk:
    """The file system of a directory, by its descriptor. look() now and then; `full` is what the last look saw."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self.full = False

    def look(self) -> bool:
        """Whether `full` has changed."""
        was = self.full
        with contextlib.suppress(OSError):
            space = os.fstatvfs(self._directory)
            root = os.geteuid() == 0  # who may use what is reserved for him
            free = (space.f_bfree if root else space.f_bavail) * space.f_frsize
            no_files = space.f_files > 0 and not (space.f_ffree if root else space.f_favail)
            self.full = no_files or free < (_ROOM if was else _LITTLE)
        return self.full != was
