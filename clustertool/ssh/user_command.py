"""Run commands of the user on nodes, with that user's login shell there. A command ends with the process that waits for it.

The script goes over stdin of a channel, which stays open: a line on it, or its end, ends the command and its children.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from clustertool.errors import PreflightError, TimedOut, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.ssh.channel import (
    BROKEN,
    KEEP,
    MOST_BYTES,
    Programs,
    Shells,
    collect_output,
    discard,
    ended_by_loss,
    guarded,
    late_login,
    seconds_for,
    shown_end,
)
from clustertool.ssh.parallel import in_background

# The shell that runs this ($$) leads the session. It and each `cat` live until all that write to the output have ended. `watch`
# reads stdin, which ends with the connection. It signals the process group, where only the command does not ignore TERM, and
# the other processes of the session and its descendants, since `timeout`, `setsid` and job control leave the group.
# The user's shell reads its start files first, so it prints the mark. csh cannot write to stderr only.
_USER_COMMAND = """\
watch() {
  IFS= read -r line <&3
  trap '' ALRM
  PATH=$PATH:/bin:/usr/bin
  found=" $$ " others=
  for signal in TERM KILL; do
    all=$(cat /proc/[0-9]*/stat | sed -n 's/^\\([0-9]*\\) .*) [A-Za-z] \\([0-9]* [0-9]* [0-9]*\\) .*/\\1 \\2/p')
    last=
    while [ "$last" != "$found" ]; do
      last=$found
      while read -r pid parent group session; do
        case $found in (*" $pid "*) continue ;; esac
        case $found/$session in (*" $parent "*|*/$$) ;; (*) continue ;; esac
        found="$found$pid "
        [ "$group" = $$ ] || others="$others $pid"
      done <<END
$all
END
    done
    kill -s $signal $others
    kill -s $signal -- -$$
    sleep %(grace)d
  done
}
copy() (
  PATH=$PATH:/bin:/usr/bin
  exec cat 2>&7
)
m='printf %%s %(mark)s; printf %%s %(mark)s >&2'
case "${SHELL##*/}" in (bash|sh|dash|ash|zsh|ksh*|mksh) ;; (*) m="/bin/sh -c '$m'" ;; esac
trap '' TERM
exec 3<&0 </dev/null
watch >/dev/null 2>&1 &
exec 4>&1 7>&2 2>/dev/null
code=$({ { {
  (trap - TERM; exec "${SHELL:-/bin/sh}" -c "$m
"%(command)s 3<&- 4>&- 5>&- 6>&- 7>&-) 2>&1 >&6
  echo $? >&5
} | copy >&7; } 6>&1 | copy >&4; } 5>&1)
kill -s ALRM $!
exit ${code:-255}
"""
_TAKEN = "echo 'clustertool: a start file of the login shell reads from its input' >&2"
_NO_END = 3600.0 * 24 * 365
_GRACE = 2  # seconds from TERM to KILL
_OPENING = 10.0  # seconds that a channel may take, without a CONNECT_TIMEOUT
_TAIL = 500  # bytes of the output of a shell that does not start
Take = Callable[[bytes, bool], None]  # a piece of the output, and whether it is of stderr


class Kept:
    """The output of a command, up to 16 MiB of each stream. cut: how many bytes are left out."""

    def __init__(self) -> None:
        self.stdout, self.stderr, self.cut = bytearray(), bytearray(), 0

    def take(self, data: bytes, error: bool) -> None:
        """Keep bytes of a stream, as far as there is room, and count the others in `cut`. error: they are of stderr."""
        stream = self.stderr if error else self.stdout
        room = KEEP - len(stream)
        stream += data[:room]
        self.cut += max(0, len(data) - room)

    def texts(self) -> tuple[str, str]:
        """Return stdout and stderr as texts."""
        return self.stdout.decode("utf-8", "backslashreplace"), self.stderr.decode("utf-8", "backslashreplace")


class Commands:
    """A runner of commands on nodes, for several threads. running: the nodes' names of the commands that run, by channel."""

    def __init__(self) -> None:
        self.running: dict[Any, str] = {}
        self._ended = False
        self._lock = threading.Lock()

    def end(self) -> None:
        """Request the end of all commands that run, without waiting for it. No other one starts."""
        with self._lock:
            self._ended = True
            for channel in self.running:
                in_background(functools.partial(_request_end, channel))

    def run(self, link: Shells, command: str, take: Take, timeout: float = 0.0, opening: float = _OPENING) -> int:
        """Run what a user typed by that user's login shell on the node, pass its output to `take`, and return its exit code.

        timeout: in seconds, 0 for as long as it takes. opening: seconds that a channel may take. Raises TimedOut after
        `timeout` and an attempt to end the command, Unreachable if the connection breaks or the login takes too long,
        PreflightError if the shell does not start, and UsageError for a command with a zero byte.
        """
        if "\0" in command:
            raise UsageError("a command cannot contain a zero byte")
        mark = secrets.token_hex(16)
        script = _USER_COMMAND % {"mark": mark, "command": shlex.quote(command), "grace": _GRACE}
        text = guarded(script.encode("utf-8", "surrogateescape"), _TAKEN).decode("utf-8", "surrogateescape")
        return self.run_script(link, text, mark, take, timeout or _NO_END, opening)

    def run_program(self, link: Shells, argv: Sequence[str], take: Take) -> int:
        """Run a program on the node, as long as it takes, by /bin/sh where the link starts nothing else; return its exit code.

        It must end by itself when a line comes on its stdin, or when that ends. Raises what run() raises, but no TimedOut.
        """
        if isinstance(link, Programs):
            return self._run(link, link.program(argv, timeout=_OPENING), "", "", take, _NO_END)
        mark = secrets.token_hex(16)
        text = f"{{ printf %s {mark}; printf %s {mark} >&2\nexec {shlex.join(argv)}\n}}\n"
        return self.run_script(link, text, mark, take, _NO_END)

    def run_script(
        self, link: Shells, text: str, mark: str, take: Take, timeout: float, opening: float = _OPENING
    ) -> int:
        """Run text by /bin/sh, and return its exit code. It must print `mark` to both streams before its output, and exit.

        All text is sent before any output is read, so it must be short, as a command that was typed is.
        """
        channel = link.channel(timeout=min(timeout, opening))
        return self._run(link, channel, text, mark, take, timeout, seconds_for(opening))

    def _run(
        self, link: Shells, channel: Any, text: str, mark: str, take: Take, timeout: float, login: float = _NO_END
    ) -> int:
        """Send the script, pass on its output from `mark`, which must come within `login` seconds, and return its exit code.

        255 if it is not known. After `timeout` seconds a line is sent, which ends the command, and TimedOut is raised. Raises
        Unreachable if the connection breaks, the mark is late, or end() was called before, and PreflightError if no mark came.
        At the end the channel is closed.
        """
        end = time.monotonic() + timeout
        streams = [_AfterMark(mark.encode(), b"", take, False), _AfterMark(mark.encode(), link.noise, take, True)]

        def output(data: bytes, error: bool) -> None:
            streams[error].take(data)

        try:
            with self._lock:
                if self._ended:
                    raise link.lost("the command was not started")
                self.running[channel] = link.node
            with contextlib.suppress(*BROKEN):  # the channel has closed: its output shows the reason
                channel.settimeout(timeout)
                channel.sendall(text.encode("utf-8", "surrogateescape"))
            over = _ends_in_time(channel, output, min(end, time.monotonic() + login))
            if not over and not streams[0].begun and login < timeout:
                shown = shown_end(streams[0].before.strip() or streams[1].before)
                raise late_login(login, shown, link.node)
            if not over and not _ends_in_time(channel, output, end):
                in_background(functools.partial(_request_end, channel))
                what = f"the command did not end within {timeout:g} s"
                if _ends_in_time(channel, output, time.monotonic() + _GRACE + 1):
                    raise TimedOut(f"{what} and was ended", "give it more time with --timeout", link.node)
                raise TimedOut(what, f"it may still run there: check with `{PROGRAM} exec`", link.node)
        except BROKEN as error:
            raise link.lost(f"the connection broke ({error or type(error).__name__})") from None
        finally:
            for stream in streams:
                stream.end()
            discard(channel)
            with self._lock:
                self.running.pop(channel, None)
        if ended_by_loss(channel, link):
            raise link.lost("the connection was lost")
        code = int(channel.exit_status)
        if not streams[0].begun:
            tail = (streams[0].before + streams[1].before)[-_TAIL:].decode(errors="replace").strip()
            what, fix = link.no_shell
            raise PreflightError(f"{what}; its output: {tail}", fix, link.node)
        return code if code >= 0 else 255


def _ends_in_time(channel: Any, output: Take, end: float) -> bool:
    """Read the output until `end`; return whether the command has ended by then. It may have closed its streams before."""
    return collect_output(channel, output, end) and bool(channel.status_event.wait(max(0.0, end - time.monotonic())))


def _request_end(channel: Any) -> None:
    """Send a line, which ends the command: not every link passes the end of stdin on."""
    with contextlib.suppress(*BROKEN):  # it has ended already
        channel.sendall(b"\n")


class _AfterMark:
    """A filter of a stream: it passes to `take` the bytes after the mark, without the `noise` that a link may write last."""

    def __init__(self, mark: bytes, noise: bytes, take: Take, error: bool) -> None:
        self._mark, self._noise, self._take, self._error = mark, noise, take, error
        self.begun = not mark
        self.before = b""  # the end of what came before
        self._line = b""  # the last line, where it may be noise

    def take(self, data: bytes) -> None:
        """Pass on bytes that come after the mark; keep back the last line, where it may be noise."""
        if not self.begun:
            before, found, data = (self.before + data).partition(self._mark)
            self.before, self.begun = before[-_TAIL:], bool(found)
        if self._noise:
            data = self._line + data
            at = data.rstrip(b"\n").rfind(b"\n") + 1 if len(data) < MOST_BYTES else len(data)
            data, self._line = data[:at], data[at:]
        if data and self.begun:
            self._take(data, self._error)

    def end(self) -> None:
        """Pass on the last line, without noise."""
        line = re.sub(self._noise + rb"\Z", b"", self._line) if self._noise else b""
        if line and self.begun:
            self._take(line, self._error)
