"""One open Fabric connection per node; every channel of a command rides on it, and nothing here waits without an end.

An exec request is one of few fixed strings that sh, csh and fish read alike; scripts, commands and data go over stdin.
What a login shell's start files print comes before a random mark and is kept apart as noise.
"""

from __future__ import annotations

import fcntl
import random
import secrets
import shlex
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import paramiko
from fabric import Config, Connection
from paramiko.common import cMSG_CHANNEL_REQUEST

from clustertool.errors import ClustertoolError, PreflightError, TimedOut, Unreachable, UsageError
from clustertool.plan.cluster import Cluster
from clustertool.plan.hosts import Host
from clustertool.reach import dial, hostkeys
from clustertool.reach.auth import Login
from clustertool.reach.auth import Prompter as Prompter  # the callers' name for it is here
from clustertool.reach.fanout import Gathered, each, more_files
from clustertool.reach.sshconfig import SshSettings, settings

SHELL = "exec /bin/sh"
# Reads a script up to a mark and runs it; what follows on stdin is the script's own (read takes byte by byte).
LOADER = "exec /bin/sh -c 'IFS= read -r l; eval \"$l\"'"
# One line: collect lines up to the mark, say the mark, run what was collected. "$n" is a line break.
_LOAD = (
    b"n=$(printf '\\012.'); n=${n%%.}; s=; "
    b'while IFS= read -r l && [ "$l" != %(mark)s ]; do s="$s$l$n"; done; '
    b"printf %%s %(mark)s; printf %%s %(mark)s >&2; "
    b'eval "$s"\n'
)
# The user's shell reads its own start files first, so the mark is its first words. csh cannot write to stderr alone.
_USER_COMMAND = """\
m='printf %%s %(mark)s; printf %%s %(mark)s >&2'
case "${SHELL##*/}" in (bash|sh|dash|ash|zsh|ksh*|mksh) ;; (*) m="/bin/sh -c '$m'" ;; esac
exec "${SHELL:-/bin/sh}" -c "$m
"%(command)s </dev/null
"""
KEEP = 16 << 20  # bytes kept of each stream of a command
BULK_WINDOW = 1 << 24
BULK_PACKET = 1 << 17
# What paramiko raises from any send on a connection that has gone.
BROKEN = (OSError, EOFError, paramiko.SSHException)
_CHUNK = 1 << 18
_INLINE = 1 << 15  # a text this short always fits into the window of a new channel
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before the next try of a login that was dropped
_NO_END = 3600.0 * 24 * 365


@dataclass(frozen=True)
class Completed:
    """How a remote command ended. `noise` came before it; `dropped` bytes were more than we keep."""

    code: int
    stdout: bytes
    stderr: bytes
    noise: bytes = b""
    dropped: int = 0


