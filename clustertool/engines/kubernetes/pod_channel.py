"""A channel to a program in the container of a pod is the exec websocket of the official client.

It has the used functions of paramiko's channel. One thread moves bytes between the websocket and bounded buffers: TLS
allows one thread at a time. WSClient.update() of the client does not serve here: it takes frames as long as there are any,
without a bound.
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

try:
    from websocket import ABNF, WebSocket, WebSocketException
except ImportError:  # the extra is not installed, see kube_credentials.py
    WebSocketException = OSError

_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_FRAME = 32 << 10  # bytes of a message to the pod
_UNREAD = 8 << 20  # bytes that wait for the reader, after which no more are taken from the connection
_UNSENT = 1 << 20  # bytes that wait for the connection, after which sendall() waits
_LARGEST = 32 << 20  # bytes of a message from the pod
_PING = 30.0  # seconds: a proxy on the way closes a silent connection
_EXIT = "ExitCode"  # the cause in the final status that has the exit code of the program
_FAILED = 126  # exit status where the runtime could not start the program


class PodChannel:
    """A channel to a program in a pod, with the functions of paramiko's. exit_status is -1 until status_event is set."""

    out_max_packet_size = _FRAME

    def __init__(self, websocket: WebSocket) -> None:
        """Start a thread that moves the bytes of a connected websocket."""
        self._websocket, self._connection = websocket, websocket.sock
        self._tells_end = (websocket.getsubprotocol() or "").startswith("v5")  # can announce the end of stdin
        self._message, self._unsent = bytearray(), bytearray()
        self._streams = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self._changed = threading.Condition()
        self._timeout: float | None = None
        self.closed = self.eof_received = False
        self._broken = ""
        self.exit_status = -1
        self.status_event = threading.Event()
        self._bell, self._ringer = socket.socketpair()
        for one in (self._bell, self._ringer, self._connection):
            one.setblocking(False)
        threading.Thread(target=self._run_thread, name="pod channel", daemon=True).start()

    # -- the functions of a channel

    def settimeout(self, seconds: float | None) -> None:
        """Set how many seconds send() and recv() wait; None: without a limit."""
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        """Queue all data for sending.

        Raises OSError after the end of the channel, TimeoutError if nothing is taken for the timeout.
        """
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def send(self, data: bytes | memoryview) -> int:
        """Queue at most 32 KiB of data for sending, and return how many bytes were taken.

        Waits while 1 MiB is unsent. Raises TimeoutError if that lasts for the timeout, OSError after the end of the channel.
        """
        with self._changed:
            self._wait_until(lambda: len(self._unsent) < _UNSENT or self._is_over)
            if self._is_over:
                raise OSError(self._broken or "the channel is closed")
            piece = bytes(data[:_FRAME])
            self._queue(bytes([_STDIN]) + piece)
        self._wake_thread()
        return len(piece)

    def recv(self, size: int) -> bytes:
        """Return received bytes of stdout, at most `size`; b"" at the end. Waits for the first ones. Raises TimeoutError."""
        return self._take_bytes(_STDOUT, size)

    def recv_stderr(self, size: int) -> bytes:
        """Return received bytes of stderr, at most `size`; b"" at the end. Waits for the first ones. Raises TimeoutError."""
        return self._take_bytes(_STDERR, size)

    def recv_ready(self) -> bool:
        """Check whether received bytes of stdout are unread."""
        return bool(self._streams[_STDOUT])

    def recv_stderr_ready(self) -> bool:
        """Check whether received bytes of stderr are unread."""
        return bool(self._streams[_STDERR])

    def wait(self, seconds: float) -> None:
        """Wait until bytes have been received, or the channel has ended, but at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._streams.values()) or self._is_over, seconds)

    def shutdown_write(self) -> None:
        """Send the end of stdin, if the protocol has a message for it. The runtime may ignore it: no program may rely on it."""
        if self._tells_end:
            self._queue(bytes([_CLOSE, _STDIN]))
            self._wake_thread()

    def close(self) -> None:
        """Close the channel. The program gets a hangup from the runtime, or an error when it writes."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
        self._wake_thread()

    @property
    def waiting(self) -> int:
        """Bytes that the connection has not taken."""
        return len(self._unsent)

    @property
    def _is_over(self) -> bool:
        """Whether the channel was closed, or has ended."""
        return self.closed or self.eof_received

    def _take_bytes(self, stream: int, size: int) -> bytes:
        """Wait for bytes of a stream, and remove and return at most `size` of them; b"" at the end.

        Raises TimeoutError if none come for the timeout.
        """
        with self._changed:
            data = self._streams[stream]
            self._wait_until(lambda: bool(data) or self._is_over)
            full = self._is_full
            piece = bytes(data[:size])
            del data[:size]
        if full:
            self._wake_thread()
        return piece

    def _wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until `true` holds. Raises TimeoutError after the timeout."""
        if not self._changed.wait_for(true, self._timeout):
            raise TimeoutError("timed out")

    @property
    def _is_full(self) -> bool:
        """Whether so many received bytes are unread that no more are taken from the connection."""
        return sum(map(len, self._streams.values())) >= _UNREAD

    def _wake_thread(self) -> None:
        """Wake the thread that moves bytes."""
        with contextlib.suppress(OSError):  # it has rung already, or the channel has ended
            self._ringer.send(b"!")

    # -- the thread

    def _run_thread(self) -> None:
        """Move bytes until the channel ends, in the thread; then close the connection, record why, and wake all that wait.

        If the end of the program is not known, stderr gets the reason.
        """
        why = "the connection to the pod was closed"
        try:
            self._move()
        except (OSError, ValueError, WebSocketException) as error:
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
        """Move bytes between the websocket and the buffers until the channel is closed, or the program has ended.

        Sends a ping every 30 s. Raises OSError or WebSocketException if the connection breaks, ValueError for a frame or
        message that is too large.
        """
        pinged, more = time.monotonic(), False
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._bell, selectors.EVENT_READ)
            while not self.closed and not self.status_event.is_set():
                if time.monotonic() - pinged > _PING:
                    pinged = time.monotonic()
                    self._queue(b"", ABNF.OPCODE_PING)
                reads, writes = selectors.EVENT_READ * (not self._is_full), selectors.EVENT_WRITE * bool(self._unsent)
                _select(waiting, self._connection, reads | writes)
                for key, _ in waiting.select(0 if more else _PING):
                    if key.fileobj is self._bell:
                        self._bell.recv(4096)
                self._write()
                more = not self._is_full and self._read()

    def _write(self) -> None:
        """Send queued bytes, as far as the connection takes them."""
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while self._unsent:
                with self._changed:
                    piece = bytes(self._unsent[: 256 << 10])
                sent = self._connection.send(piece)
                with self._changed:
                    del self._unsent[:sent]
                    self._changed.notify_all()

    def _read(self) -> bool:
        """Read one frame if it is complete, and return whether it was. Raises ValueError for one that is too large."""
        try:
            frame = self._websocket.recv_frame()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if (self._websocket.frame_buffer.length or 0) > _LARGEST:
                raise ValueError("a frame is too large") from None
            return False
        self._take_frame(frame)
        return True

    def _take_frame(self, frame: ABNF) -> None:
        """Add a frame to the message, and the bytes of a complete message to their stream; answer a ping.

        The final status of the program sets the exit status. Raises OSError if the server closes, ValueError for a message that
        is too large.
        """
        if frame.opcode == ABNF.OPCODE_CLOSE:
            raise OSError("it was closed by the server")
        if frame.opcode == ABNF.OPCODE_PING:
            self._queue(frame.data, ABNF.OPCODE_PONG)
        if frame.opcode in (ABNF.OPCODE_PING, ABNF.OPCODE_PONG):  # they may stand between the frames of a message
            return
        self._message += frame.data
        if len(self._message) > _LARGEST:
            raise ValueError("a message is too large")
        if not frame.fin or not self._message:
            return
        stream, data = self._message[0], bytes(self._message[1:])
        self._message.clear()
        with self._changed:
            if stream in self._streams:
                self._streams[stream] += data
            elif stream == _ERROR:
                self._record_status(data)
            self._changed.notify_all()

    def _queue(self, payload: bytes, opcode: int = ABNF.OPCODE_BINARY) -> None:
        """Queue a frame for sending."""
        with self._changed:
            self._unsent += ABNF.create_frame(payload, opcode).format()

    def _record_status(self, data: bytes) -> None:
        """Set exit_status and status_event by the final status of the program; add the reason to stderr if it did not start."""
        code, message = exit_code(data)
        self.exit_status = code
        if message:
            self._streams[_STDERR] += f"{message}\n".encode()
        self._broken = message or f"the program has ended with {code}"
        self.status_event.set()


def exit_code(status: bytes) -> tuple[int, str]:
    """Parse the final status of a program: its exit code, and "" or the message why it did not start (126)."""
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


def _select(waiting: selectors.BaseSelector, connection: socket.socket, wanted: int) -> None:
    """Register the connection for these events only; for 0 remove it."""
    known = connection in waiting.get_map()
    if wanted and known:
        waiting.modify(connection, wanted)
    elif wanted:
        waiting.register(connection, wanted)
    elif known:
        waiting.unregister(connection)
