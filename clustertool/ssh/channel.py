"""A channel executes one command: its request, its streams, its end. No function here waits for a dead peer."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from clustertool.errors import ClustertoolError, PreflightError, Unreachable

SHELL = "exec /bin/sh"
# Reads a script up to a mark and runs it; what follows on stdin is the script's own (read takes byte by byte).
LOADER = "exec /bin/sh -c 'IFS= read -r l; eval \"$l\"'"
# One line: collect lines up to the mark, print the mark, run what was collected. "$n" is a line break.
_LOAD = (
    b"n=$(printf '\\012.'); n=${n%%.}; s=; "
    b'while IFS= read -r l && [ "$l" != %(mark)s ]; do s="$s$l$n"; done; '
    b"printf %%s %(mark)s; printf %%s %(mark)s >&2; "
    b'eval "$s"\n'
)
KEEP = 16 << 20  # bytes kept of each stream of a command
NOISE = 1 << 20  # bytes that a login may print before a script starts
BULK_WINDOW = 1 << 24
BULK_PACKET = 1 << 17
# Errors that paramiko raises from any send on a lost connection.
BROKEN = (OSError, EOFError, paramiko.SSHException)
_CHUNK = 1 << 18
_INLINE = 1 << 15  # a text this short always fits into the window of a new channel


class Reachable(Protocol):
    """A way to a node: what agents and rsync need of a Link, and what this machine's own (fleet/this_machine.py) has too."""

    @property
    def node(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    @property
    def quick(self) -> bool: ...

    def channel(self, command: bytes | str = SHELL, *, window: int = 0, timeout: float = 10.0) -> Any: ...

    def pipe(self, script: bytes, *, window: int = 0, timeout: float = 10.0) -> Pipe: ...

    def lost(self, why: str) -> Unreachable: ...

    def close(self) -> None: ...


def request(channel: paramiko.Channel, command: bytes | str) -> paramiko.Message:
    """paramiko's own exec_command waits for the answer, and without an end."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(True)
    message.add_string(command)
    return message


def open_pipe(link: Reachable, script: bytes, *, window: int, timeout: float) -> Pipe:
    """Run a script whose stdin is what is sent through the pipe. Returns when the script is about to start."""
    mark = secrets.token_hex(16).encode()
    loader = _LOAD % {b"mark": mark}
    pipe = Pipe(link, link.channel(LOADER, window=window, timeout=timeout), mark)
    try:
        pipe.send_all(loader + script + b"\n" + mark + b"\n", timeout)
        pipe.start(timeout)
    except ClustertoolError:
        pipe.close()
        raise
    return pipe


class Pipe:
    """A script on a node, its stdin and stdout; bytes before its start are dropped, its stderr is kept in `errors`."""

    def __init__(self, link: Reachable, channel: Any, mark: bytes) -> None:
        self.link = link
        self.channel = channel
        self.noise = b""
        self._mark = mark
        self._first = b""

    def start(self, timeout: float) -> None:
        """Skip everything up to the mark. Raises Unreachable, or PreflightError if no shell starts."""
        end = time.monotonic() + timeout
        got = b""
        while self._mark not in got:
            left = end - time.monotonic()
            if left <= 0:
                raise self.link.lost(f"no answer within {timeout:g} s")
            if len(got) > NOISE:
                fix = "check the start files of the account's shell on that node (.bashrc, .profile)"
                raise PreflightError(f"the login prints without end (more than {NOISE >> 20} MiB)", fix, self.link.node)
            self.channel.settimeout(left)
            try:
                more = self.channel.recv(_CHUNK)
            except TimeoutError:
                raise self.link.lost(f"no answer within {timeout:g} s") from None
            if not more:
                output = (got + self._stderr())[-500:].decode(errors="replace").strip()
                raise PreflightError(
                    f"the login shell did not start /bin/sh; its output: {output}",
                    "check the account's shell and its start files (.bashrc) on that node",
                    self.link.node,
                )
            got += more
        self.channel.settimeout(None)
        self.noise, _, self._first = got.partition(self._mark)

    def recv(self, size: int = _CHUNK) -> bytes:
        """Some bytes, b"" at the end. Waits until there are some, the channel closes or its timeout is over."""
        if self._first:
            first, self._first = self._first[:size], self._first[size:]
            return first
        return bytes(self.channel.recv(size))

    def send_all(self, data: bytes, timeout: float) -> None:
        """Send all of it, or raise Unreachable."""
        self.channel.settimeout(timeout)
        try:
            self.channel.sendall(data)
        except BROKEN as error:
            raise self.link.lost(f"the node does not take our bytes ({error or type(error).__name__})") from None
        finally:
            self.channel.settimeout(None)

    def code(self, timeout: float) -> int:
        """The exit code: -1 if none came within the time or the connection was lost."""
        self.channel.status_event.wait(timeout)
        return int(self.channel.exit_status)

    def errors(self) -> bytes:
        """What the script has written to stderr so far (read it when it has ended)."""
        return self._stderr().partition(self._mark)[2]

    def _stderr(self) -> bytes:
        got = b""
        while self.channel.recv_stderr_ready() and len(got) < KEEP:
            got += self.channel.recv_stderr(_CHUNK)
        return got

    def close(self) -> None:
        discard(self.channel)


def discard(channel: Any) -> None:
    """Close a channel without waiting for a peer that does not listen any more."""
    if channel.closed:
        return
    if not channel.eof_received or not channel.status_event.is_set():
        briefly(channel.close)
        return
    try:
        channel.close()  # the node spoke a moment ago: this does not hang
    except BROKEN:
        return


def briefly(do: Callable[[], None], limit: float = 1.0) -> None:
    """Run a function that a dead peer could block; after `limit` seconds it may continue alone."""

    def quietly() -> None:
        try:
            do()
        except BROKEN:  # it has ended already
            return

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


@dataclass
class Output:
    """The two output streams of a command, bounded; each costs as much as it has bytes."""

    channel: paramiko.Channel
    stdout: list[bytes] = field(default_factory=list)
    stderr: list[bytes] = field(default_factory=list)
    dropped: int = 0
    _room: list[int] = field(default_factory=lambda: [KEEP, KEEP])

    def collect(self, end: float) -> bool:
        """Read to the end of both streams; False if the time is over first."""
        channel, bell = self.channel, _DataEvent()
        channel.in_buffer.set_event(bell)
        channel.in_stderr_buffer.set_event(bell)
        while True:
            last = channel.eof_received or channel.closed  # tested before reading: nothing comes after it
            left = end - time.monotonic()
            while channel.recv_ready() and left > 0:
                self._keep(self.stdout, 0, channel.recv(_CHUNK))
                left = end - time.monotonic()
            while channel.recv_stderr_ready() and left > 0:
                self._keep(self.stderr, 1, channel.recv_stderr(_CHUNK))
                left = end - time.monotonic()
            if last:
                return True
            if left <= 0:
                return False
            bell.wait(min(left, 60.0))

    def _keep(self, stream: list[bytes], which: int, data: bytes) -> None:
        kept = data[: self._room[which]]
        self._room[which] -= len(kept)
        self.dropped += len(data) - len(kept)
        if kept:
            stream.append(kept)


def send(channel: paramiko.Channel, data: bytes) -> None:
    """Send all, then EOF. A long text is sent in a thread: the node may answer before it has read everything."""

    def all_of_it() -> None:
        try:
            channel.sendall(data)
            channel.shutdown_write()
        except BROKEN:  # the channel has closed: its reader finds out
            return

    if len(data) <= _INLINE:
        all_of_it()
    else:
        threading.Thread(target=all_of_it, daemon=True).start()
