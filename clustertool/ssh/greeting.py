"""A greeting is the lines that a login and the start of the node side print. They share one deadline and one limit of bytes."""

from __future__ import annotations

import time
from typing import Any

from clustertool.errors import PreflightError, Unreachable

MOST_BYTES = 64 << 10
_LEAST_SECONDS = 6.0
_CHUNK = 1 << 14
_SHOWN = 60  # characters of a line that does not end
_FIX = "check the start files of the account's shell on that node (.bashrc, .profile)"
_SLOW = "a slow node needs a larger CONNECT_TIMEOUT in conf.py"


def seconds_for(connect_timeout: float) -> float:
    """How long the login and the start of the node side may take together, given CONNECT_TIMEOUT."""
    return max(_LEAST_SECONDS, 3 * connect_timeout)


class Greeting:
    """Reads lines from a new channel. The bytes after the last line are in `rest`."""

    def __init__(self, channel: Any, node: str, seconds: float) -> None:
        self._channel = channel
        self._node = node
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._taken = 0
        self.rest = b""

    def line(self) -> str:
        """The next line without its newline.

        Raises EOFError at the end of the channel, PreflightError for too many bytes, Unreachable after the deadline.
        """
        start = 0
        while True:
            at = self.rest.find(b"\n", start)
            if at >= 0:
                line, self.rest = self.rest[:at], self.rest[at + 1 :]
                self._taken += at + 1
                if self._taken > MOST_BYTES:
                    raise self._endless()
                return line.decode(errors="backslashreplace")
            if self._taken + len(self.rest) > MOST_BYTES:
                raise self._endless()
            start = len(self.rest)
            self.rest += self._more()

    def skip_to(self, mark: str) -> None:
        """Discard every line up to `mark`: what a .bashrc prints comes before it."""
        while self.line() != mark:
            pass

    def _more(self) -> bytes:
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._late()
        self._channel.settimeout(left)
        try:
            piece: bytes = self._channel.recv(_CHUNK)
        except TimeoutError:
            raise self._late() from None
        if not piece:
            raise EOFError
        return piece

    def _late(self) -> Unreachable:
        if not self._taken and not self.rest:
            return Unreachable(f"no answer for {self._seconds:g} s", f"is the node overloaded? {_SLOW}", self._node)
        last = self.rest[-_SHOWN:].decode(errors="backslashreplace")
        shown = f", its output so far ends with {last!r}" if last else ""
        return Unreachable(
            f"the login is not complete after {self._seconds:g} s{shown}", f"{_FIX}; {_SLOW}", self._node
        )

    def _endless(self) -> PreflightError:
        return PreflightError(f"the login prints without end (more than {MOST_BYTES >> 10} KiB)", _FIX, self._node)