class Reach(Protocol):
    """A way to a node: what agents and rsync need of a Link, and what this machine's own (reach/here.py) has too."""

    @property
    def node(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def channel(self, command: bytes | str = SHELL, *, window: int = 0, timeout: float = 10.0) -> Any: ...

    def pipe(self, script: bytes, *, window: int = 0, timeout: float = 10.0) -> Pipe: ...

    def lost(self, why: str) -> Unreachable: ...

    def close(self) -> None: ...


class Link:
    """One node, connected.

        with Link.open(host, cluster) as link:
            print(link.script(b"uname -n\\n", timeout=10).stdout)
    """

    def __init__(self, host: Host, to: SshSettings, connection: Connection, bastion: _Bastion | None) -> None:
        self.host = host
        self.settings = to
        self.connection = connection
        self._bastion = bastion
        self._closing = threading.Lock()

    @classmethod
    def open(cls, host: Host, cluster: Cluster, *, prompt: Prompter | None = None) -> Link:
        """Connect and log in. Raises Unreachable, AuthError or ConfigError.

        Called by a thread that does not own `prompt`, that prompter's owner must call its serve() while we wait.
        """
        if prompt is None or not prompt.mine:
            return _open(host, cluster, prompt or Prompter())
        return open_all([host], cluster, prompter=prompt).all()[host.index]

    @property
    def node(self) -> str:
        return self.host.name or self.host.host

    @property
    def transport(self) -> paramiko.Transport:
        return self.connection.transport

    @property
    def waiting(self) -> int:
        """Bytes that the kernel has taken and the other side has not yet; 0 where that cannot be told."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.transport.sock, termios.TIOCOUTQ, bytes(4)))[0])
        except (OSError, TypeError, ValueError, AttributeError):  # a gateway's channel, a ProxyCommand's pipe
            return 0

    @property
    def times(self) -> dict[str, float]:
        """Seconds of the connection's phases: connect (key exchange included) and login."""
        return dict(getattr(self.transport, "times", {}))

    @property
    def alive(self) -> bool:
        """False once the connection is known to be lost. A frozen node looks alive: only a timeout tells."""
        return bool(self.connection.is_connected)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and whatever still runs on it. Twice is fine; a frozen node does not hold us up."""
        if not self._closing.acquire(blocking=False):
            return
        _hang_up(self.connection)
        if self._bastion:
            self._bastion.leave()

    def channel(self, command: bytes | str = SHELL, *, window: int = 0, timeout: float = 10.0) -> paramiko.Channel:
        """A new session with `command` requested on it, not waited for: a refusal shows as a channel without status."""
        try:
            channel = self.transport.open_session(window or None, BULK_PACKET if window else None, timeout)
            self.transport._send_user_message(_exec(channel, command))
        except paramiko.ChannelException as error:
            raise PreflightError(
                f"sshd refuses one more session on the connection ({error.text or error.code})",
                "raise MaxSessions in its sshd_config (10 is the default)", self.node,
            ) from None  # fmt: skip
        except BROKEN as error:
            raise self.lost(f"no session on the connection ({error or type(error).__name__})") from None
        return channel

    def script(self, text: bytes, timeout: float) -> Completed:
        """Run a POSIX sh script. Its commands share its stdin: give them </dev/null. Raises Unreachable."""
        mark = secrets.token_hex(16).encode()
        done = self.feed(b"printf %%s %s; printf %%s %s >&2\n" % (mark, mark) + text, mark, timeout)
        if done is None:
            raise self.lost(f"no answer within {timeout:g} s")
        return done

    def pipe(self, script: bytes, *, window: int = 0, timeout: float = 10.0) -> Pipe:
        return open_pipe(self, script, window=window, timeout=timeout)

    def feed(self, text: bytes, mark: bytes, timeout: float) -> Completed | None:
        """Run text by /bin/sh, which must print `mark` to both streams where the noise ends; None: not in time."""
        end = time.monotonic() + timeout
        channel = self.channel(timeout=min(timeout, self.settings.connect_timeout))
        try:
            _send(channel, text)
            output = _Output(channel)
            if not output.collect(end) or not channel.status_event.wait(max(0.0, end - time.monotonic())):
                return None
            return self._completed(channel, output, mark)
        except BROKEN as error:
            raise self.lost(f"the connection broke ({error or type(error).__name__})") from None
        finally:
            discard(channel)

    def _completed(self, channel: paramiko.Channel, output: _Output, mark: bytes) -> Completed:
        noise, found, stdout = b"".join(output.stdout).partition(mark)
        _, _, stderr = b"".join(output.stderr).partition(mark)
        if channel.exit_status < 0 and not self.alive:
            raise self.lost("the connection was lost")
        if not found:
            said = (noise + b"".join(output.stderr))[-500:].decode(errors="replace").strip()
            raise PreflightError(
                f"the login shell of {self.settings.user} did not start /bin/sh" + (f"; it said: {said}" if said else ""),
                "look at the account's shell and its start files (.bashrc) on that node", self.node,
            )  # fmt: skip
        code = channel.exit_status if channel.exit_status >= 0 else 255
        return Completed(code, stdout, stderr, noise, output.dropped)

    def lost(self, why: str) -> Unreachable:
        return Unreachable(why, "look at the node and the network, then try again", self.node)


def run_user_command(link: Link, command: str, timeout: float = 0.0) -> Completed:
    """Run what a user typed by that user's login shell on the node. `timeout` 0: as long as it takes."""
    if "\0" in command:
        raise UsageError("a command cannot contain a zero byte")
    mark = secrets.token_hex(16)
    text = _USER_COMMAND % {"mark": mark, "command": shlex.quote(command)}
    done = link.feed(text.encode("utf-8", "surrogateescape"), mark.encode(), timeout or _NO_END)
    if done is None:
        fix = "it may still run there: look with `inv exec`"
        raise TimedOut(f"the command did not end within {timeout:g} s", fix, link.node)
    return done


def open_all(
    hosts: Sequence[Host],
    cluster: Cluster,
    *,
    prompter: Prompter | None = None,
    check: Callable[[], None] | None = None,
) -> Gathered[Link]:
    """Connect to all hosts side by side; keys of the result are node ids. Questions are asked by this thread."""
    asks = prompter or Prompter()
    links: list[Link] = []
    given_up = threading.Event()

    def connect(host: Host) -> Link:
        link = _open(host, cluster, asks)
        links.append(link)
        if given_up.is_set():  # the caller has gone: nobody will close it
            link.close()
        return link

    def look() -> None:
        asks.serve()
        if check:
            check()

    try:
        return each({host.index: host for host in hosts}, connect, check=look)
    except BaseException:
        given_up.set()
        for link in list(links):
            link.close()
        raise


def close_all(links: Sequence[Reach]) -> None:
    """Close many connections side by side."""
    each(list(links), lambda link: link.close())


def open_pipe(link: Reach, script: bytes, *, window: int, timeout: float) -> Pipe:
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


def _exec(channel: paramiko.Channel, command: bytes | str) -> paramiko.Message:
    """paramiko's own exec_command waits for the answer, and without an end."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(True)
    message.add_string(command)
    return message


class Pipe:
    """A script on a node, its stdin and stdout; bytes before its start are gone, its stderr is kept in `errors`."""

    def __init__(self, link: Reach, channel: Any, mark: bytes) -> None:
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
            self.channel.settimeout(max(0.01, end - time.monotonic()))
            try:
                more = self.channel.recv(_CHUNK)
            except TimeoutError:
                raise self.link.lost(f"no answer within {timeout:g} s") from None
            if not more:
                said = (got + self._stderr())[-500:].decode(errors="replace").strip()
                raise PreflightError(
                    f"the login shell did not start /bin/sh; it said: {said}",
                    "look at the account's shell and its start files (.bashrc) on that node", self.link.node,
                )  # fmt: skip
            got = got[-KEEP:] + more
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
        _briefly(channel.close)
        return
    try:
        channel.close()  # the node spoke a moment ago: this does not hang
    except BROKEN:
        return


# ---- opening


def _open(host: Host, cluster: Cluster, prompter: Prompter) -> Link:
    more_files()
    to = settings(host, cluster)
    if not to.gateways:
        return Link(host, to, _direct(to, prompter), None)
    bastion = _Bastion.enter(to.gateways, prompter, to)
    try:
        deadline = time.monotonic() + to.connect_timeout
        sock = dial.tunnel(bastion.transport, to.gateways[-1], to, deadline)
        return Link(host, to, _connect(to, sock, prompter, deadline), bastion)
    except ClustertoolError:
        bastion.leave()
        raise


def _direct(to: SshSettings, prompter: Prompter) -> Connection:
    """A connection without a gateway. A server that hangs up under the rush of our logins is asked again."""
    deadline = time.monotonic() + to.connect_timeout
    for pause in (*_PAUSES, 0.0):
        try:
            sock = dial.proxy(to) if to.proxy_command else dial.tcp(to, deadline)
            return _connect(to, sock, prompter, deadline)
        except dial.Dropped:
            if not pause or time.monotonic() + pause > deadline:
                raise
            time.sleep(pause * (0.5 + random.random()))
    raise AssertionError("the last try returns or raises")


def _connect(to: SshSettings, sock: Any, prompter: Prompter, deadline: float) -> Connection:
    """A Fabric connection on `sock`, logged in. The socket is closed on every failure."""
    start, login = deadline - to.connect_timeout, Login(to, prompter, deadline)
    left = max(0.1, deadline - time.monotonic())
    known = hostkeys.known_hosts(to)

    def transport(sock: Any, **options: Any) -> dial.Transport:
        made = dial.Transport(sock, **options)
        made._preferred_keys = known.algorithms(to.host_key_name)
        made.channel_timeout = made.handshake_timeout = to.connect_timeout
        return made

    # A Config of its own, which reads no files: Connection writes into it, and that is not safe between threads.
    config = Config(lazy=True, ssh_config=paramiko.SSHConfig())
    connection = Connection(
        to.hostname, user=to.user, port=to.port, config=config, forward_agent=False,
        connect_kwargs={
            "sock": sock, "timeout": left, "banner_timeout": left, "auth_strategy": login,
            "transport_factory": transport,
        },
    )  # fmt: skip
    connection.client.set_missing_host_key_policy(hostkeys.Policy(to))
    try:
        connection.open()
    except ClustertoolError:
        _abort(connection, sock)
        raise
    except BROKEN as error:
        late = time.monotonic() >= deadline
        failure = dial.failed_handshake(to, sock, error, late)
        _abort(connection, sock)
        raise failure from None
    connection.transport.times = {"connect": login.began - start, "login": time.monotonic() - login.began}
    return connection


def _abort(connection: Connection, sock: Any) -> None:
    def close() -> None:
        connection.client.close()
        sock.close()

    _wake(sock)
    _briefly(close)


def _hang_up(connection: Connection) -> None:
    transport = connection.transport
    if transport is None:
        return
    _wake(transport.sock)
    if isinstance(transport.sock, paramiko.Channel):
        _briefly(connection.client.close)  # says goodbye on the gateway's connection, which may be frozen
    else:
        connection.client.close()


def _wake(sock: Any) -> None:
    """End the reads on a socket at once: the connection's thread need not wait for its next look."""
    if isinstance(sock, socket.socket):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            return


def _briefly(do: Callable[[], None], limit: float = 1.0) -> None:
    """Do something that a dead peer could hold up; after `limit` seconds it may go on alone."""

    def quietly() -> None:
        try:
            do()
        except BROKEN:  # it has gone already
            return

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(limit)


class _Bastion:
    """A chain of open connections to jump hosts, shared by all nodes behind it and closed with the last of them."""

    _all: dict[tuple[SshSettings, ...], _Bastion] = {}
    _lock = threading.Lock()

    def __init__(self, chain: tuple[SshSettings, ...]) -> None:
        self._chain = chain
        self._users = 0
        self._opening = threading.Lock()
        self._open: list[Connection] = []
        self._failure: ClustertoolError | None = None
        self._failed_at = 0.0

    @classmethod
    def enter(cls, chain: tuple[SshSettings, ...], prompter: Prompter, to: SshSettings) -> _Bastion:
        """The bastion of this chain, open. Raises the gateway's own failure, told for the node `to`."""
        with cls._lock:
            bastion = cls._all.setdefault(chain, cls(chain))
            bastion._users += 1
        try:
            bastion._make(prompter)
        except ClustertoolError as error:
            bastion.leave()
            where = f"the gateway {error.node}: " if error.node else ""
            raise type(error)(where + error.what, error.fix, to.name) from None
        return bastion

    @property
    def transport(self) -> paramiko.Transport:
        return self._open[-1].transport

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if not self._failure:  # a failure is remembered, see _make
                self._all.pop(self._chain, None)
            idle, self._open = self._open, []
        for connection in reversed(idle):
            _hang_up(connection)

    def _make(self, prompter: Prompter) -> None:
        """Open the chain once. A failure counts for all who come within the timeout: they would fail as slowly."""
        with self._opening:
            if self._open and self._open[-1].is_connected:
                return
            if self._failure and time.monotonic() - self._failed_at < self._chain[0].connect_timeout:
                raise self._failure
            self._failure, self._open = None, []
            try:
                for number, to in enumerate(self._chain):
                    self._open.append(self._hop(number, to, prompter))
            except ClustertoolError as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise

    def _hop(self, number: int, to: SshSettings, prompter: Prompter) -> Connection:
        if not number:
            return _direct(to, prompter)
        deadline = time.monotonic() + to.connect_timeout
        sock = dial.tunnel(self._open[-1].transport, self._chain[number - 1], to, deadline)
        return _connect(to, sock, prompter, deadline)


# ---- reading both streams of a channel without threads


class _Bell:
    """What paramiko rings when bytes come. Only the one who waits may silence it: it listens to two streams."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set

    def clear(self) -> None:
        """paramiko would clear it after emptying one stream, while the other has bytes."""

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()


@dataclass
class _Output:
    """The two output streams of a command, bounded; each costs as much as it has bytes."""

    channel: paramiko.Channel
    stdout: list[bytes] = field(default_factory=list)
    stderr: list[bytes] = field(default_factory=list)
    dropped: int = 0
    _room: list[int] = field(default_factory=lambda: [KEEP, KEEP])

    def collect(self, end: float) -> bool:
        """Read to the end of both streams; False if the time is over first."""
        channel, bell = self.channel, _Bell()
        channel.in_buffer.set_event(bell)
        channel.in_stderr_buffer.set_event(bell)
        while True:
            last = channel.eof_received or channel.closed  # looked at before reading: nothing comes after it
            while channel.recv_ready():
                self._keep(self.stdout, 0, channel.recv(_CHUNK))
            while channel.recv_stderr_ready():
                self._keep(self.stderr, 1, channel.recv_stderr(_CHUNK))
            if last:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            bell.wait(min(left, 60.0))

    def _keep(self, stream: list[bytes], which: int, data: bytes) -> None:
        kept = data[: self._room[which]]
        self._room[which] -= len(kept)
        self.dropped += len(data) - len(kept)
        if kept:
            stream.append(kept)


def _send(channel: paramiko.Channel, data: bytes) -> None:
    """Send all and say that this was all. A long text goes on beside us: the node may answer before it has read all."""

    def send() -> None:
        try:
            channel.sendall(data)
            channel.shutdown_write()
        except BROKEN:  # the channel has closed: its reader finds out
            return

    if len(data) <= _INLINE:
        send()
    else:
        threading.Thread(target=send, daemon=True).start()
