"""A channel to a program in a pod is the exec websocket of the official client, with the used functions of paramiko's channel.

One thread moves bytes between the websocket and bounded buffers: TLS allows one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from clustertool.engines.kubernetes.api.api_errors import Asked, refusal
from clustertool.engines.kubernetes.api.kube_credentials import KubeCredentials
from clustertool.errors import Unreachable

try:
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url
    from websocket import ABNF, WebSocketException
except ImportError:  # the extra is not installed, see kube_credentials.py
    create_websocket = None
    WebSocketException = OSError  # type: ignore[misc, assignment]

_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_PROTOCOLS = "v5.channel.k8s.io,v4.channel.k8s.io"
_FRAME = 32 << 10  # bytes of a message to the pod
_UNREAD = 8 << 20  # bytes that wait for the reader, after which no more are taken from the connection
_UNSENT = 1 << 20  # bytes that wait for the connection, after which sendall() waits
_LARGEST = 32 << 20  # bytes of a message from the pod
_PING = 30.0  # seconds: a proxy on the way closes a silent connection
_EXIT = "ExitCode"  # the cause in the final status that has the exit code of the program
_FAILED = 126  # exit status where the runtime could not start the program


class WebsocketMessages:
    """Takes websocket messages out of the bytes of a connection (RFC 6455). The server's frames are not masked."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._parts, self._opcode = bytearray(), 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """(opcode, payload) of the messages that are complete. Raises ValueError for what is not allowed."""
        self._data += data
        found: list[tuple[int, bytes]] = []
        while True:
            message = self._next()
            if message is None:
                return found
            final, opcode, payload = message
            if opcode >= 8:  # a control frame, which may stand between the parts of a message
                found.append((opcode, payload))
                continue
            self._opcode = opcode or self._opcode  # 0: the message goes on
            self._parts += payload
            if len(self._parts) > _LARGEST:
                raise ValueError("a message is too large")
            if final:
                found.append((self._opcode, bytes(self._parts)))
                self._parts = bytearray()

    def _next(self) -> tuple[bool, int, bytes] | None:
        data = self._data
        if len(data) < 2:
            return None
        size, at = data[1] & 0x7F, 2
        more = {126: 2, 127: 8}.get(size, 0)
        if len(data) < at + more:
            return None
        if more:
            size, at = int.from_bytes(data[2 : 2 + more], "big"), 2 + more
        if data[1] & 0x80 or size > _LARGEST:
            raise ValueError("a frame is not valid")
        if len(data) < at + size:
            return None
        found = bool(data[0] & 0x80), data[0] & 0x0F, bytes(data[at : at + size])
        del data[: at + size]
        return found


