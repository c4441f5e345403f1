"""A piece writer stores an incoming piece on disk, and under its name in the store once all of it matches its digest.

An error of the disk is raised when the piece is stored, since the sender of the bytes is not the cause.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Optional

from clustertool.model.wire.payload import Sink
from clustertool.node.storage import files


class Part(Sink):
    """`top`: the folder of pieces. Unless keep() or drop() is called, a file named *.part stays there."""

    def __init__(self, top: str, name: str, size: int) -> None:
        super().__init__(size)
        self._target = os.path.join(top, name)
        self._path = f"{self._target}.{os.urandom(4).hex()}.part"
        self._name = name
        self._fd = -1
        self._hash = hashlib.sha256()
        self._failed: Optional[OSError] = None

    def put(self, data: memoryview) -> None:
        self._hash.update(data)
        if self._failed is None:
            try:
                if self._fd < 0:
                    self._fd = files.make_new(self._path)
                files.write_all(self._fd, data)
            except OSError as error:
                self.drop()
                self._failed = error

    def keep(self) -> bool:
        """False: it does not match its name, and is removed. Raises OSError."""
        if self._hash.hexdigest() != self._name:
            self.drop()
            return False
        if self._failed is not None:
            raise self._failed
        try:
            os.close(self._fd)
            self._fd = -1
            os.rename(self._path, self._target)
        except OSError:
            self.drop()
            raise
        return True

    def drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._path)
