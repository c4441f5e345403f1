"""Connections that a test has opened, and a message of theirs that comes late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import paramiko
from paramiko.common import cMSG_CHANNEL_CLOSE

from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import each


def close_all(links: Sequence[SshLink]) -> None:
    """Side by side: each dead peer costs a moment."""
    each(list(links), SshLink.close)


class Held:
    """The next message of this kind waits at the connection's door, as if its thread had lost the processor there."""

    def __init__(self, transport: paramiko.Transport, kind: bytes) -> None:
        self.here, self.go = threading.Event(), threading.Event()
        self.closes: list[int] = []  # the channels, by the other side's numbers, of each CLOSE that went out
        send = transport._send_user_message

        def door(message: paramiko.Message) -> None:
            if message.asbytes()[:1] == kind and not self.here.is_set():
                self.here.set()
                assert self.go.wait(10)
            send(message)
            if message.asbytes()[:1] == cMSG_CHANNEL_CLOSE:
                self.closes.append(int.from_bytes(message.asbytes()[1:5], "big"))

        transport._send_user_message = door


def forgotten(channel: paramiko.Channel) -> Callable[[], bool]:
    """Whether the other side has said its CLOSE, too: it knows the channel's number no more."""
    return lambda: channel.transport._channels.get(channel.chanid) is None
