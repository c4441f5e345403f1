"""A link is one open Fabric connection per node. Every channel of a command uses it, and every wait has a limit.

The exec request is a fixed string that sh, csh and fish interpret alike; scripts, commands and data go over stdin.
Output of a login shell's start files comes before a random mark and is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import random
import socket
import struct
import termios
import threading
import time
from collections.abc import Mapping
from typing import Any

import paramiko
from fabric import Config, Connection
from paramiko.common import cMSG_CHANNEL_REQUEST

from clustertool.errors import ClustertoolError, PreflightError, Unreachable
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.ssh import dial, host_keys
from clustertool.ssh.auth import Login
from clustertool.ssh.channel import BROKEN, BULK_PACKET, NO_SHELL, run_briefly
from clustertool.ssh.parallel import raise_file_limit
from clustertool.ssh.paramiko_fixes import Transport
from clustertool.ssh.prompter import Prompter
from clustertool.ssh.settings import SshSettings, settings

_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before the next try of a login that was dropped
SHELL = "exec /bin/sh"


class _FabricConnection(Connection):  # type: ignore[misc]
    """Fabric's connection with ordinary attributes.

    Fabric writes some of them into its Config, which threads could not share then, and looks through all its names for each
    one: 0.5 ms of the laptop's CPU per node in place of 0.1.
    """

    __setattr__ = object.__setattr__


@functools.cache
def _fabric_config() -> Config:
    """Create Fabric's settings. No file is read."""
    return Config(lazy=True, ssh_config=paramiko.SSHConfig())


def login(host: Host, cluster: Cluster, prompter: Prompter) -> tuple[SshSettings, Connection, Bastion | None]:
    """Log in to a host, through its gateways; return its settings, the connection, and the bastion, None without gateways.

    The limit of open files of this process is increased, too. Raises Unreachable if the host or a gateway cannot be reached,
    AuthError if a login or a host key is refused, and ConfigError for wrong settings.
    """
    raise_file_limit()
    to = settings(host, cluster)
    if not to.gateways:
        return to, _connect_directly(to, prompter), None
    bastion = Bastion.enter(to.gateways, prompter, to)
    try:
        return to, bastion.connect(to, prompter), bastion
    except ClustertoolError:
        bastion.leave()
        raise


def _connect_directly(to: SshSettings, prompter: Prompter) -> Connection:
    """Connect by TCP, or by the ProxyCommand, and log in. A server that drops connections before the login is tried again.

    There are at most six tries, with pauses, within the timeout of connections. Raises Unreachable if no session begins,
    AuthError if the login or the host key is refused, and ConfigError if the ProxyCommand does not start.
    """
    deadline = time.monotonic() + to.connect_timeout
    dropped: dial.Dropped | None = None
    for pause in (*_PAUSES, 0.0):
        try:
            sock = dial.proxy(to) if to.proxy_command else dial.tcp(to, deadline)
            return _connect(to, sock, prompter, deadline)
        except dial.Dropped as error:
            if not pause or time.monotonic() + pause > deadline:
                raise
            dropped = error
            time.sleep(pause * (0.5 + random.random()))
        except Unreachable as error:
            # Without time left for this try the error of the previous one is more useful.
            raise (dropped if dropped and time.monotonic() >= deadline else error) from None
    raise AssertionError("the last try returns or raises")


def _connect(to: SshSettings, sock: Any, prompter: Prompter, deadline: float) -> Connection:
    """Open a Fabric connection on `sock` and log in. The socket is closed on every failure.

    Raises AuthError if the login or the host key is refused, and Unreachable if no session begins: Dropped, which is worth
    another try, if the server has closed the connection.
    """
    start, login = deadline - to.connect_timeout, Login(to, prompter, deadline)
    left = max(0.1, deadline - time.monotonic())
    known = host_keys.known_hosts(to)

    def transport(sock: Any, **options: object) -> Transport:
        made = Transport(sock, **options)
        made.preferred_keys = known.algorithms(to)
        made.channel_timeout = made.handshake_timeout = to.connect_timeout
        return made

    options = {"timeout": left, "banner_timeout": left, "auth_strategy": login, "transport_factory": transport}
    options["sock"] = sock
    connection = _FabricConnection(
        to.hostname, to.user, to.port, _fabric_config(), forward_agent=False, connect_kwargs=options
    )
    connection.client.set_missing_host_key_policy(host_keys.HostKeyPolicy(to, prompter.add_new_key))
    try:
        connection.open()
    except ClustertoolError:
        hang_up(connection, sock)
        raise
    except BROKEN as error:
        late = time.monotonic() >= deadline
        failure = dial.failed_handshake(to, sock, error, late)
        hang_up(connection, sock)
        raise failure from None
    connection.transport.times = {"connect": login.began - start, "login": time.monotonic() - login.began}
    return connection


def hang_up(connection: Connection, sock: Any = None) -> None:
    """Close a connection, whose socket is `sock` if it is not logged in. Threads that read from it get its end at once.

    It waits at most a second.
    """
    used = sock or connection.transport.sock

    def close() -> None:
        connection.client.close()
        used.close()

    if isinstance(used, socket.socket):
        with contextlib.suppress(OSError):  # the other side was faster
            used.shutdown(socket.SHUT_RDWR)
    if isinstance(used, socket.socket) and not sock:
        close()
    else:
        run_briefly(close)  # closing sends a message on the gateway's connection, which may be frozen


