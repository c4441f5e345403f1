"""A `TlsLink` is one TCP connection with mutual TLS. It carries small JSON messages and never blocks.

`Mailbox` outlives a connection: messages are numbered, acknowledged and sent again, so that a broken connection loses and
doubles no message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING, Callable, Deque, Iterable, Iterator, List, Optional, Set, Tuple, Union

from clustertool.model.wire.frames import Decoder, Frame, FrameError, Header, Sink, head

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_CHUNK = 1 << 16
_RECORD = 1 << 14  # what TLS gives at a time
_TURN = 1 << 20  # bytes read before others have their turn
TIMED_OUT = ("ETIMEDOUT", "timed out")


def heartbeat_interval(loss_timeout: float) -> float:
    """Return the seconds between two heartbeats, of coordinator and supervisors: a quarter of the timeout, at most 1."""
    return min(1.0, loss_timeout / 4)


def join_patience(loss_timeout: float, nodes: int) -> float:
    """Return the seconds that coordinator and supervisors wait for each other until all have started.

    The larger of the loss timeout, and 30 s plus 0.1 s for each node: many may start on one loaded machine.
    """
    return max(loss_timeout, 30.0 + nodes / 10)


def context(certificate: str, key: str, server: bool) -> ssl.SSLContext:
    """Create a TLS context with the job's certificate as its own and its only authority, so that both sides must be members.

    certificate, key: as PEM. server: for the side that accepts.
    """
    ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    ctx.minimum_version = ssl.TLSVersion.TLSv1_2
    ctx.check_hostname = False
    ctx.verify_mode = ssl.CERT_REQUIRED
    ctx.load_verify_locations(cadata=certificate)
    with _pipe_file(certificate) as public, _pipe_file(key) as private:
        ctx.load_cert_chain(public, private)
    if server and hasattr(ctx, "num_tickets"):
        ctx.num_tickets = 0  # no connection is resumed
    return ctx


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Listen at `address`, or at all addresses if it is not one of this machine's (NAT). port: 0: any. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            sock.bind(("", port))
        sock.listen(backlog)
        stack.pop_all()
    return sock


def dial(address: str, port: int) -> socket.socket:
    """Begin to connect by TCP, without waiting. Raises OSError, also for a name that is not known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        failed = sock.connect_ex((address, port))
        if failed not in (0, errno.EINPROGRESS):
            raise OSError(failed, os.strerror(failed))
        stack.pop_all()
    return sock


def wait_for(readers: Iterable[FileDescriptorLike], seconds: float) -> Set[int]:
    """Wait up to `seconds`, and return the numbers of the descriptors that are ready, as soon as there is one.

    A reader is a descriptor, or has one. One with a true `wants_write` is also ready when it can be written. poll() allows any
    number; select() ends at 1024.
    """
    poll = select.poll()
    for reader in readers:
        writes = getattr(reader, "wants_write", False)
        poll.register(reader, select.POLLIN | select.POLLOUT if writes else select.POLLIN)
    return {fd for fd, _ in poll.poll(seconds * 1000)}


@contextlib.contextmanager
def _pipe_file(pem: str) -> Iterator[str]:
    """Write a text into a pipe, and yield the file name of its other end, since load_cert_chain() needs one.

    So the key is never on a disk. Not every Python has memfds.
    """
    outlet, inlet = os.pipe()
    try:
        os.write(inlet, pem.encode())
        os.close(inlet)
        yield f"/proc/self/fd/{outlet}"
    finally:
        os.close(outlet)


def describe_failure(error: BaseException) -> Tuple[str, str]:
    """Return why a connection failed: the name of its errno, or "", and a description."""
    inner = error.__cause__ or error
    if tls_failed(error):
        return "", f"TLS failed: {inner}"
    if not isinstance(inner, OSError) or inner.errno is None:
        return "", str(inner)
    description = TIMED_OUT[1] if inner.errno == errno.ETIMEDOUT else (inner.strerror or "").lower()
    return errno.errorcode.get(inner.errno, ""), description


def tls_failed(error: BaseException) -> bool:
    """Check whether a connection ended by an error of TLS: for example, the other side has no certificate of the job."""
    return isinstance(error.__cause__ or error, ssl.SSLError)


