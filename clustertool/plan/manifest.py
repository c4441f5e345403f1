"""A manifest lists a workspace; its digest names the release, so that equal names mean equal content."""

from __future__ import annotations

import hashlib
import json
from typing import BinaryIO, Iterable, NamedTuple


class Entry(NamedTuple):
    """kind: file, dir or link. `content`: a file's SHA-256 in hex, a link's target. Paths are relative, surrogate-escaped."""

    path: str
    kind: str
    mode: int
    size: int
    content: str


def digest(entries: Iterable[Entry]) -> str:
    """32 hex digits that name the release. Order does not matter."""
    return name(line(entry) for entry in sorted(entries, key=lambda entry: entry.path))


def line(entry: Entry) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def name(lines: Iterable[bytes]) -> str:
    """The digest of entries whose lines are given in the order of their paths."""
    state = hashlib.sha256()
    for text in lines:
        state.update(text)
    return state.hexdigest()[:32]


def file_digest(file: BinaryIO) -> str:
    """SHA-256 of an open file's content, in hex."""
    state = hashlib.sha256()
    while True:
        block = file.read(1 << 20)
        if not block:
            return state.hexdigest()
        state.update(block)
