"""A frame is a small JSON header and raw bytes; the same codec serves laptop, node and lead, sans I/O.

Wire: 4 bytes header length, 4 bytes payload length (big endian), header (UTF-8 JSON object), payload. Both lengths are
bounded by the reader, so a stranger's garbage ends in FrameError and never in memory.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, List, Optional, Tuple

Header = Dict[str, Any]
Frame = Tuple[Header, bytes]
_LENGTHS = struct.Struct(">II")
MAX_HEADER = 64 << 20  # a plan of 1000 nodes fits; the lead's reader is far stricter
MAX_PAYLOAD = 4 << 20


class FrameError(ValueError):
    """The bytes are not frames of ours."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    return head(header, len(payload)) + payload


def head(header: Header, size: int) -> bytes:
    """A frame up to its payload of `size` bytes, which is to follow."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), size) + text


class Decoder:
    """feed() bytes as they come, get whole frames. The rest of a payload of `apart` bytes or more has a place of its own.

    Who reads can put it there: room() is the place, taken() says how much has come. Such a payload is a bytearray.
    """

    def __init__(self, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD, apart: int = 1 << 62) -> None:
        self._buffer = bytearray()
        self._max_header = max_header
        self._max_payload = max_payload
        self._apart = apart
        self._large: Optional[bytearray] = None
        self._header: Header = {}
        self._got = 0  # bytes of it that have come

    def room(self) -> Optional[memoryview]:
        """Where the next bytes belong, as long as they are a large payload's."""
        return None if self._large is None else memoryview(self._large)[self._got :]

    def taken(self, size: int) -> List[Frame]:
        """So many bytes have come into room()."""
        payload = self._large
        self._got += size
        if payload is None or self._got < len(payload):
            return []
        self._large = None
        return [(self._header, payload)]  # type: ignore[list-item]

    def _begin(self, header: Header, size: int, start: memoryview) -> None:
        self._header, self._large, self._got = header, bytearray(size), len(start)
        self._large[: len(start)] = start

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield (header, payload) for every frame that is complete now. Raises FrameError."""
        frames: List[Frame] = []
        room = self.room()
        if room is not None:
            size = min(len(room), len(data))
            room[:size], data = data[:size], data[size:]
            frames = self.taken(size)
        self._buffer += data
        at = 0
        view = memoryview(self._buffer)
        try:
            while len(view) - at >= _LENGTHS.size:
                head, body = _LENGTHS.unpack_from(view, at)
                if head > self._max_header or body > self._max_payload:
                    raise FrameError(f"a frame of {head}+{body} bytes")
                end = at + _LENGTHS.size + head + body
                start = at + _LENGTHS.size
                if len(view) < end:
                    if body >= self._apart and len(view) >= start + head:
                        self._begin(_header(bytes(view[start : start + head])), body, view[start + head :])
                        at = len(view)
                    break
                frames.append((_header(bytes(view[start : start + head])), bytes(view[start + head : end])))
                at = end
        finally:
            view.release()
        del self._buffer[:at]
        return iter(frames)


def _header(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is no JSON") from error
    if not isinstance(header, dict):
        raise FrameError("a frame's header is no object")
    return header
