"""A link is one open Fabric connection per node. Every channel of a command uses it, and every wait has a limit.

An exec request is one of few fixed strings that sh, csh and fish interpret alike; scripts, commands and data go over stdin.
Output of a login shell's start files comes before a random mark and is kept apart as noise.
"""

from __future__ import annotations

import fcntl
import secrets
import shlex
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko
from fabric import Connection

from clustertool.errors import PreflightError, TimedOut, Unreachable, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.ssh.channel import BROKEN, BULK_PACKET, SHELL, Output, Pipe, discard, open_pipe, request, send
from clustertool.ssh.login import Bastion, hang_up, is_direct, login
from clustertool.ssh.parallel import Gathered, each
from clustertool.ssh.prompter import Prompter
from clustertool.ssh.settings import SshSettings

# The user's shell reads its start files first, so the script prints the mark first. csh cannot write to stderr only.
_USER_COMMAND = """\
m='printf %%s %(mark)s; printf %%s %(mark)s >&2'
case "${SHELL##*/}" in (bash|sh|dash|ash|zsh|ksh*|mksh) ;; (*) m="/bin/sh -c '$m'" ;; esac
exec "${SHELL:-/bin/sh}" -c "$m
"%(command)s </dev/null
"""
_NO_END = 3600.0 * 24 * 365


@dataclass(frozen=True)
class Completed:
    """How a remote command ended. `noise` came before it; `dropped` bytes were more than we keep."""

    code: int
    stdout: bytes
    stderr: bytes
    noise: bytes = b""
    dropped: int = 0


class SshLink:
    """One node, connected.

    with Link.open(host, cluster) as link:
        print(link.script(b"uname -n\\n", timeout=10).stdout)
    """

    def __init__(self, host: Host, to: SshSettings, connection: Connection, bastion: Bastion | None) -> None:
        self.host = host
        self.settings = to
        self.connection = connection
        self._bastion = bastion
        self._closing = threading.Lock()

    @classmethod
    def open(cls, host: Host, cluster: Cluster, *, prompt: Prompter | None = None) -> SshLink:
        """Connect and log in. Raises Unreachable, AuthError or ConfigError.

        Called by a thread that does not own `prompt`, that prompter's owner must call its serve() while we wait.
        """
        if prompt is None or not prompt.mine:
            return cls(host, *login(host, cluster, prompt or Prompter()))
        return open_all([host], cluster, prompter=prompt).all()[host.index]

    @property
    def node(self) -> str:
        return self.host.name or self.host.host

    @property
    def transport(self) -> paramiko.Transport:
        return self.connection.transport

    @property
    def waiting(self) -> int:
        """Bytes that the kernel has accepted and the other side has not yet; 0 if this is unknown."""
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
        """False once the connection is known to be lost. A frozen node seems alive: only a timeout detects it."""
        return bool(self.connection.is_connected)

    def __enter__(self) -> SshLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def quick(self) -> bool:
        """Whether close() never waits: no gateway, and no ProxyCommand."""
        return is_direct(self.connection)

    def close(self) -> None:
        """End the connection and everything that runs on it. It may be called twice; a frozen node does not delay it."""
        if not self._closing.acquire(blocking=False):
            return
        hang_up(self.connection)
        if self._bastion:
            self._bastion.leave()

    def channel(self, command: bytes | str = SHELL, *, window: int = 0, timeout: float = 10.0) -> paramiko.Channel:
        """A new session with `command` requested on it, not waited for: a refusal shows as a channel without status."""
        try:
            channel = self.transport.open_session(window or None, BULK_PACKET if window else None, timeout)
            self.transport._send_user_message(request(channel, command))
        except paramiko.ChannelException as error:
            raise PreflightError(
                f"sshd refuses one more session on the connection ({error.text or error.code})",
                "raise MaxSessions in its sshd_config (10 is the default)",
                self.node,
            ) from None
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
            send(channel, text)
            output = Output(channel)
            if not output.collect(end) or not channel.status_event.wait(max(0.0, end - time.monotonic())):
                return None
            return self._completed(channel, output, mark)
        except BROKEN as error:
            raise self.lost(f"the connection broke ({error or type(error).__name__})") from None
        finally:
            discard(channel)

    def _completed(self, channel: paramiko.Channel, output: Output, mark: bytes) -> Completed:
        noise, found, stdout = b"".join(output.stdout).partition(mark)
        _, _, stderr = b"".join(output.stderr).partition(mark)
        if channel.exit_status < 0 and not self.alive:
            raise self.lost("the connection was lost")
        if not found:
            tail = (noise + b"".join(output.stderr))[-500:].decode(errors="replace").strip()
            raise PreflightError(
                f"the login shell of {self.settings.user} did not start /bin/sh"
                + (f"; its output: {tail}" if tail else ""),
                "check the account's shell and its start files (.bashrc) on that node",
                self.node,
            )
        code = channel.exit_status if channel.exit_status >= 0 else 255
        return Completed(code, stdout, stderr, noise, output.dropped)

    def lost(self, why: str) -> Unreachable:
        return Unreachable(why, "check the node and the network, then try again", self.node)


def run_user_command(link: SshLink, command: str, timeout: float = 0.0) -> Completed:
    """Run what a user typed by that user's login shell on the node. `timeout` 0: as long as it takes."""
    if "\0" in command:
        raise UsageError("a command cannot contain a zero byte")
    mark = secrets.token_hex(16)
    text = _USER_COMMAND % {"mark": mark, "command": shlex.quote(command)}
    done = link.feed(text.encode("utf-8", "surrogateescape"), mark.encode(), timeout or _NO_END)
    if done is None:
        fix = "it may still run there: check with `inv exec`"
        raise TimedOut(f"the command did not end within {timeout:g} s", fix, link.node)
    return done


def open_all(
    hosts: Sequence[Host],
    cluster: Cluster,
    *,
    prompter: Prompter | None = None,
    check: Callable[[], None] | None = None,
) -> Gathered[SshLink]:
    """Connect to all hosts side by side; keys of the result are node ids. Questions are asked by this thread."""
    asks = prompter or Prompter()
    links: list[SshLink] = []
    given_up = threading.Event()

    def connect(host: Host) -> SshLink:
        link = SshLink(host, *login(host, cluster, asks))
        links.append(link)
        if given_up.is_set():  # the caller has left: no one else will close it
            link.close()
        return link

    def check_all() -> None:
        asks.serve()
        if check:
            check()

    try:
        return each({host.index: host for host in hosts}, connect, check=check_all)
    except BaseException:
        given_up.set()
        for link in list(links):
            link.close()
        raise
    finally:
        asks.announce()
