"""A wire carries small JSON messages between supervisor and lead: mutual TLS, never blocking, resumed after a break.

`Wire` is one TCP connection, `Mailbox` what outlives it: messages are numbered, acknowledged and sent again, so that
a broken cable loses and doubles nothing.
"""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
from collections import deque
from typing import Deque, List, Tuple

from clustertool.plan.frames import Decoder, FrameError, Header, encode

_CHUNK = 1 << 16


def context(certificate: str, key: str, server: bool) -> ssl.SSLContext:
    """TLS with the job's throw-away certificate as its only authority: who holds its key is a member of the job."""
    ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    ctx.minimum_version = ssl.TLSVersion.TLSv1_2
    ctx.check_hostname = False
    ctx.verify_mode = ssl.CERT_REQUIRED
    ctx.load_verify_locations(cadata=certificate)
    _load_pair(ctx, certificate + "\n" + key)
    return ctx


def _load_pair(ctx: ssl.SSLContext, pem: str) -> None:
    """load_cert_chain wants a file name; memory has one, so that the key never touches a disk."""
    try:
        fd = os.memfd_create("job-certificate")
    except OSError:  # an old kernel: an unlinked-at-once file of ours
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem.encode())
            file.flush()
            ctx.load_cert_chain(file.name)
        return
    try:
        os.write(fd, pem.encode())
        ctx.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


class Wire:
    """One connection. turn() moves what can be moved and returns the messages that came; ConnectionError ends it."""

    def __init__(self, sock: socket.socket, ctx: ssl.SSLContext, server: bool, max_header: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = ctx.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        self._decoder = Decoder(max_header, 0)
        self._out = bytearray()
        self._wants_write = not server  # a client's connect() shows itself by becoming writable
        self.secure = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        return self._wants_write or (self.secure and bool(self._out))

    def send(self, header: Header) -> None:
        self._out += encode(header)

    @property
    def backlog(self) -> int:
        return len(self._out)

    def turn(self) -> List[Header]:
        """Raises ConnectionError when the other side is gone, is a stranger, or talks nonsense."""
        try:
            if not self.secure:
                self._wants_write = False
                self._sock.do_handshake()
                self.secure = True
            messages = self._read()
            self._flush()
            return messages
        except ssl.SSLWantReadError:
            return []
        except ssl.SSLWantWriteError:
            self._wants_write = True
            return []
        except (OSError, FrameError) as error:
            raise ConnectionError(str(error)) from error

    def _read(self) -> List[Header]:
        messages: List[Header] = []
        while True:
            try:
                data = self._sock.recv(_CHUNK)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return messages
            if not data:
                raise ConnectionError("closed by the other side")
            messages += [header for header, _ in self._decoder.feed(data)]

    def _flush(self) -> None:
        self._wants_write = False
        while self._out:
            try:
                sent = self._sock.send(self._out[:_CHUNK])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            del self._out[:sent]

    def close(self) -> None:
        self._sock.close()


class Mailbox:
    """Numbers what goes out, keeps it until the other side has it, and drops what came twice."""

    def __init__(self) -> None:
        self._next = 1
        self._kept: Deque[Tuple[int, Header]] = deque()
        self.got = 0

    def post(self, message: Header) -> Header:
        """The message with its number, kept for a resend."""
        numbered = {**message, "n": self._next}
        self._kept.append((self._next, numbered))
        self._next += 1
        return numbered

    def kept(self) -> List[Header]:
        return [message for _, message in self._kept]

    def take(self, header: Header) -> bool:
        """Note acknowledgement and number of a message that came; False if it is an old one or only a beat."""
        acknowledged = int(header.get("a", 0))
        while self._kept and self._kept[0][0] <= acknowledged:
            self._kept.popleft()
        number = int(header.get("n", 0))
        if number <= self.got:
            return False
        self.got = number
        return True
