"""A link is one open Fabric connection per node. Every channel of a command uses it, and every wait has a limit.

The exec request is a fixed string that sh, csh and fish interpret alike; scripts, commands and data go over stdin.
Output of a login shell's start files comes before a random mark and is dropped.
"""

from __future__ import annotations

import fcntl
import struct
import termios
import threading
from collections.abc import Mapping

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from clustertool.errors import PreflightError, Unreachable
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.ssh.channel import BROKEN, BULK_PACKET, NO_SHELL
from clustertool.ssh.login import hang_up, login
from clustertool.ssh.prompter import Prompter

SHELL = "exec /bin/sh"


class SshLink:
    """One node, connected."""

    noise = b""
    no_shell = NO_SHELL

    def __init__(self, host: Host, cluster: Cluster, prompter: Prompter | None = None) -> None:
        """Connect and log in. Raises Unreachable, AuthError or ConfigError.

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
        """End the connection and everything that runs on it. It may be called twice; a frozen node does not delay it."""
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
        return Unreachable(why, "check the node and the network, then try again", self.node)


def _request(channel: paramiko.Channel, kind: str, answered: bool) -> paramiko.Message:
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string(kind)
    message.add_boolean(answered)
    return message
