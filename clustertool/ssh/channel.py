"""A channel runs one /bin/sh: its input, its output, its end. No function here waits for a dead peer."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

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
SHELL_FIX = (
    "check on that node what the account's login shell runs at its start (bash: ~/.bashrc, /etc/bash.bashrc; zsh: ~/.zshenv; "
    "csh, tcsh: ~/.cshrc, ~/.tcshrc; fish: config.fish), and whether sshd or authorized_keys forces a command"
)
NO_SHELL = ("the login shell did not start /bin/sh", SHELL_FIX)
_SLOW = "a slow or overloaded node needs a larger CONNECT_TIMEOUT in conf.py"
_LINES = ":\n" * 20  # what a start file may read
_ENDING, _TURN = 0.5, 0.01  # seconds for the exit code and the errors of a shell after the end of its output


def discard(channel: Any) -> None:
    """Close a channel; wait at most a second for a peer that does not answer any more."""
    if channel.closed:
        return
    if not channel.eof_received or not channel.status_event.is_set():
        run_briefly(channel.close)
        return
    with contextlib.suppress(*BROKEN):
        channel.close()  # the node spoke a moment ago: this does not hang


def run_briefly(do: Callable[[], None]) -> None:
    """Run a function, `do`, in a thread, since a dead peer could block it, and wait at most a second for its end.

    Errors of a lost connection are ignored.
    """

    def quietly() -> None:
        with contextlib.suppress(*BROKEN):  # it has ended already
            do()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(1.0)


# ---- reading both streams of a channel without threads


def read_errors(channel: Any, most: int = MOST_BYTES) -> bytes:
    """Read what is there of a channel's stderr, about `most` bytes at most."""
    errors = b""
    while channel.recv_stderr_ready() and len(errors) < most:
        errors += channel.recv_stderr(min(most, _CHUNK))
    return errors


