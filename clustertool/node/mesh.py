"""Whether this node can be reached, and whom it reaches: listeners for the length of a check, and many tries at once.

A listener says nothing before it has read the check's token, and then names its node, so that nobody else is taken for it.
It is a daemon thread: whatever happens to the laptop, it is gone with the agent, and its ports' claims are void with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from clustertool.errors import PreflightError
from clustertool.node import claims, ports

_STRANGER = 2.0  # seconds within which a token is due
_MOST = 512  # connections of one listener at a time
_AT_ONCE = 256  # tries at a time
_PINGS = 3  # of each try; one where there are many
_MANY = 32  # tries
_LOOK = 0.05
_AGENT = 10.0  # seconds for an agent's answer on an open connection
_CHUNK = 1 << 20
_TOKEN = 32  # characters
OK = "ok"
_PING, _BULK = b"p", b"b"
Connection = Tuple[int, str, int]  # node, address, port


def mesh(asked: Mapping[str, Any]) -> Dict[str, Any]:
    """asked: step, and what it needs: open (node, address, ports, token), try, send, close."""
    step = asked["step"]
    if step == "open":
        return _open(asked)
    if step == "try":
        return {"tries": _Tries(asked["targets"], str(asked["token"]), float(asked["seconds"])).run()}
    if step == "send":
        return _send(asked)
    _close()
    return {}


# -- the listener


_listening: List["_Listener"] = []  # of this agent: one, or none


def _open(asked: Mapping[str, Any]) -> Dict[str, Any]:
    """The ports on which it listens now. One that somebody took meanwhile is left out: another check has told of it."""
    _close()
    address = str(asked["address"])
    bind = address if ports.own_address(address) else ""
    found: Dict[int, socket.socket] = {}
    for port in asked["ports"]:
        with contextlib.suppress(OSError, PreflightError):
            claims.hold([port])
            found[port] = _socket(bind, port, ":" in address)
    if found:
        _listening.append(_Listener(list(found.values()), str(asked["token"]).encode(), int(asked["node"])))
        _listening[-1].start()
    return {"ports": sorted(found)}


def _socket(address: str, port: int, six: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(_MOST)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _close() -> None:
    while _listening:
        _listening.pop().end()
    claims.let_go()


class _Peer:
    """A connection that came in."""

    def __init__(self, now: float) -> None:
        self.until = now + _STRANGER
        self.said = b""
        self.kind = b""
        self.bytes = 0


class _Listener(threading.Thread):
    def __init__(self, sockets: Sequence[socket.socket], token: bytes, node: int) -> None:
        super().__init__(daemon=True)
        self._token, self._answer = token, f"{node:08d}".encode()
        self._select = selectors.DefaultSelector()
        self._peers: Dict[socket.socket, _Peer] = {}
        self._bell, ring = os.pipe()
        self._ring = ring
        self._select.register(self._bell, selectors.EVENT_READ)
        for sock in sockets:
            self._select.register(sock, selectors.EVENT_READ, "door")

    def run(self) -> None:
        while True:
            for key, _ in self._select.select(0.5):
                if key.fd == self._bell:
                    return self._leave()
                assert isinstance(key.fileobj, socket.socket)
                if key.data == "door":
                    self._accept(key.fileobj)
                else:
                    self._read(key.fileobj)
            now = time.monotonic()
            for sock in [sock for sock, peer in self._peers.items() if peer.until < now]:
                self._drop(sock)

    def end(self) -> None:
        os.write(self._ring, b"!")
        self.join(5.0)

    def _leave(self) -> None:
        for key in list(self._select.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._select.close()
        os.close(self._bell)
        os.close(self._ring)

    def _accept(self, door: socket.socket) -> None:
        for _ in range(_MOST):
            try:
                sock, _ = door.accept()
            except OSError:  # nobody more, or somebody who left at once
                return
            if len(self._peers) >= _MOST:
                sock.close()
                continue
            sock.setblocking(False)
            self._peers[sock] = _Peer(time.monotonic())
            self._select.register(sock, selectors.EVENT_READ, "peer")

    def _drop(self, sock: socket.socket) -> None:
        del self._peers[sock]
        self._select.unregister(sock)
        sock.close()

    def _read(self, sock: socket.socket) -> None:
        peer = self._peers[sock]
        try:
            data = sock.recv(_CHUNK if peer.kind == _BULK else 64)
            if not self._take(sock, peer, data):
                self._drop(sock)
        except BlockingIOError:
            return
        except OSError:
            self._drop(sock)

    def _take(self, sock: socket.socket, peer: _Peer, data: bytes) -> bool:
        """False: we are done with each other."""
        if peer.kind == _BULK:
            peer.bytes += len(data)
            peer.until = time.monotonic() + _STRANGER
            if not data:
                sock.sendall(b"%016d" % peer.bytes)
            return bool(data)
        if not data:
            return False
        if peer.kind == _PING:
            sock.sendall(data)
            return True
        peer.said += data
        if len(peer.said) < _TOKEN + 1:
            return self._token.startswith(peer.said[:_TOKEN])
        if peer.said[:_TOKEN] != self._token or peer.said[_TOKEN:] not in (_PING, _BULK):
            return False
        peer.kind = peer.said[_TOKEN:]
        sock.sendall(self._answer)
        return True


# -- the tries


class _Call:
    """One try: connect, give the token, read who it is, a few pings."""

    def __init__(self, target: Connection, left: float) -> None:
        self.node, self.address, self.port = int(target[0]), str(target[1]), int(target[2])
        self.left = left
        self.sock: Optional[socket.socket] = None
        self.said = b""
        self.times: List[float] = []
        self.sent = 0.0

    def say(self, data: bytes) -> None:
        assert self.sock is not None
        self.sent = time.monotonic()
        self.sock.sendall(data)


class _Tries:
    """All targets, many at once, in one thread; each has the same few seconds for its connection.

    It is the other kernel that answers a connection, and soon, however busy the machine is. Its agent may take longer, and we
    too may be kept from looking: only time in which we looked counts.
    """

    def __init__(self, targets: Sequence[Connection], token: str, seconds: float) -> None:
        self._waiting = [tuple(target) for target in reversed(targets)]
        self._token, self._seconds = token.encode(), seconds
        self._pings = _PINGS if len(targets) < _MANY else 1
        self._select = selectors.DefaultSelector()
        self._open: Dict[socket.socket, _Call] = {}
        self._done: List[Tuple[int, int, str, float]] = []

    def run(self) -> List[Tuple[int, int, str, float]]:
        """(node, port, word, seconds) of each."""
        while self._waiting or self._open:
            while self._waiting and len(self._open) < _AT_ONCE:
                self._start(_Call(self._waiting.pop(), self._seconds))  # type: ignore[arg-type]
            began = time.monotonic()
            for key, _ in self._select.select(_LOOK):
                assert isinstance(key.fileobj, socket.socket)
                self._step(self._open[key.fileobj])
            looked = min(_LOOK, time.monotonic() - began)
            for call in list(self._open.values()):
                call.left -= looked
                if call.left < 0:
                    self._end(call, "no answer" if not call.sent else "no answer of the agent")
        self._select.close()
        return self._done

    def _start(self, call: _Call) -> None:
        try:
            where = socket.getaddrinfo(call.address, call.port, socket.AF_UNSPEC, socket.SOCK_STREAM)[0]
            call.sock = socket.socket(where[0], socket.SOCK_STREAM)
            call.sock.setblocking(False)
            call.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = call.sock.connect_ex(where[4])
        except (OSError, UnicodeError):
            self._end(call, f"the name {call.address} is not known there")
            return
        if code not in (0, errno.EINPROGRESS):
            self._end(call, _why(code))
            return
        self._open[call.sock] = call
        self._select.register(call.sock, selectors.EVENT_WRITE)

    def _step(self, call: _Call) -> None:
        assert call.sock is not None
        try:
            word = self._connected(call, call.sock) if not call.sent else self._heard(call, call.sock)
        except BlockingIOError:
            return
        except OSError as error:
            word = _why(error.errno or 0)
        if word:
            self._end(call, word)

    def _connected(self, call: _Call, sock: socket.socket) -> str:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code:
            self._select.modify(sock, selectors.EVENT_READ)
            call.left = max(call.left, _AGENT)
            call.say(self._token + _PING)
        return _why(code) if code else ""

    def _heard(self, call: _Call, sock: socket.socket) -> str:
        """The word with which it ends, "" while it goes on: first who it is, then a byte back for each of ours."""
        data = sock.recv(64)
        call.said += data
        if not data or len(call.said) > 8 + len(call.times):
            return "something else listens there"
        if len(call.said) < 8 + len(call.times):
            return ""
        if call.said[:8] != b"%08d" % call.node:
            return "another node answered"
        if call.times:
            call.times[-1] = time.monotonic() - call.sent
        if len(call.times) == self._pings:
            return OK
        call.times.append(self._seconds)
        call.say(b".")
        return ""

    def _end(self, call: _Call, word: str) -> None:
        if call.sock is not None:
            if self._open.pop(call.sock, None):
                self._select.unregister(call.sock)
            call.sock.close()
        self._done.append((call.node, call.port, word, min(call.times) if word == OK else 0.0))


def _why(code: int) -> str:
    if code == errno.ECONNREFUSED:
        return "refused"
    if code in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM):  # the last three: rules here
        return "no route"
    if code == errno.ETIMEDOUT:
        return "no answer"
    return os.strerror(code)


# -- how much goes through


def _send(asked: Mapping[str, Any]) -> Dict[str, Any]:
    """Fill one link for some seconds. -> {"speed": bytes a second that arrived}; {} if it broke."""
    node, address, port = asked["target"]
    seconds = float(asked["seconds"])
    data = memoryview(bytes(_CHUNK))
    with contextlib.suppress(OSError, ValueError):
        with socket.create_connection((address, port), timeout=2 * seconds + _STRANGER) as sock:
            sock.sendall(str(asked["token"]).encode() + _BULK)
            if sock.recv(8, socket.MSG_WAITALL) != b"%08d" % node:
                return {}
            start = time.monotonic()
            while time.monotonic() < start + seconds:
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            arrived = int(sock.recv(16, socket.MSG_WAITALL))
            return {"speed": arrived / (time.monotonic() - start)}
    return {}