class PodChannel:
    """Open with PodChannel.open(). exit_status is -1 until status_event is set."""

    out_max_packet_size = _FRAME

    def __init__(self, connection: socket.socket, tells_end: bool) -> None:
        """Start a thread that moves the bytes of a connection. tells_end: the protocol can announce the end of stdin (v5)."""
        self._connection, self._tells_end = connection, tells_end
        self._messages = WebsocketMessages()
        self._unsent = bytearray()
        self._streams = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self._changed = threading.Condition()
        self._timeout: float | None = None
        self.closed = self.eof_received = False
        self._broken = ""
        self.exit_status = -1
        self.status_event = threading.Event()
        self._bell, self._ringer = socket.socketpair()
        for one in (self._bell, self._ringer, connection):
            one.setblocking(False)
        threading.Thread(target=self._run, name="pod channel", daemon=True).start()

    @classmethod
    def open(cls, known: KubeCredentials, url: str, asked: Asked) -> PodChannel:
        """Open a channel to a program in a pod. Raises AuthError, NotFound, Unreachable with the reason of the server."""
        headers = {name.lower(): value for name, value in known.headers().items()}
        headers["sec-websocket-protocol"] = _PROTOCOLS
        fix = "is the pod running? kubectl describe pod shows it"
        try:
            websocket = create_websocket(known.configuration, get_websocket_url(url), headers)
        except WebSocketException as error:
            status, body = getattr(error, "status_code", 0), getattr(error, "resp_body", None) or b""
            if status:
                raise refusal(int(status), body if isinstance(body, bytes) else str(body).encode(), asked) from None
            raise Unreachable(f"no channel to the pod {asked.name}: {error}", fix, asked.where) from None
        except OSError as error:
            raise Unreachable(f"no channel to the pod {asked.name}: {error}", fix, asked.where) from None
        protocol = websocket.getsubprotocol() or ""
        return cls(websocket.sock, protocol.startswith("v5"))

    # -- the functions of a channel

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        """Send all data. Raises OSError after the end of the channel, TimeoutError where nothing is taken for so long."""
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def send(self, data: bytes | memoryview) -> int:
        """Queue data for sending, and return how many bytes were taken."""
        with self._changed:
            self._until(lambda: len(self._unsent) < _UNSENT or self._over)
            if self._over:
                raise OSError(self._broken or "the channel is closed")
            piece = bytes(data[:_FRAME])
            self._unsent += _frame(bytes([_STDIN]) + piece)
        self._ring()
        return len(piece)

    def recv(self, size: int) -> bytes:
        """b"" at the end. Raises TimeoutError."""
        return self._taken(_STDOUT, size)

    def recv_stderr(self, size: int) -> bytes:
        return self._taken(_STDERR, size)

    def recv_ready(self) -> bool:
        return bool(self._streams[_STDOUT])

    def recv_stderr_ready(self) -> bool:
        return bool(self._streams[_STDERR])

    def wait(self, seconds: float) -> None:
        """Wait until bytes are there, or the channel has ended; at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._streams.values()) or self._over, seconds)

    def shutdown_write(self) -> None:
        """End stdin, as far as the protocol and the runtime pass this on: no program may rely on it."""
        if self._tells_end:
            with self._changed:
                self._unsent += _frame(bytes([_CLOSE, _STDIN]))
            self._ring()

    def close(self) -> None:
        """Close the channel. The program gets a hangup from the runtime, or an error when it writes."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
        self._ring()

    @property
    def waiting(self) -> int:
        """Bytes that the connection has not taken."""
        return len(self._unsent)

    @property
    def _over(self) -> bool:
        return self.closed or self.eof_received

    def _taken(self, stream: int, size: int) -> bytes:
        with self._changed:
            data = self._streams[stream]
            self._until(lambda: bool(data) or self._over)
            full = self._full
            piece = bytes(data[:size])
            del data[:size]
        if full:
            self._ring()
        return piece

    def _until(self, true: Callable[[], bool]) -> None:
        if not self._changed.wait_for(true, self._timeout):
            raise TimeoutError("timed out")

    @property
    def _full(self) -> bool:
        return sum(map(len, self._streams.values())) >= _UNREAD

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it has rung already, or the channel has ended
            self._ringer.send(b"!")

    # -- the thread

    def _run(self) -> None:
        why = "the connection to the pod was closed"
        try:
            self._move()
        except (OSError, ValueError) as error:
            why = f"the connection to the pod broke: {error}"
        with contextlib.suppress(OSError):
            self._connection.close()
        with self._changed:
            self._broken = self._broken or why
            if not self.status_event.is_set() and not self.closed:
                self._streams[_STDERR] += f"{why}\n".encode()
            self.eof_received = True
            self._changed.notify_all()
        self.status_event.set()
        for one in (self._bell, self._ringer):
            one.close()

    def _move(self) -> None:
        """Move bytes until the end of the channel. Raises OSError, ValueError."""
        pinged, writing, reading_waits = time.monotonic(), False, False
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._bell, selectors.EVENT_READ)
            waiting.register(self._connection, selectors.EVENT_READ)
            while not self.closed and not self.status_event.is_set():
                if time.monotonic() - pinged > _PING:
                    pinged = time.monotonic()
                    with self._changed:
                        self._unsent += _frame(b"", ping=True)
                pending = isinstance(self._connection, ssl.SSLSocket) and self._connection.pending() and not self._full
                wanted = (0 if self._full else selectors.EVENT_READ) | (
                    selectors.EVENT_WRITE if (self._unsent and not reading_waits) or writing else 0
                )
                _select(waiting, self._connection, wanted)
                for key, _ in waiting.select(0 if pending else _PING):
                    if key.fileobj is self._bell:
                        with contextlib.suppress(BlockingIOError):
                            self._bell.recv(4096)
                reading_waits = self._write()
                writing = not self._full and self._read()

    def _write(self) -> bool:
        """Send what waits. Returns whether TLS must read first."""
        while self._unsent:
            with self._changed:
                piece = bytes(self._unsent[: 256 << 10])
            try:
                sent = self._connection.send(piece)
            except (BlockingIOError, ssl.SSLWantWriteError):
                return False
            except ssl.SSLWantReadError:
                return True
            with self._changed:
                del self._unsent[:sent]
                self._changed.notify_all()
        return False

    def _read(self) -> bool:
        """Take what has come. Returns whether TLS must write first."""
        try:
            data = self._connection.recv(256 << 10)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ssl.SSLWantWriteError:
            return True
        if not data:
            raise OSError("it was closed")
        for opcode, message in self._messages.feed(data):
            self._take(opcode, message)
        return False

    def _take(self, opcode: int, message: bytes) -> None:
        if opcode == ABNF.OPCODE_CLOSE:
            raise OSError("it was closed by the server")
        if opcode == ABNF.OPCODE_PING:
            with self._changed:
                self._unsent += _frame(message, pong=True)
        if opcode not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not message:
            return
        stream, data = message[0], message[1:]
        with self._changed:
            if stream in self._streams:
                self._streams[stream] += data
            elif stream == _ERROR:
                self._end(data)
            self._changed.notify_all()

    def _end(self, data: bytes) -> None:
        """Record the final status of the program."""
        code, message = exit_code(data)
        self.exit_status = code
        if message:
            self._streams[_STDERR] += f"{message}\n".encode()
        self._broken = message or f"the program has ended with {code}"
        self.status_event.set()


def exit_code(status: bytes) -> tuple[int, str]:
    """Read the exit code in a final status, and a message where the program did not start."""
    try:
        found = json.loads(status)
        if found.get("status") == "Success":
            return 0, ""
        for cause in (found.get("details") or {}).get("causes") or []:
            if cause.get("reason") == _EXIT:
                return int(cause["message"]) & 0xFF, ""
        return _FAILED, " ".join(str(found.get("message", "")).split())[:500] or "the program could not be started"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _FAILED, "the API server sent a status that is not valid"


def _frame(payload: bytes, ping: bool = False, pong: bool = False) -> bytes:
    opcode = ABNF.OPCODE_PING if ping else ABNF.OPCODE_PONG if pong else ABNF.OPCODE_BINARY
    frame: bytes = ABNF.create_frame(payload, opcode).format()
    return frame


def _select(waiting: selectors.BaseSelector, connection: socket.socket, wanted: int) -> None:
    """Wait for these events of the connection only."""
    known = connection in waiting.get_map()
    if wanted and known:
        waiting.modify(connection, wanted)
    elif wanted:
        waiting.register(connection, wanted)
    elif known:
        waiting.unregister(connection)
