"""A program on a node uses the terminal of this machine: keys go there as they are typed, output comes back as it is."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import paramiko

from clustertool.errors import PreflightError
from clustertool.node.storage.files import write_all
from clustertool.ssh.channel import BROKEN, MOST_BYTES, SHELL_FIX, discard
from clustertool.ssh.connection import SshLink

_READY = b"clustertool terminal ready"
# A fixed text, which sh, csh and fish read alike. The size of the script follows over the terminal, and then the script.
_SHELL = f"""\
exec /bin/sh -c 'stty raw -echo; printf "{_READY.decode()}"; IFS= read -r n; s=$(dd bs=1 count="$n" 2>/dev/null); stty sane; \
eval "$s"'"""
_OPENING = 30.0  # seconds for the login shell
_TURN = 0.2  # seconds between two checks for signals
_CHUNK = 1 << 15
_LEAVE = b"\r~."  # as ssh has it: where the network is silent, no other key arrives


def present() -> bool:
    """Check whether stdin and stdout of this process are terminals."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def run_on_terminal(link: SshLink, argv: Sequence[str], check: Callable[[], None]) -> int:
    """Run a program on the node with a terminal of the size of this one. Return its exit code, 255 if it is not known.

    It ends, too, when the user types Enter ~ . and at the end of stdin. check: called regularly; what it raises ends the
    session. Raises PreflightError if the login shell opens no terminal, and Unreachable if the connection breaks.
    """
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    channel = link.terminal(_SHELL, os.environ.get("TERM", "xterm"), columns, lines)
    try:
        _skip_to_shell(channel, link)
        script = f"exec {shlex.join(argv)}".encode("utf-8", "surrogateescape")
        channel.sendall(b"%d\n%s" % (len(script), script))
        with _raw_mode(), _follow_size(channel):
            left = _copy_both_ways(channel, check)
        if not left:
            channel.status_event.wait(_OPENING)
        return int(channel.exit_status) if channel.exit_status >= 0 else 255
    except BROKEN as error:
        raise link.lost(f"the connection broke ({error or type(error).__name__})") from None
    finally:
        discard(channel)


def _skip_to_shell(channel: paramiko.Channel, link: SshLink) -> None:
    """Wait until the shell is ready, and drop what the start files of the login shell print before.

    Raises PreflightError after 30 s, at the end of the channel, and for more than 64 KiB of output.
    """
    seen, end = b"", time.monotonic() + _OPENING
    while _READY not in seen:
        channel.settimeout(max(0.1, end - time.monotonic()))
        try:
            data = channel.recv(_CHUNK)
        except TimeoutError:
            data = b""
        seen += data
        if not data or len(seen) > MOST_BYTES:
            tail = seen[-200:].decode(errors="replace").strip()
            raise PreflightError(f"the login shell opened no terminal; its output: {tail}", SHELL_FIX, link.node)
    channel.settimeout(None)


def _copy_both_ways(channel: paramiko.Channel, check: Callable[[], None]) -> bool:
    """Copy between terminal and channel; return False when the program has ended or the connection is lost.

    Returns True when the user types Enter ~ . in this order, and at the end of stdin. check: called regularly; it may raise.
    """
    keys, last = sys.stdin.fileno(), b"\r"
    while not channel.closed:
        check()
        with contextlib.suppress(InterruptedError):
            ready = select.select([channel, keys], [], [], _TURN)[0]
        if channel in ready:
            data = channel.recv(_CHUNK)
            if not data:
                return False
            write_all(sys.stdout.fileno(), data)
        if keys in ready:
            typed = os.read(keys, _CHUNK)
            last = (last + typed)[-len(_LEAVE) :]
            if last == _LEAVE or not typed:
                return True
            channel.sendall(typed)
    return False


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Return a context manager in which the terminal is in raw mode: keys are read as they are typed, Ctrl+C too.

    At its end the terminal is as before.
    """
    sys.stdout.flush()
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setraw(keys, termios.TCSADRAIN)  # what was typed already is for the program
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _follow_size(channel: paramiko.Channel) -> Iterator[None]:
    """Return a context manager in which each change of the terminal's size is passed on to the channel."""

    def resize(number: int, frame: FrameType | None) -> None:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        with contextlib.suppress(*BROKEN):
            channel.resize_pty(columns, lines)

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
