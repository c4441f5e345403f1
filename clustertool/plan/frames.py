"""A frame is a small JSON header and raw bytes; the same codec serves laptop, node and lead, sans I/O.

Wire: 4 bytes header length, 4 bytes payload length (big endian), header (UTF-8 JSON object), payload. Both lengths are
bounded by the reader, so a stranger's garbage ends in FrameError and never in memory.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, Tuple

Header = Dict[str, Any]
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
    """feed() bytes as they come, get whole frames."""

    def __init__(self, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._max_header = max_header
        self._max_payload = max_payload

    def feed(self, data: bytes) -> Iterator[Tuple[Header, bytes]]:
        """Yield (header, payload) for every frame that is complete now. Raises FrameError."""
        self._buffer += data
        at = 0
        view = memoryview(self._buffer)
        frames = []
        try:
            while len(view) - at >= _LENGTHS.size:
                head, body = _LENGTHS.unpack_from(view, at)
                if head > self._max_header or body > self._max_payload:
                    raise FrameError(f"a frame of {head}+{body} bytes")
                end = at + _LENGTHS.size + head + body
                if len(view) < end:
                    break
                start = at + _LENGTHS.size
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
