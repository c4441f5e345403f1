"""Run a command of the user on a node, with that user's login shell there. It goes over stdin of a channel."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clustertool.errors import PreflightError, TimedOut, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.ssh.channel import BROKEN, Output, discard
from clustertool.ssh.shells import Programs, Shells

# The user's shell reads its start files first, so the script prints the mark first. csh cannot write to stderr only.
# The first half of the mark precedes the process id, which is that of the session's process group.
_HALF = 16
_USER_COMMAND = """\
printf '%(half)s:%%s:' "$$"
m='printf %%s %(mark)s; printf %%s %(mark)s >&2'
case "${SHELL##*/}" in (bash|sh|dash|ash|zsh|ksh*|mksh) ;; (*) m="/bin/sh -c '$m'" ;; esac
exec "${SHELL:-/bin/sh}" -c "$m
"%(command)s </dev/null
"""
_NO_END = 3600.0 * 24 * 365
_SIGNALS = ((b"TERM", 2.0), (b"KILL", 1.0))  # and the seconds to wait for the end after each
_OPENING = 10.0  # seconds that a channel may take, without a CONNECT_TIMEOUT


@dataclass(frozen=True)
class Completed:
    """How a remote command ended. Its output is bounded (channel.KEEP)."""

    code: int
    stdout: bytes
    stderr: bytes


def run_user_command(link: Shells, command: str, timeout: float = 0.0, opening: float = _OPENING) -> Completed:
    """Run what a user typed by that user's login shell on the node. `timeout` 0: as long as it takes. opening: seconds that
    a channel may take."""
    if "\0" in command:
        raise UsageError("a command cannot contain a zero byte")
    mark = secrets.token_hex(16)
    text = _USER_COMMAND % {"half": mark[:_HALF], "mark": mark, "command": shlex.quote(command)}
    return run_script(link, text.encode("utf-8", "surrogateescape"), mark.encode(), timeout or _NO_END, opening)


def run_program(link: Shells, argv: Sequence[str]) -> Completed:
    """Run a program on the node without input, as long as it takes: by /bin/sh where the link starts nothing else."""
    if isinstance(link, Programs):
        return _completed(link, argv, b"", b"", _NO_END, _OPENING)
    mark = secrets.token_hex(16)
    text = f"printf %s {mark}; printf %s {mark} >&2\nexec {shlex.join(argv)} </dev/null\n"
    return run_script(link, text.encode("utf-8", "surrogateescape"), mark.encode(), _NO_END)


def run_script(link: Shells, text: bytes, mark: bytes, timeout: float, opening: float = _OPENING) -> Completed:
    """Run text by /bin/sh, which must print `mark` to both streams where the login's output ends. Raises TimedOut.

    All text is sent before any output is read, so it must be short, as a command that was typed is.
    """
    return _completed(link, (), text, mark, timeout, opening)


def _completed(
    link: Shells, argv: Sequence[str], text: bytes, mark: bytes, timeout: float, opening: float
) -> Completed:
    """argv: a program in the place of /bin/sh; its output begins without a mark."""
    end = time.monotonic() + timeout
    wait = min(timeout, opening)
    channel = link.program(argv, timeout=wait) if isinstance(link, Programs) and argv else link.channel(timeout=wait)
    try:
        with contextlib.suppress(*BROKEN):  # the channel has closed: its output shows the reason
            channel.settimeout(timeout)
            channel.sendall(text)
            channel.shutdown_write()
        output = Output(channel)
        if not output.collect(end) or not channel.status_event.wait(max(0.0, end - time.monotonic())):
            what = f"the command did not end within {timeout:g} s"
            if _ended(link, channel.status_event, output, mark, opening):
                raise TimedOut(f"{what} and was ended", "give it more time with --timeout", link.node)
            raise TimedOut(what, f"it may still run there: check with `{PROGRAM} exec`", link.node)
    except BROKEN as error:
        raise link.lost(f"the connection broke ({error or type(error).__name__})") from None
    finally:
        discard(channel)
    code = channel.exit_status
    if code < 0 and not link.alive:
        raise link.lost("the connection was lost")
    if mark not in output.stdout:
        tail = bytes(output.stdout + output.stderr)[-500:].decode(errors="replace").strip()
        what, fix = link.no_shell
        raise PreflightError(f"{what}; its output: {tail}", fix, link.node)
    stdout, stderr = (bytes(one).partition(mark)[2] if mark else bytes(one) for one in (output.stdout, output.stderr))
    if link.noise:
        stderr = re.sub(link.noise + rb"\Z", b"", stderr)
    return Completed(code if code >= 0 else 255, stdout, stderr)


def _ended(link: Shells, over: threading.Event, output: Output, mark: bytes, opening: float) -> bool:
    """Send TERM, then KILL to the process group of a command; whether it has ended. over: is set when it has.

    sshd's own signals (RFC 4254 6.9) do not exist for root, so a second session runs kill. Where sshd refuses one, nothing
    is sent. The end of the output is not the end of the command, which may have closed its streams.
    """
    group = re.search(re.escape(mark[:_HALF]) + rb":(\d+):", output.stdout)
    for name, seconds in _SIGNALS if group else ():
        try:
            channel = link.channel(timeout=opening)
        except PreflightError:  # MaxSessions 1
            return False
        try:
            channel.sendall(b"kill -s %s -- -%s\n" % (name, group[1] if group else b""))
            channel.shutdown_write()
            end = time.monotonic() + seconds
            if output.collect(end) and over.wait(max(0.0, end - time.monotonic())):
                return True
        finally:
            discard(channel)
    return False