class _BytesPart:
    """Bytes to be sent; `left`: how many are not sent yet."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.left = len(data)

    def next(self, most: int) -> Union[bytes, memoryview]:
        """Return the next bytes to send, `most` at most."""
        return self._data[:most]

    def sent(self, size: int) -> None:
        """Advance by `size` bytes that have been sent."""
        self._data = self._data[size:]
        self.left -= size

    def close(self) -> None:
        self._data.release()


class _FilePart:
    """An open file to be sent, which is read as it is sent; `left`: how many bytes are not sent yet."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._at = 0
        self.left = size

    def next(self, most: int) -> bytes:
        """Read the next bytes to send, `most` at most. Raises OSError if the file has become shorter."""
        data = os.pread(self._fd, min(most, self.left), self._at)
        if not data:
            raise OSError(errno.EIO, "a file has become shorter")
        return data

    def sent(self, size: int) -> None:
        """Advance by `size` bytes that have been sent."""
        self._at += size
        self.left -= size

    def close(self) -> None:
        os.close(self._fd)


class TlsLink:
    """A TCP connection with TLS, open or opening, and the queue of what it is to send.

    turn() receives and sends what is possible now; its ConnectionError ends the connection. sink: the destination of a payload
    as it arrives (frames.Decoder); without it, a payload is refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        ctx: ssl.SSLContext,
        server: bool,
        max_header: int,
        max_payload: int = 0,
        sink: Optional[Callable[[Header, int], Sink]] = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tls: Optional[ssl.SSLSocket] = None
        self._context = ctx
        self._server = server
        self._decoder = Decoder(max_header, max_payload, sink)
        self._limit = _TURN if max_payload else 0
        self._out: Deque[Union[_BytesPart, _FilePart]] = deque()
        self._wants_write = not server  # a client's connect() shows itself by becoming writable
        self.secure = False
        self.got = 0  # bytes
        self.more = False  # more may be readable at once, which no poll() reports

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether wait_for() has to wait until this connection can be written."""
        return self._wants_write or (self.secure and bool(self._out))

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Queue a message and its payload, to be sent by turn() or flush()."""
        self._out.append(_BytesPart(head(header, len(payload))))
        if payload:  # as it is: a manifest is large
            self._out.append(_BytesPart(payload))

    def send_file(self, header: Header, fd: int, size: int) -> None:
        """Queue a message with an open file as payload. The file is closed when it is sent, or the connection is closed."""
        self._out.append(_BytesPart(head(header, size)))
        self._out.append(_FilePart(fd, size))

    def flush(self) -> None:
        """Send as much of the queue as the kernel accepts now, if the handshake is complete. Errors come at the next turn()."""
        if self.secure and self._tls is not None:
            with contextlib.suppress(OSError):
                self._send_parts(self._tls)

    @property
    def connected(self) -> bool:
        """Whether TCP is connected; the handshake of TLS may be under way."""
        return self._tls is not None

    @property
    def backlog(self) -> int:
        """The number of queued bytes."""
        return sum(part.left for part in self._out)

    def turn(self) -> List[Header]:
        """Continue the handshake, receive messages and send queued ones, without waiting; return the received messages.

        Raises ConnectionError if the other side has closed, is not a member, or sends invalid data.
        """
        return [header for header, _ in self.frames()]

    def frames(self) -> List[Frame]:
        """Continue the handshake, receive and send as turn() does; return (header, payload) of the received ones."""
        try:
            tls = self._tls or self._begin_tls()
            if not self.secure:
                self._wants_write = False
                tls.do_handshake()
                self.secure = True
            frames = self._read_frames(tls)
            try:
                self._send_parts(tls)
            except OSError:
                if not frames:
                    raise
            return frames
        except (ssl.SSLWantReadError, _NotYet):
            return []
        except ssl.SSLWantWriteError:
            self._wants_write = True
            return []
        except (OSError, FrameError) as error:
            raise ConnectionError(str(error)) from error

    def _begin_tls(self) -> ssl.SSLSocket:
        """Create the TLS connection once TCP is connected. Raises _NotYet before, OSError if TCP could not connect.

        wrap_socket() takes no other socket, and a connect across a real network takes a while.
        """
        failed = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        try:
            self._sock.getpeername()
        except OSError as error:
            if self._server or error.errno != errno.ENOTCONN:
                raise
            raise _NotYet from None
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = self._context.wrap_socket(self._sock, server_side=self._server, do_handshake_on_connect=False)
        self._sock = self._tls
        return self._tls

    def _read_frames(self, tls: ssl.SSLSocket) -> List[Frame]:
        """Read all messages that have arrived; on a connection with payloads stop after 1 MiB, and set `more`.

        Raises FrameError for invalid data, and OSError if the connection has ended; if it ends after some messages, these are
        returned, and the error is raised at the next turn.
        """
        frames: List[Frame] = []
        end = self.got + self._limit
        self.more = False
        while True:
            try:
                size = self._receive_bytes(tls, frames)
                if not size:
                    raise ConnectionError("closed by the other side")
                self.got += size
                if self.got >= end > self._limit > 0:
                    self.more = True
                    return frames
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return frames
            except OSError:
                if frames:
                    return frames
                raise

    def _receive_bytes(self, tls: ssl.SSLSocket, frames: List[Frame]) -> int:
        """Receive bytes into the payload that is expected, or decode them and add complete messages to `frames`.

        Returns how many; 0: the other side has closed.
        """
        room = self._decoder.room()
        if room is None:
            data = tls.recv(_RECORD)
            frames += self._decoder.feed(data)
            return len(data)
        size = tls.recv_into(room)
        frames += self._decoder.taken(size)
        return size

    def _send_parts(self, tls: ssl.SSLSocket) -> None:
        """Send the queued parts until the kernel accepts no more; close those that are sent. Raises OSError."""
        self._wants_write = False
        while self._out:
            part = self._out[0]
            try:
                part.sent(tls.send(part.next(_CHUNK)))
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            if not part.left:
                self._out.popleft().close()

    def finish(self, seconds: float) -> None:
        """Send the queue, shut down, wait until the other side has closed, too, and close. Waits for `seconds` at most.

        A kernel that closes a connection with unread data resets it, and drops what it could not send so far.
        """
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            writable = select.poll()
            writable.register(self._sock, select.POLLOUT)
            while self.secure and self._tls is not None and self._out and time.monotonic() < until:
                self._send_parts(self._tls)
                writable.poll(20)
            self._sock.shutdown(socket.SHUT_WR)
            while wait_for([self._sock], max(0.0, until - time.monotonic())) and self._sock.recv(_CHUNK):
                pass
        self.close()

    def close(self) -> None:
        """Close the connection and the queued files."""
        self._sock.close()
        while self._out:
            self._out.popleft().close()


class _NotYet(Exception):
    """The connection by TCP is not established yet."""


class Mailbox:
    """The numbered messages of one side: outgoing ones until the other side has them, and the last number that came.

    So messages are sent again after a broken connection, and duplicates are dropped.
    """

    def __init__(self) -> None:
        self._next = 1
        self._kept: Deque[Tuple[int, Header]] = deque()
        self.got = 0

    def post(self, message: Header) -> Header:
        """Return a message with the next `number`, and keep it until it is acknowledged."""
        numbered = {**message, "number": self._next}
        self._kept.append((self._next, numbered))
        self._next += 1
        return numbered

    def kept(self) -> List[Header]:
        """Return the messages that are not acknowledged, with their numbers."""
        return [message for _, message in self._kept]

    def keeps(self, number: int) -> bool:
        """Check whether the message with this number, or an earlier one, is not acknowledged yet."""
        return bool(self._kept) and self._kept[0][0] <= number

    def take(self, header: Header) -> bool:
        """Drop the kept messages that a received one acknowledges; return whether its number is new.

        False for a message that came before, and for one without a number, as a heartbeat.
        """
        acknowledged = int(header.get("ack", 0))
        while self._kept and self._kept[0][0] <= acknowledged:
            self._kept.popleft()
        number = int(header.get("number", 0))
        if number <= self.got:
            return False
        self.got = number
        return True