class Bastion:
    """A chain of open connections to jump hosts, shared by all nodes behind it and closed with the last of them."""

    _all: dict[tuple[SshSettings, ...], Bastion] = {}
    _lock = threading.Lock()

    def __init__(self, chain: tuple[SshSettings, ...]) -> None:
        self._chain = chain
        self._users = 0
        self._opening = threading.Lock()
        self._open: list[Connection] = []
        self._failure: ClustertoolError | None = None
        self._failed_at = 0.0

    @classmethod
    def enter(cls, chain: tuple[SshSettings, ...], prompter: Prompter, to: SshSettings) -> Bastion:
        """Return the bastion of this chain for one more user, and open it if it is not open.

        Raises the gateway's own failure, reported for the node `to`.
        """
        with cls._lock:
            bastion = cls._all.setdefault(chain, cls(chain))
            bastion._users += 1
        try:
            bastion._open_chain(prompter)
        except ClustertoolError as error:
            bastion.leave()
            where = f"the gateway {error.node}: " if error.node else ""
            raise type(error)(where + error.what, error.fix, to.name) from None
        return bastion

    def connect(self, to: SshSettings, prompter: Prompter) -> Connection:
        """Log in to a host over the last gateway that is open. Raises what login() raises."""
        deadline = time.monotonic() + to.connect_timeout
        sock = dial.tunnel(self._open[-1].transport, self._chain[len(self._open) - 1], to, deadline)
        return _connect(to, sock, prompter, deadline)

    def leave(self) -> None:
        """Count one user less; without any, close the connections, the last one first."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if not self._failure:  # a failure is remembered, see _open_chain
                self._all.pop(self._chain, None)
            idle, self._open = self._open, []
        for connection in reversed(idle):
            hang_up(connection)

    def _open_chain(self, prompter: Prompter) -> None:
        """Open the chain, if it is not open. Raises why it cannot be opened.

        For the timeout of connections after a failure, all callers get the same error at once: they would fail as slowly.
        """
        with self._opening:
            if self._open and self._open[-1].is_connected:
                return
            if self._failure and time.monotonic() - self._failed_at < self._chain[0].connect_timeout:
                raise self._failure
            self._failure, self._open = None, []
            try:
                self._open.append(_connect_directly(self._chain[0], prompter))
                for to in self._chain[1:]:
                    self._open.append(self.connect(to, prompter))
            except ClustertoolError as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise


# -- the link ----------------------------------------------------------------------------------------------------------


class SshLink:
    """The ssh connection to one node, which is logged in when it is made. Channels are opened on it."""

    noise = b""
    no_shell = NO_SHELL

    def __init__(self, host: Host, cluster: Cluster, prompter: Prompter | None = None) -> None:
        """Connect and log in. Raises what login() raises.

        The thread that made `prompter` must call its serve() while another thread waits here.
        """
        self.host = host
        self.node = host.name or host.host
        self.settings, self.connection, self._bastion = login(host, cluster, prompter or Prompter())
        self.transport: paramiko.Transport = self.connection.transport
        # Seconds of the connection's phases: connect (key exchange included) and login.
        self.times: Mapping[str, float] = self.transport.times
        self._closing = threading.Lock()

    @property
    def waiting(self) -> int:
        """Bytes that the kernel has accepted and the other side has not yet; 0 if this is unknown."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.transport.sock, termios.TIOCOUTQ, bytes(4)))[0])
        except (OSError, TypeError, ValueError, AttributeError):  # a gateway's channel, a ProxyCommand's pipe
            return 0

    @property
    def alive(self) -> bool:
        """False once the connection is known to be lost. A frozen node seems alive: only a timeout detects it."""
        return bool(self.connection.is_connected)

    def __enter__(self) -> SshLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which ends all that runs on it. It may be called twice; a frozen node does not delay it."""
        if not self._closing.acquire(blocking=False):
            return
        hang_up(self.connection)
        if self._bastion:
            self._bastion.leave()

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> paramiko.Channel:
        """Open a shell on a new session without waiting for it: a refusal shows as a channel without status."""
        return self._session(window, timeout, SHELL)

    def terminal(self, shell: str, kind: str, columns: int, lines: int, timeout: float = 10.0) -> paramiko.Channel:
        """Open a shell on a terminal of its own. shell: the exec request, a fixed string. kind: the value of TERM."""
        return self._session(0, timeout, shell, (kind, columns, lines))

    def _session(
        self, window: int, timeout: float, shell: str, terminal: tuple[str, int, int] | None = None
    ) -> paramiko.Channel:
        """Open a session, and request a terminal, if one is given, and `shell`, without waiting for the answers.

        Raises PreflightError if sshd refuses another session, and Unreachable if none is open after `timeout` seconds.
        """
        try:
            channel = self.transport.open_session(window or None, BULK_PACKET if window else None, timeout)
            # paramiko's own functions wait for the answer, and without an end.
            if terminal is not None:
                message = _request(channel, "pty-req", False)
                message.add_string(terminal[0])
                for number in (*terminal[1:], 0, 0):
                    message.add_int(number)
                message.add_string("")
                self.transport._send_user_message(message)
            message = _request(channel, "exec", True)
            message.add_string(shell)
            self.transport._send_user_message(message)
        except paramiko.ChannelException as error:
            what = f"sshd refuses one more session on the connection ({error.text or error.code})"
            raise PreflightError(what, "raise MaxSessions in its sshd_config (10 is the default)", self.node) from None
        except BROKEN as error:
            raise self.lost(f"no session on the connection ({error or type(error).__name__})") from None
        return channel

    def lost(self, why: str) -> Unreachable:
        """Build the error of a lost connection to this node."""
        return Unreachable(why, "check the node and the network, then try again", self.node)


def _request(channel: paramiko.Channel, kind: str, answered: bool) -> paramiko.Message:
    """Begin the message of a channel request of this kind. answered: the server sends a reply."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string(kind)
    message.add_boolean(answered)
    return message
