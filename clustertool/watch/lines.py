"""This module joins a rank's bytes to whole lines, for any split of the bytes on their way, and merges and cuts logs.

One `Lines` belongs to one (role, rank, attempt). Bytes are kept undecoded until their line
ends, so a chunk may end inside a UTF-8 sequence. Bytes that are not UTF-8 are shown as backslash escapes. `\\r` ends a segment
of a line; a line is its last segment that is not empty: `\\r\\n` is a newline, and a progress bar is its last state.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence

from clustertool.model.wire.stream_messages import StreamFrame

_ERRORS = "backslashreplace"
_START = "Traceback (most recent call last):"
_LAST = ("end", "closed")  # of the frames of a node
_decoder = codecs.getincrementaldecoder("utf-8")
Frame = tuple[int, StreamFrame, bytes]


class Lines:
    """The text of one stream, joined to lines: complete ones, a progress bar that is still being drawn, and the rest.

    Memory is bounded by `limit` (bytes of one line, which may change), also for a program that prints no newline: longer lines
    are cut, with a note.
    """

    def __init__(self, limit: int = 16 << 20, period: float = 1.0) -> None:
        self.limit = limit
        self._period = period
        self._open = bytearray()  # the segment being written
        self._dropped = 0  # bytes of it beyond the limit
        self._bar = ""  # the last segment that is complete and not empty
        self._is_bar = False  # a "\r" came since the last newline
        self._shown = ""  # what take_bar() gave of this line
        self._shown_at = float("-inf")
        self._fed = self._seen = 0  # bytes so far, and at the last take_bar()
        self._changed_at = 0.0

    @property
    def buffered(self) -> int:
        """The bytes in memory, approximately."""
        return len(self._open) + len(self._bar)

    def feed(self, data: bytes) -> list[str]:
        """Add data and return the lines that it completes."""
        if len(data) > self.limit:  # so that no line inside one chunk can be longer than the limit
            starts = range(0, len(data), self.limit)
            return [line for start in starts for line in self.feed(data[start : start + self.limit])]
        self._fed += len(data)
        first = data.find(b"\n")
        if first < 0:
            self._add(data)
            return []
        last = data.rfind(b"\n")
        lines = self._close(data[:first])
        if first < last:
            # A newline byte is never part of another character, so whole lines can be decoded in one go.
            text = data[first + 1 : last].decode("utf-8", _ERRORS)
            lines += map(_visible, text.split("\n")) if "\r" in text else text.split("\n")
        self._add(data[last + 1 :])
        return lines

    def take_bar(self, now: float) -> list[str]:
        """Return [the progress bar without a newline so far] if it has changed; else, or within a period of the last one, [].

        A last part without a carriage return counts only when nothing has come for a period. now: in seconds.
        """
        if self._fed != self._seen:
            self._seen, self._changed_at = self._fed, now
        if not self._is_bar or now - self._shown_at < self._period:
            return []
        # A segment without its "\r" may be half a bar; after a period of silence it is all there is.
        silent = now - self._changed_at >= self._period
        text = self._take_line() if self._open and silent else self._bar
        if not text.strip() or text == self._shown:
            return []
        self._shown, self._shown_at = text, now
        return [text]

    def end(self) -> list[str]:
        """Return [the last line] if the stream ended without a newline; [] else, or if take_bar() has returned this text."""
        return self._close(b"") if self._open or self._bar else []

    def _close(self, data: bytes) -> list[str]:
        """Complete the current line with `data`, return [line], and begin a new one; [] if take_bar() has returned the text."""
        self._add(data)
        line = self._take_line() if self._open else self._bar
        lines = [] if line and line == self._shown else [line]
        self._clear_segment()
        self._bar = self._shown = ""
        self._is_bar = False
        return lines

    def _add(self, data: bytes) -> None:
        """Append data without a newline to the current line.

        Of segments that end with a carriage return only the last one is kept.
        """
        ended, back, rest = data.rpartition(b"\r")
        if back:
            self._is_bar = True
            _, back, last = ended.rstrip(b"\r").rpartition(b"\r")
            if back:
                self._clear_segment()
            self._append(last)
            if self._open:
                self._bar = self._take_line()
            self._clear_segment()
        self._append(rest)

    def _append(self, data: bytes) -> None:
        """Append data to the current segment up to the limit, and count the bytes beyond it."""
        room = max(0, self.limit - len(self._open))
        self._open += data if len(data) <= room else data[:room]
        self._dropped += max(0, len(data) - room)

    def _clear_segment(self) -> None:
        if self._open:
            self._open = bytearray()
        self._dropped = 0

    def _take_line(self) -> str:
        """Decode the current segment, with a note if a part of it was cut."""
        if not self._dropped:
            return self._open.decode("utf-8", _ERRORS)
        whole = len(self._open) + self._dropped
        # An incremental decoder leaves out the character that the cut went through.
        return f"{_decoder(_ERRORS).decode(self._open)} [cut: this line has {whole} bytes]"


def _visible(line: str) -> str:
    """Return what a terminal shows of a line with carriage returns: its last segment that is not empty."""
    return line.rstrip("\r").rpartition("\r")[2]


def merge_by_time(nodes: Iterable[int], following: Callable[[int], Frame]) -> Iterator[Frame]:
    """Yield the frames of several nodes by time, with one frame of each in memory, until each node has sent its last one.

    following: waits for a node's next frame. A node's frames stay in order. Those without a time, as events, keep their place.
    """
    heads = {node: following(node) for node in nodes}
    times = dict.fromkeys(heads, 0.0)
    while heads:
        for node, (_, header, _) in heads.items():
            if header["type"] == "log":
                times[node] = max(times[node], float(header.get("t", times[node])))
        first = min(heads, key=lambda node: (times[node], node))
        frame = heads[first]
        yield frame
        if frame[1]["type"] in _LAST:
            del heads[first]
        else:
            heads[first] = following(first)


def excerpt(lines: Sequence[str], most: int = 20) -> list[str]:
    """Select the last Python traceback, those that it follows from, and all lines after it; else the last `most` lines.

    Of more than 3 * `most` lines with a traceback, the first `most` and the last 2 * `most` are selected, with a line between
    them that counts the others.
    """
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(_START)]
    if not starts:
        return list(lines[-most:])
    first = starts[-1]
    # A chained traceback ("During handling ...") is one story: begin with its first part.
    for earlier in reversed(starts[:-1]):
        between = " ".join(lines[earlier:first])
        if "During handling of the above exception" not in between and "direct cause of the following" not in between:
            break
        first = earlier
    found = list(lines[first:])
    if len(found) <= 3 * most:
        return found
    return [*found[:most], f"... {len(found) - 3 * most} lines ...", *found[-2 * most :]]