class _DataEvent:
    """An event that paramiko sets when bytes arrive. Only the waiting thread clears it, because it reads two streams."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    def clear(self) -> None:
        """Do nothing: paramiko calls this after emptying one stream, while the other may have bytes."""

    def wait(self, timeout: float) -> None:
        """Wait until bytes have arrived, at most `timeout` seconds, and clear the event."""
        self._event.wait(timeout)
        self._event.clear()


def collect_output(channel: Any, take: Callable[[bytes, bool], None], end: float) -> bool:
    """Pass all bytes of both output streams of a command to `take`, with whether they are of stderr.

    Return True at their end, False at `end` (time.monotonic()).
    """
    wait = _make_wait(channel)
    while True:
        last = bool(channel.eof_received or channel.closed)  # tested before reading: nothing comes after it
        while channel.recv_ready() and time.monotonic() < end:
            take(channel.recv(_CHUNK), False)
        while channel.recv_stderr_ready() and time.monotonic() < end:
            take(channel.recv_stderr(_CHUNK), True)
        left = end - time.monotonic()
        if last or left <= 0:
            return last
        wait(min(left, 60.0))


def _make_wait(channel: Any) -> Callable[[float], None]:
    """Return a function that waits for bytes on a channel or for its end, at most so many seconds."""
    if not isinstance(channel, paramiko.Channel):  # of a process of this machine
        wait: Callable[[float], None] = channel.wait
        return wait
    bell = _DataEvent()
    channel.in_buffer.set_event(bell)
    channel.in_stderr_buffer.set_event(bell)
    return bell.wait


# ---- the first lines of a new channel


def guarded(script: bytes, otherwise: str) -> bytes:
    """Make a compound command of a script, for a shell that reads it from stdin.

    Nothing of the script runs where a start file has read the first lines. Then the command `otherwise` runs.
    """
    first = f'_ct_all=y\n{_LINES}{{ [ "$_ct_all" ] || {{ {otherwise}; exit 1; }}\nunset _ct_all\n'
    return first.encode() + script + b"\n}\n"


def seconds_for(connect_timeout: float) -> float:
    """Compute how long the login and the start of the node side may take together, given CONNECT_TIMEOUT."""
    return max(_LEAST_SECONDS, 3 * connect_timeout)


def shown_end(output: bytes) -> str:
    """Quote the last line of what a login has printed, for a message."""
    last = "".join(output.decode(errors="backslashreplace").strip().splitlines()[-1:])[-_SHOWN:]
    return f"; its output so far ends with {last!r}" if last else "; it has printed nothing"


def late_login(seconds: float, shown: str, node: str) -> Unreachable:
    """Build the error of a login shell that does not start /bin/sh in time. shown: what is known of its output."""
    what = f"the login is not complete after {seconds:g} s: the login shell did not start /bin/sh{shown}"
    return Unreachable(what, f"{SHELL_FIX}; {_SLOW}", node)


class Greeting:
    """A reader of the lines that a login and the start of the node side print. They share one deadline and 64 KiB.

    The bytes after the last line are in `rest`.
    """

    def __init__(self, channel: Any, node: str, seconds: float) -> None:
        self._channel = channel
        self._node = node
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._taken = 0
        self.rest = b""
        self._last = ""  # the last line that was not empty
        self.login = False  # whether the login shell has not started /bin/sh yet

    def line(self) -> str:
        """Read the next line without its newline.

        Raises EOFError at the end of the channel, PreflightError for too many bytes, Unreachable after the deadline.
        """
        start = 0
        while True:
            at = self.rest.find(b"\n", start)
            if at >= 0:
                line, self.rest = self.rest[:at].decode(errors="backslashreplace"), self.rest[at + 1 :]
                self._taken += at + 1
                if self._taken > MOST_BYTES:
                    raise self._endless_error()
                self._last = line.strip() or self._last
                return line
            if self._taken + len(self.rest) > MOST_BYTES:
                raise self._endless_error()
            start = len(self.rest)
            self.rest += self._receive()

    def start(self, script: bytes) -> None:
        """Run a script on the channel, and return when it has started; its stdin is what is sent from then on.

        A compound command is read completely before it runs, and not a byte more. Raises what line() raises, and PreflightError
        where a start file has read a part of the input.
        """
        mark = secrets.token_hex(16)
        self._channel.settimeout(self._seconds)
        with contextlib.suppress(OSError):  # the login has ended already: its output shows the reason
            text = f"printf '\\n%s\\n' {mark}\n".encode() + script
            self._channel.sendall(guarded(text, f"printf '\\n%s taken\\n' {mark}"))
        self.skip_to(mark)

    def skip_to(self, mark: str) -> None:
        """Read and drop lines up to `mark`: what a .bashrc prints comes before it.

        Raises what line() raises, and PreflightError where a start file has read a part of the input.
        """
        self.login, last = True, ""
        while (line := self.line()) != mark:
            if line == f"{mark} taken":
                self._last = last
                what = f"a start file of the login shell reads from its input{self._last_line()}"
                raise PreflightError(what, f"let it ask only on a terminal ([ -t 0 ]): {SHELL_FIX}", self._node)
            last = line.strip() or last
        self.login = False

    def ended(self) -> str:
        """Describe, for an error, how the login shell has ended without starting /bin/sh: its exit code and last line.

        Waits up to a second for them.
        """
        self._channel.status_event.wait(_ENDING)
        end = time.monotonic() + _ENDING
        while not (self._last or self.rest or self._channel.recv_stderr_ready()) and time.monotonic() < end:
            time.sleep(_TURN)
        code = int(self._channel.exit_status)
        how = f"ended with exit code {code}" if code >= 0 else "ended"
        return f"the login shell {how} and did not start /bin/sh{self._last_line()}"

    def _last_line(self) -> str:
        """Quote the last line that the login has printed, on stdout, else on stderr."""
        errors = read_errors(self._channel)
        return shown_end(self.rest[-_SHOWN:].strip() or self._last.encode() or errors)

    def _receive(self) -> bytes:
        """Receive some bytes. Raises EOFError at the end of the channel, Unreachable after the deadline."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._late_error()
        self._channel.settimeout(left)
        try:
            piece: bytes = self._channel.recv(_GREETING_CHUNK)
        except TimeoutError:
            raise self._late_error() from None
        if not piece:
            raise EOFError
        return piece

    def _late_error(self) -> Unreachable:
        """Build the error of the deadline: that the login shell did not start /bin/sh, or after that, that nothing answers."""
        if not self.login:
            return Unreachable(f"no answer for {self._seconds:g} s", f"check the load of the node; {_SLOW}", self._node)
        return late_login(self._seconds, self._last_line(), self._node)

    def _endless_error(self) -> PreflightError:
        """Build the error of a login that prints more than 64 KiB."""
        what = f"the login shell prints too much (more than {MOST_BYTES >> 10} KiB)"
        return PreflightError(what, SHELL_FIX, self._node)


def ended_by_loss(channel: Any, link: Shells) -> bool:
    """Check whether a channel has ended because the connection was lost: it has no exit code, and the link is not alive.

    Waits up to 0.5 s for either: paramiko closes the channels of a lost connection before it counts as lost.
    """
    end = time.monotonic() + _ENDING
    while channel.exit_status < 0 and link.alive and time.monotonic() < end:
        time.sleep(_TURN)
    return channel.exit_status < 0 and not link.alive


# -- what a link offers ------------------------------------------------------------------------------------------------


class Shells(Protocol):
    """A link that opens shells on a node, or programs without one: an ssh connection, or a link of another kind.

    node: its name. alive: whether new channels can be opened. A channel has the functions of paramiko's that are used, and
    behind it is a POSIX shell. noise: a regular expression of what the link may write to stderr after the end of a command.
    no_shell: what happened, and the fix, where the shell does not start.
    """

    @property
    def node(self) -> str: ...

    @property
    def noise(self) -> bytes: ...

    @property
    def no_shell(self) -> tuple[str, str]: ...

    @property
    def alive(self) -> bool: ...

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> Any:
        """Open a shell, and return its channel."""

    def lost(self, why: str) -> Unreachable:
        """Build the error of a lost connection to the node."""


@runtime_checkable
class Programs(Shells, Protocol):
    """A link that starts a program itself, so that the node needs no shell for it."""

    def program(self, argv: Sequence[str], *, window: int = 0, timeout: float = 10.0) -> Any:
        """Open a channel to the program."""
