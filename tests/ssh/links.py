"""Connections that a test has opened, and a message of theirs that comes late."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paramiko
from paramiko.common import cMSG_CHANNEL_CLOSE

from clustertool.errors import TimedOut
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import Gathered, each
from clustertool.ssh.prompter import Prompter
from clustertool.ssh.user_command import Commands, Kept


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
        link = SshLink(host, cluster, asks)
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


@dataclass(frozen=True)
class Completed:
    code: int
    stdout: bytes
    stderr: bytes


def run_user_command(link: Any, command: str, timeout: float = 0.0) -> Completed:
    """Run one command, and keep its output."""
    kept = Kept()
    code = Commands().run(link, command, kept.take, timeout)
    return Completed(code, bytes(kept.stdout), bytes(kept.stderr))


def script(link: SshLink, text: bytes, timeout: float) -> Completed:
    """Run a POSIX sh script. Its commands share its stdin: give them </dev/null. Raises Unreachable."""
    mark, kept = secrets.token_hex(16), Kept()
    whole = f"{{ printf %s {mark}; printf %s {mark} >&2\n{text.decode()}exit\n}}\n"
    try:
        code = Commands().run_script(link, whole, mark, kept.take, timeout)
        return Completed(code, bytes(kept.stdout), bytes(kept.stderr))
    except TimedOut:
        raise link.lost(f"no answer within {timeout:g} s") from None


def close_all(links: Sequence[SshLink]) -> None:
    """Side by side: each dead peer costs a moment."""
    each(list(links), SshLink.close)


class Delayed:
    """The next message of this kind waits at the connection's door, as if its thread had lost the processor there."""

    def __init__(self, transport: paramiko.Transport, kind: bytes) -> None:
        self.here, self.go = threading.Event(), threading.Event()
        self.closes: list[int] = []  # the channels, by the other side's numbers, of each CLOSE that went out
        send = transport._send_user_message

        def door(message: paramiko.Message) -> None:
            if message.asbytes()[:1] == kind and not self.here.is_set():
                self.here.set()
                assert self.go.wait(60)
            send(message)
            if message.asbytes()[:1] == cMSG_CHANNEL_CLOSE:
                self.closes.append(int.from_bytes(message.asbytes()[1:5], "big"))

        transport._send_user_message = door


def forgotten(channel: paramiko.Channel) -> Callable[[], bool]:
    """Whether the other side has sent its CLOSE, too: it knows the channel's number no more."""
    return lambda: channel.transport._channels.get(channel.chanid) is None
