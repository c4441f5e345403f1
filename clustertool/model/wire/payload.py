"""A sink takes a payload in parts of 64 KiB as it arrives, so no payload is in memory as a whole."""

from __future__ import annotations

_CHUNK = 1 << 16


class Sink:
    """`size`: the bytes that are to come. This one forgets them."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._buffer = memoryview(bytearray(min(size, _CHUNK)))
        self._filled = 0

    def room(self) -> memoryview:
        """For the bytes that come next."""
        return self._buffer[self._filled : self._filled + self.left]

    def took(self, size: int) -> None:
        """So many have come into room()."""
        self._filled += size
        self.left -= size
        if not self.left or self._filled == len(self._buffer):
            self.put(self._buffer[: self._filled])
            self._filled = 0

    def write(self, data: memoryview) -> None:
        while len(data):
            room = self.room()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.took(size)
            data = data[size:]

    def put(self, data: memoryview) -> None:
        """The next bytes, up to 64 KiB. A receiver that needs them later copies them."""

    def keep(self) -> bool:
        """Called when all of it has arrived. Returns False if it is wrong or was not expected."""
        return False

    def drop(self) -> None:
        """It is not wanted any more."""


class MemorySink(Sink):
    """Keeps it as it is, in `data`."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.data = bytearray()

    def put(self, data: memoryview) -> None:
        self.data += data
