"""A terminal whose far end a test reads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def far_end(encoding: str = "utf-8") -> Iterator[tuple[TextIO, bytearray]]:
    """(what to write to, what arrives). All has arrived once this is left."""
    master, slave = os.openpty()
    data = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(master, 4096):
                data.extend(chunk)
        except OSError:  # EIO: closed at the other end
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w", encoding=encoding) as out:
        yield out, data
    reader.join()
    os.close(master)
