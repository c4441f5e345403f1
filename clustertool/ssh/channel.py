"""A channel runs one /bin/sh: its input, its output, its end. No function here waits for a dead peer."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import paramiko

from clustertool.errors import PreflightError, Unreachable

KEEP = 16 << 20  # bytes kept of each stream of a command
BULK_PACKET = 1 << 17
# Errors that paramiko raises from any send on a lost connection.
BROKEN = (OSError, EOFError, paramiko.SSHException)
_CHUNK = 1 << 18
MOST_BYTES = 64 << 10  # of a greeting
_GREETING_CHUNK = 1 << 14
_LEAST_SECONDS = 6.0
_SHOWN = 60  # characters of a line that does not end
SHELL_FIX = "check the start files of the account's shell on that node (.bashrc, .profile)"
NO_SHELL = ("the login shell did not start /bin/sh", SHELL_FIX)
_SLOW = "a slow node needs a larger CONNECT_TIMEOUT in conf.py"


def discard(channel: Any) -> None:
    """Close a channel without waiting for a peer that does not listen any more."""
    if channel.closed:
        return
    if not channel.eof_received or not channel.status_event.is_set():
        briefly(channel.close)
        return
    with contextlib.suppress(*BROKEN):
        channel.close()  # the node spoke a moment ago: this does not hang


def briefly(do: Callable[[], None], limit: float = 1.0) -> None:
    """Run a function that a dead peer could block; after `limit` seconds it may continue alone."""

    def quietly() -> None:
        with contextlib.suppress(*BROKEN):  # it has ended already
            do()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(limit)


# ---- reading both streams of a channel without threads


class _DataEvent:
    """paramiko sets this event when bytes arrive. Only the waiting thread may clear it: it reads two streams."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    def clear(self) -> None:
        """paramiko would clear it after emptying one stream, while the other has bytes."""

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()


class Output:
    """The two output streams of a command. take: gets each piece, and whether it is of stderr."""

    def __init__(self, channel: Any, take: Callable[[bytes, bool], None]) -> None:
        self._channel, self._take = channel, take

    def collect(self, end: float) -> bool:
        """Read to the end of both streams; False if the time is over first."""
        channel, wait = self._channel, _waiting(self._channel)
        while True:
            last = bool(channel.eof_received or channel.closed)  # tested before reading: nothing comes after it
            while channel.recv_ready() and time.monotonic() < end:
                self._take(channel.recv(_CHUNK), False)
            while channel.recv_stderr_ready() and time.monotonic() < end:
                self._take(channel.recv_stderr(_CHUNK), True)
            left = end - time.monotonic()
            if last or left <= 0:
                return last
            wait(min(left, 60.0))


def _waiting(channel: Any) -> Callable[[float], None]:
    """A function that waits for bytes on a channel or for its end, at most so many seconds."""
    if not isinstance(channel, paramiko.Channel):  # of a process of this machine
        wait: Callable[[float], None] = channel.wait
        return wait
    bell = _DataEvent()
    channel.in_buffer.set_event(bell)
    channel.in_stderr_buffer.set_event(bell)
    return bell.wait


# ---- the first lines of a new channel


def seconds_for(connect_timeout: float) -> float:
    """How long the login and the start of the node side may take together, given CONNECT_TIMEOUT."""
    return max(_LEAST_SECONDS, 3 * connect_timeout)


def incomplete_login(seconds: float, output: bytes, node: str) -> Unreachable:
    """Return the error for a login that takes longer. output: the end of what it has printed."""
    last = output[-_SHOWN:].decode(errors="backslashreplace")
    shown = f", its output so far ends with {last!r}" if last else ""
    what = f"the login is not complete after {seconds:g} s{shown}"
    return Unreachable(what, f"{SHELL_FIX}; {_SLOW}", node)


class Greeting:
    """A greeting is the lines that a login and the start of the node side print. They share one deadline and MOST_BYTES.

    The bytes after the last line are in `rest`.
    """

    def __init__(self, channel: Any, node: str, seconds: float) -> None:
        self._channel = channel
        self._node = node
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._taken = 0
        self.rest = b""
        self.last = ""  # the last line that was not empty

    def line(self) -> str:
        """The next line without its newline.

        Raises EOFError at the end of the channel, PreflightError for too many bytes, Unreachable after the deadline.
        """
        start = 0
        while True:
            at = self.rest.find(b"\n", start)
            if at >= 0:
                line, self.rest = self.rest[:at].decode(errors="backslashreplace"), self.rest[at + 1 :]
                self._taken += at + 1
                if self._taken > MOST_BYTES:
                    raise self._endless()
                self.last = line or self.last
                return line
            if self._taken + len(self.rest) > MOST_BYTES:
                raise self._endless()
            start = len(self.rest)
            self.rest += self._more()

    def start(self, script: bytes) -> None:
        """Run a script on the channel. Returns when it has started; its stdin is what is sent from then on.

        A compound command is read completely before it runs, and not a byte more. Raises what line() raises.
        """
        mark = secrets.token_hex(16)
        self._channel.settimeout(self._seconds)
        with contextlib.suppress(OSError):  # the login has ended already: its output shows the reason
            self._channel.sendall(b"{ printf '\\n%%s\\n' %s\n%s\n}\n" % (mark.encode(), script))
        self.skip_to(mark)

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
            piece: bytes = self._channel.recv(_GREETING_CHUNK)
        except TimeoutError:
            raise self._late() from None
        if not piece:
            raise EOFError
        return piece

    def _late(self) -> Unreachable:
        if not self._taken and not self.rest:
            return Unreachable(f"no answer for {self._seconds:g} s", f"check the load of the node; {_SLOW}", self._node)
        return incomplete_login(self._seconds, self.rest, self._node)

    def _endless(self) -> PreflightError:
        what = f"the login shell prints too much (more than {MOST_BYTES >> 10} KiB)"
        return PreflightError(what, SHELL_FIX, self._node)
