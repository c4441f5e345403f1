"""A process of the user sends requests to the supervisor of a job on its node (model/wire/supervisor_messages)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from typing import TYPE_CHECKING, Callable, Optional, Union

from clustertool.errors import ClustertoolError, from_wire
from clustertool.model.wire import record_lines
from clustertool.model.wire.frames import Decoder, Frame, FrameError, Header, encode
from clustertool.node.storage import files
from clustertool.node.system import users

if TYPE_CHECKING:
    from clustertool.model.paths import JobPaths
    from clustertool.model.wire.supervisor_messages import AttachedNotice, StopCommand, SupervisorRequest

_HEADER, _PAYLOAD = 16 << 20, 256 << 20  # bytes of an answer: an environment, a bundle
_POLL, _AGAIN = 0.05, 0.005  # seconds between two checks of an answer, and between two connections
_CONNECT = 30.0  # seconds to be accepted, where ranks start in great numbers on a busy machine
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def order(
    paths: JobPaths,
    request: Union[StopCommand, AttachedNotice],
    patience: float,
    responsive: Callable[[], bool] = lambda: True,
) -> bool:
    """Send an order to the supervisor of a job. Return whether it was accepted; False after any error.

    patience, responsive: see ask(). A supervisor of the previous version has a fifo, not a socket, and sends no answer.
    """
    with contextlib.suppress(OSError, ClustertoolError):
        if stat.S_ISFIFO(os.lstat(paths.control).st_mode):
            return _write_fifo(paths.control, record_lines.control_line(request))
        answer = ask(paths, request, patience, responsive)
        return answer is not None and answer[0].get("type") == "accepted"
    return False


def _write_fifo(path: str, line: bytes) -> bool:
    """Write a line to a fifo without waiting. Return whether all of it was written. Raises OSError without a reader."""
    with files.closing(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)) as fd:
        return os.write(fd, line) == len(line)


def ask(
    paths: JobPaths, request: SupervisorRequest, patience: float, responsive: Callable[[], bool] = lambda: True
) -> Optional[Frame]:
    """Send a request to the supervisor of a job, again after a broken connection. Return its answer and the answer's payload.

    None: no supervisor of this user answers within `patience` seconds. It has ended, is frozen or is busy. `responsive` is
    called while the answer is missing; when it returns False, the answer is not waited for any longer. Raises the
    ClustertoolError that the supervisor sends.
    """
    end = time.monotonic() + patience

    def pending() -> bool:
        return time.monotonic() < end and responsive()

    answer: Optional[Frame] = None
    with contextlib.suppress(OSError, FrameError):
        while answer is None and pending():
            with _connect(paths, pending) as sock, contextlib.suppress(ConnectionError):
                answer = _exchange(sock, request, pending)
    if answer is not None:
        _raise_refusal(answer[0])
    return answer


def open_request(paths: JobPaths, request: SupervisorRequest) -> socket.socket:
    """Connect to the supervisor and send a request whose answer may come much later; return the socket for receive().

    Waits up to 30 s to be accepted. Raises OSError without a supervisor.
    """
    end = time.monotonic() + _CONNECT
    sock = _connect(paths, lambda: time.monotonic() < end)
    sock.setblocking(True)
    sock.sendall(encode({**request}))
    return sock


def receive(sock: socket.socket) -> Optional[Header]:
    """Wait for the answer without a limit of time. None: the supervisor has closed the connection, it has ended.

    Raises the ClustertoolError that the supervisor sends.
    """
    decoder = Decoder(_HEADER, _PAYLOAD)
    while True:
        try:
            data = sock.recv(1 << 18)
        except ConnectionError:
            return None
        if not data:
            return None
        for answer, _ in decoder.feed(data):
            _raise_refusal(answer)
            return answer


def _raise_refusal(answer: Header) -> None:
    """Raise the ClustertoolError that an answer of type "error" describes; else do nothing."""
    if answer.get("type") == "error":
        texts = (str(answer.get(name, "")) for name in ("kind", "what", "fix"))
        raise from_wire(*texts)


def _connect(paths: JobPaths, pending: Callable[[], bool]) -> socket.socket:
    """Connect to the supervisor's socket, trying again while the kernel's queue of the socket is full and pending() is True.

    Raises OSError where none listens, or another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with files.closing(os.open(paths.ours, _FOLDER)) as folder:
            short = f"{files.path_of(folder)}/{os.path.basename(paths.control)}"
            while True:
                try:
                    sock.connect(short)
                    break
                except BlockingIOError:
                    if not pending():
                        raise
                    time.sleep(_AGAIN)
        if users.peer(sock).uid != os.getuid():
            raise PermissionError("another user listens there")
    except OSError:
        sock.close()
        raise
    return sock


def _exchange(sock: socket.socket, request: SupervisorRequest, pending: Callable[[], bool]) -> Optional[Frame]:
    """Send a request, and return the answer and its payload; None if pending() becomes False before.

    Raises ConnectionError where the supervisor has closed the connection. It does this for newer connections, and when it ends:
    then the next connection is refused.
    """
    decoder = Decoder(_HEADER, _PAYLOAD)
    sock.sendall(encode({**request}))
    while pending():
        if select.select([sock], [], [], _POLL)[0]:
            data = sock.recv(1 << 18)
            if not data:
                time.sleep(_AGAIN)
                raise ConnectionError("closed without an answer")
            for answer in decoder.feed(data):
                return answer
    return None
