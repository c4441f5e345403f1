"""A transport is paramiko's connection to one ssh server, and its channels, made safe to share between threads.

Differences to paramiko: no thread for the handshake's deadline (it would delay the interpreter's end), few wake-ups while
idle, exits by signal are detected, a channel's CLOSE is its last message, and a server asks few questions at once.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_handler import AuthHandler
from paramiko.common import MSG_CHANNEL_REQUEST
from paramiko.config import SSHConfig
from paramiko.packet import Packetizer

from clustertool.errors import ConfigError

Untyped = Any  # an object of paramiko, which has no types

SUPPORTED = "paramiko>=3.5,<6"  # as in setup.cfg; `make test-versions` tests both ends
# What this package overrides or calls, and paramiko does not promise to keep.
_PRIVATE: dict[type, str] = {
    AgentSSH: "_connect _send_message",
    AuthHandler: "_parse_userauth_info_request",
    Packetizer: "start_handshake handshake_timed_out complete_handshake",
    SSHConfig: "TOKENS_BY_CONFIG_KEY _tokenize",
    paramiko.Channel: "_send _close_internal _handle_request",
    paramiko.Transport: """_CLIENT_ID _active_check_timeout _channel_handler_table
        _preferred_ciphers _preferred_macs _send_user_message""",
}


def _require_supported() -> None:
    """Raise ConfigError for a version of paramiko that lacks one of the private names that are used here."""
    private = [(kind, name) for kind, names in _PRIVATE.items() for name in names.split()]
    missing = [f"{kind.__name__}.{name}" for kind, name in private if not hasattr(kind, name)]
    if missing:
        what = f"paramiko {paramiko.__version__} is not supported: it has no {', '.join(missing)}"
        raise ConfigError(what, f'run: {sys.executable} -m pip install "{SUPPORTED}"')


_require_supported()

# Without a handler logging would print paramiko's tracebacks on stderr; what went wrong comes to us as an exception.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
_MOST_QUESTIONS = 16
_ENCRYPT_THEN_MAC = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com")


class _Packetizer(Packetizer):  # type: ignore[misc]
    """A deadline that is polled instead of a timer thread."""

    _until: float | None = None

    def start_handshake(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout

    def handshake_timed_out(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def complete_handshake(self) -> None:
        self._until = None


def _request(channel: Untyped, message: Untyped) -> None:
    """Set the exit status of a command that a signal N has killed to 128 + N, as in a shell; else do as paramiko.

    paramiko knows exit-status only.
    """
    kind = message.get_text()
    message.get_boolean()
    if kind == "exit-signal":
        number = getattr(signal, "SIG" + message.get_text(), signal.SIGKILL)
        channel.exit_status = 128 + int(number)
        channel.status_event.set()
        return
    message.rewind()
    message.get_int()  # the channel's number, which the transport had read
    channel._handle_request(message)


class _Login(AuthHandler):  # type: ignore[misc]
    """paramiko's login, with a limit of the questions that a server asks at once.

    paramiko makes room for as many as the server claims to have, up to 2**32.
    """

    def _parse_userauth_info_request(self, message: Untyped) -> None:
        """Raise SSHException for more than 16 questions at once; else do as paramiko."""
        for _ in range(3):  # name, instructions, language
            message.get_binary()
        count = message.get_int()
        if count > _MOST_QUESTIONS:
            raise paramiko.SSHException(f"the server asks {count} questions at once")
        message.rewind()
        super()._parse_userauth_info_request(message)


class Channel(paramiko.Channel):  # type: ignore[misc]
    """A channel that sends no bytes and no EOF after its CLOSE.

    paramiko makes a message under the channel's lock and sends it after: bytes or an EOF of one thread can pass a CLOSE of
    another (or the answer to the other side's). sshd ends the whole connection then, and a gateway's carries all nodes:
    "Received data for nonexistent channel" (https://github.com/paramiko/paramiko/issues/1115). So the last thread that is
    still sending sends the CLOSE.
    """

    _sending = 0  # threads, under the channel's lock
    _goodbye: tuple[Untyped, ...] = ()

    def _send(self, data: bytes, message: Untyped) -> int:
        with self._before_goodbye():
            return int(super()._send(data, message))

    def shutdown(self, how: int) -> None:
        with self._before_goodbye():
            super().shutdown(how)

    @contextmanager
    def _before_goodbye(self) -> Iterator[None]:
        """Return a context manager in which this thread counts as sending; the last one sends the CLOSE that was kept back."""
        with self.lock:
            self._sending += 1
        try:
            yield
        finally:
            goodbye: tuple[Untyped, ...] = ()
            with self.lock:
                self._sending -= 1
                if not self._sending:
                    goodbye, self._goodbye = self._goodbye, ()
            for message in filter(None, goodbye):
                self.transport._send_user_message(message)

    def _close_internal(self) -> tuple[Untyped, ...]:
        """Return the messages of a close, or keep them back, and return none, while a thread is sending.

        Called under the channel's lock; the caller sends the result.
        """
        messages: tuple[Untyped, ...] = super()._close_internal()
        if not self._sending:
            return messages
        self._goodbye += messages
        return ()


class Transport(paramiko.Transport):  # type: ignore[misc]
    """paramiko's connection, with the classes of this module, and the fastest of the strong algorithms first."""

    _CLIENT_ID = "clustertool"
    preferred_keys: tuple[str, ...] = ()  # the algorithms of host keys to ask for, best first, certificates included
    times: Mapping[str, float] = {}  # seconds of the phases of its opening
    _active_check_timeout = 2.0  # how often an idle connection's thread wakes up
    _preferred_ciphers = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
    _preferred_macs = (*_ENCRYPT_THEN_MAC, "hmac-sha2-256", "hmac-sha2-512", "hmac-sha1")
    _channel_handler_table = {**paramiko.Transport._channel_handler_table, MSG_CHANNEL_REQUEST: _request}

    def __init__(self, sock: Untyped, **options: Untyped) -> None:
        super().__init__(sock, packetizer_class=_Packetizer, **options)

    @property
    def auth_handler(self) -> Untyped:
        return self._login

    @auth_handler.setter
    def auth_handler(self, handler: Untyped) -> None:
        if handler is not None:
            handler.__class__ = _Login  # paramiko makes its own for each attempt
        self._login = handler

    def open_channel(self, *args: Untyped, **options: Untyped) -> Channel:
        """Open a channel as paramiko does, and make it a Channel of this module."""
        channel = super().open_channel(*args, **options)
        channel.__class__ = Channel  # paramiko creates its own, which no thread uses yet
        assert isinstance(channel, Channel)
        return channel
