"""A frame is a small JSON header and raw bytes. Laptop, node and coordinator use the same codec, which does no I/O.

Wire: 4 bytes header length, 4 bytes payload length (big endian), header (UTF-8 JSON object), payload. The reader limits
both lengths, so invalid input ends in FrameError and does not fill memory. A reader may change `max_header` while it waits
for a large answer.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

Header = Dict[str, Any]
Frame = Tuple[Header, bytes]
_LENGTHS = struct.Struct(">II")
MAX_HEADER = 64 << 20  # a plan of 1000 nodes fits; the coordinator's reader is far stricter
MAX_PAYLOAD = 4 << 20
_CHUNK = 1 << 16  # bytes that a sink gets at a time


class FrameError(ValueError):
    """The bytes are not valid frames."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    """Encode a frame with its payload."""
    return head(header, len(payload)) + payload


def head(header: Header, size: int) -> bytes:
    """Encode a frame up to its payload of `size` bytes, which is to follow."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), size) + text


class Sink:
    """The destination of a payload, which gets it in parts of 64 KiB as it arrives. `size`: its bytes. This class drops it."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._buffer = memoryview(bytearray(min(size, _CHUNK)))
        self._filled = 0

    def room(self) -> memoryview:
        """Return the buffer for the bytes that come next."""
        return self._buffer[self._filled : self._filled + self.left]

    def took(self, size: int) -> None:
        """Note that so many bytes have come into room(), and pass the buffer to put() if it is full or all has come."""
        self._filled += size
        self.left -= size
        if not self.left or self._filled == len(self._buffer):
            self.put(self._buffer[: self._filled])
            self._filled = 0

    def write(self, data: memoryview) -> None:
        """Copy bytes into room(), as if they had come there."""
        while len(data):
            room = self.room()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.took(size)
            data = data[size:]

    def put(self, data: memoryview) -> None:
        """Ignore the next bytes, up to 64 KiB. A subclass stores them: one that needs them later copies them."""

    def keep(self) -> bool:
        """Finish when all bytes have arrived, and return whether they are right and were expected; here False."""
        return False

    def drop(self) -> None:
        """Do nothing. A subclass removes what it has stored: the bytes are not wanted any more."""


class MemorySink(Sink):
    """A sink that keeps the payload as it is, in `data`."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.data = bytearray()

    def put(self, data: memoryview) -> None:
        self.data += data


class Decoder:
    """A decoder of one connection: feed() gets its bytes as they arrive. With `sink` a payload is never in memory as a whole.

    `sink` returns the destination of a payload for its header and size; the frame comes without it, when all of it has arrived.
    A reader can avoid a copy: while there is a room(), it fills it with the next bytes, and taken() reports their number.
    `check` gets each header and its size, and may raise FrameError.
    """

    def __init__(
        self,
        max_header: int = MAX_HEADER,
        max_payload: int = MAX_PAYLOAD,
        sink: Optional[Callable[[Header, int], Sink]] = None,
        check: Optional[Callable[[Header, int], None]] = None,
    ) -> None:
        self._buffer = bytearray()
        self.max_header = max_header
        self._check = check
        self._max_payload = max_payload
        self._sink = sink
        self._into: Optional[Sink] = None
        self._header: Header = {}

    def room(self) -> Optional[memoryview]:
        """Return where the next bytes belong, as long as they are those of a payload with a sink; else None."""
        return None if self._into is None else self._into.room()

    def taken(self, size: int) -> List[Frame]:
        """Note that so many bytes have come into room(), and return the frame that they complete, in a list, or []."""
        if self._into is None:
            return []
        self._into.took(size)
        return self._complete_frame(self._into)

    def _complete_frame(self, sink: Sink) -> List[Frame]:
        """Return the frame of this sink if all of its payload has arrived, else []."""
        self._into = sink if sink.left else None
        return [] if sink.left else [(self._header, b"")]

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes, and return an iterator over (header, payload) of each frame that is complete now.

        The payload is b"" if a sink has it. Raises FrameError for a length above its limit, a header that is no JSON object,
        and by `check`.
        """
        frames: List[Frame] = []
        if self._into is not None:
            part = memoryview(data)[: self._into.left]
            self._into.write(part)
            data = data[len(part) :]
            frames = self._complete_frame(self._into)
        self._buffer += data
        at = 0
        view = memoryview(self._buffer)
        try:
            while len(view) - at >= _LENGTHS.size:
                head, body = _LENGTHS.unpack_from(view, at)
                if head > self.max_header or body > self._max_payload:
                    raise FrameError(f"a frame of {head}+{body} bytes")
                start = at + _LENGTHS.size + head
                if len(view) < start + (0 if self._sink else body):
                    break
                header = _header(bytes(view[start - head : start]))
                if self._check is not None:
                    self._check(header, head)
                at = min(start + body, len(view))
                if self._sink is None or not body:
                    frames.append((header, bytes(view[start:at])))
                    continue
                sink, self._header = self._sink(header, body), header
                sink.write(view[start:at])
                frames += self._complete_frame(sink)
        finally:
            view.release()
        del self._buffer[:at]
        return iter(frames)


def _header(text: bytes) -> Header:
    """Parse a header. Raises FrameError for what is no JSON object."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is no JSON") from error
    if not isinstance(header, dict):
        raise FrameError("a frame's header is no object")
    return header
