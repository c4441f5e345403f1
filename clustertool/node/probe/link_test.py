"""A link test finds out which nodes this node can reach: listeners for the time of a check, and many connections at once.

A listener sends nothing before it has read the check's token, and then names its node, so that no other program is taken for
it. It is a daemon thread, so it ends with the agent, and the claims of its ports are void with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from threading import Thread
from typing import TYPE_CHECKING, Dict, List, Sequence, Tuple

from clustertool.errors import PreflightError
from clustertool.model.link_answer import LinkAnswer
from clustertool.node.ports import claims, listeners
from clustertool.node.probe.network_addresses import first_address
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as answers
    from clustertool.model.wire import agent_requests as requests

_STRANGER = 2.0  # seconds within which a token is due
_MOST = 512  # connections of one listener at a time
_AT_ONCE = 256  # tries at a time
_POLL = 0.05
_TIDY = 0.5
_AGENT = 10.0  # seconds for an agent's answer on an open connection
_CHUNK = 1 << 20
_TOKEN = 32  # characters
_NAME, _BULK = b"w", b"b"  # the purpose of a connection: the node's name, or a bandwidth test
_RTT = 68  # where struct tcp_info (linux/tcp.h) has tcpi_rtt, in microseconds
Connection = Tuple[int, str, int]  # node, address, port


# -- the listener


_listening: List["_Listener"] = []  # of this agent: one, or none


def open_ports(node: NodeContext, request: requests.OpenRequest) -> answers.OpenedAnswer:
    """Claim those of the ports that are free, and start a listener on them: {ports}.

    A port that was taken meanwhile is left out: another check reports it. If nothing can be claimed, there is no listener. An
    earlier listener is ended before.
    """
    close_ports(node, {})
    address = request["address"]
    bind = address if listeners.own_address(address) else ""
    found: Dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(PreflightError):  # nothing can be claimed, so nothing is tested
        for port in claims.claim_for_check(request["ports"]):
            with contextlib.suppress(OSError):
                found[port] = socket.create_server((bind, port), family=family, backlog=_MOST)
                found[port].setblocking(False)
    if found:
        _listening.append(_Listener(list(found.values()), request["token"].encode(), request["node"]))
    return {"ports": sorted(found)}


def close_ports(node: NodeContext, request: requests.NoFields) -> answers.Answer:
    """End the listener, if there is one, and give its ports back."""
    while _listening:
        _listening.pop().end()
    claims.release_check()
    return {}


class _TestPeer:
    """A connection that came in: what was received, its purpose (kind), until when it may stay, and the bytes of a test."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.until = now + _STRANGER
        self.received = b""
        self.kind = b""
        self.bytes = 0


class _Listener:
    """The listener of a check, a thread with its sockets.

    It answers each client that sends the token with the node's number.
    """

    def __init__(self, sockets: Sequence[socket.socket], token: bytes, node: int) -> None:
        self._token, self._answer = token, f"{node:08d}".encode()
        self._poll = select.epoll()
        self._peers: Dict[int, _TestPeer] = {}
        self._doors = {sock.fileno(): sock for sock in sockets}
        self._bell, self._ring = os.pipe()
        for fd in (self._bell, *self._doors):
            self._poll.register(fd, select.EPOLLIN)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Accept and read connections, and close those that are late, until end() is called."""
        tidy = time.monotonic() + _TIDY
        while True:
            for fd, _ in self._poll.poll(_TIDY):
                if fd == self._bell:
                    return self._close_all()
                if fd in self._doors:
                    self._accept(self._doors[fd])
                else:
                    self._read(self._peers[fd])
            now = time.monotonic()
            if now >= tidy:
                tidy = now + _TIDY
                for peer in [peer for peer in self._peers.values() if peer.until < now]:
                    self._drop(peer)

    def end(self) -> None:
        """Let the thread end, and wait for that up to 5 s."""
        os.write(self._ring, b"!")
        self._thread.join(5.0)

    def _close_all(self) -> None:
        """Close all sockets and descriptors."""
        for sock in [*self._doors.values(), *(peer.sock for peer in self._peers.values())]:
            sock.close()
        self._poll.close()
        os.close(self._bell)
        os.close(self._ring)

    def _accept(self, door: socket.socket) -> None:
        """Accept the connections that wait; close those beyond 512."""
        for _ in range(_MOST):
            try:
                sock, _ = door.accept()
            except OSError:  # no further connection, or one that was closed at once
                return
            if len(self._peers) >= _MOST:
                sock.close()
                continue
            sock.setblocking(False)
            self._peers[sock.fileno()] = _TestPeer(sock, time.monotonic())
            self._poll.register(sock, select.EPOLLIN)

    def _drop(self, peer: _TestPeer) -> None:
        """Close the connection of a peer."""
        del self._peers[peer.sock.fileno()]
        peer.sock.close()  # which also ends its registration

    def _read(self, peer: _TestPeer) -> None:
        """Read data of a peer, and close its connection if it is done or has failed."""
        try:
            data = peer.sock.recv(_CHUNK if peer.kind == _BULK else 64)
            if not self._take_data(peer, data):
                self._drop(peer)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)

    def _take_data(self, peer: _TestPeer, data: bytes) -> bool:
        """Check the token of a peer and answer with the node, or count the bytes of a bandwidth test.

        False: the connection is done. A client that only asks for the name closes first, and so gets the TIME_WAIT.
        """
        if peer.kind == _BULK:
            peer.bytes += len(data)
            peer.until = time.monotonic() + _STRANGER
            if not data:
                peer.sock.sendall(b"%016d" % peer.bytes)
            return bool(data)
        if not data or peer.kind:
            return False
        peer.received += data
        if len(peer.received) < _TOKEN + 1:
            return True  # an answer now, or an end, would show how much of it is right
        wrong = sum(a ^ b for a, b in zip(peer.received, self._token))  # in the same time whatever is wrong
        if wrong or peer.received[_TOKEN:] not in (_NAME, _BULK):
            return False
        peer.kind = peer.received[_TOKEN:]
        peer.sock.sendall(self._answer)
        return True


# -- the tries


class _Call:
    """One try: connect, send the token, read the node's name."""

    def __init__(self, target: Connection, sock: socket.socket, until: float) -> None:
        self.target, self.sock = target, sock
        self.until = until  # by the clock of _Tries
        self.received = b""
        self.began = time.monotonic()
        self.rtt = -1.0  # seconds, once it is connected


class _Tries:
    """All targets, many at once, in one thread; each has the same few seconds for its connection.

    The other kernel answers a connection, and fast, however busy the machine is: our kernel measures this time better than this
    program. The other agent may take longer, and this one may be delayed: only time in which it polled counts.
    """

    def __init__(self, targets: Sequence[Connection], token: str, seconds: float) -> None:
        self._waiting = list(reversed(targets))
        self._token, self._seconds = token.encode(), seconds
        self._poll = select.epoll()
        self._open: Dict[int, _Call] = {}
        self._polled = 0.0  # seconds of polling: the clock of these tries
        self._done: List[Tuple[int, int, str, float]] = []

    def run(self) -> List[Tuple[int, int, str, float]]:
        """Try all targets, and list (node, port, result, seconds of the round trip); 0.0 seconds if the result is not OK."""
        tidy = _POLL
        while self._waiting or self._open:
            while self._waiting and len(self._open) < _AT_ONCE:
                self._start(self._waiting.pop())
            began = time.monotonic()
            for fd, _ in self._poll.poll(_POLL):
                self._step(self._open[fd])
            self._polled += min(_POLL, time.monotonic() - began)
            if self._polled >= tidy:
                tidy = self._polled + _POLL
                for call in [call for call in self._open.values() if call.until < self._polled]:
                    self._end(call, LinkAnswer.NO_ANSWER if call.rtt < 0 else LinkAnswer.NO_AGENT)
        self._poll.close()
        return self._done

    def _start(self, target: Connection) -> None:
        """Begin a connection to a target. One that fails at once gets its result."""
        node, address, port = target
        try:  # an address needs no name server here
            family, where = first_address(address, port)
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            code = sock.connect_ex(where)
        except (OSError, UnicodeError):
            self._done.append((node, port, f"the name {address} is not known there", 0.0))
            return
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._done.append((node, port, _why(code), 0.0))
            return
        self._open[sock.fileno()] = _Call(target, sock, self._polled + self._seconds)
        self._poll.register(sock, select.EPOLLOUT)

    def _step(self, call: _Call) -> None:
        """Continue a try whose socket is ready, and end it once it has a result."""
        try:
            result = self._finish_connection(call) if call.rtt < 0 else self._read_answer(call)
        except BlockingIOError:
            return
        except OSError as error:
            result = _why(error.errno or 0)
        if result:
            self._end(call, result)

    def _finish_connection(self, call: _Call) -> str:
        """Send the token on a connection, and measure its round trip. Returns why it could not connect, "" if it did."""
        code = call.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code:
            call.rtt = _rtt(call.sock) or time.monotonic() - call.began
            call.until = max(call.until, self._polled + _AGENT)
            self._poll.modify(call.sock, select.EPOLLIN)
            call.sock.sendall(self._token + _NAME)
        return _why(code) if code else ""

    def _read_answer(self, call: _Call) -> str:
        """Read an answer, and return the result with which it ends, "" while it continues."""
        data = call.sock.recv(64)
        call.received += data
        if not data or len(call.received) > 8:
            return LinkAnswer.OTHER_PROGRAM
        if len(call.received) < 8:
            return ""
        return LinkAnswer.OK if call.received == b"%08d" % call.target[0] else LinkAnswer.OTHER_NODE

    def _end(self, call: _Call, result: str) -> None:
        """Close the connection of a try, and store its result."""
        del self._open[call.sock.fileno()]
        call.sock.close()  # which also ends its registration
        node, _, port = call.target
        self._done.append((node, port, result, call.rtt if result is LinkAnswer.OK else 0.0))


def try_targets(node: NodeContext, request: requests.TryRequest) -> answers.TriesAnswer:
    """Connect to each target, and return (node, port, result, seconds of the round trip) of each."""
    return {"tries": _Tries(request["targets"], request["token"], request["seconds"]).run()}


def _rtt(sock: socket.socket) -> float:
    """Return the seconds of the handshake's round trip, as measured by the kernel; 0.0 if it could not, as after a loss."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
    return float(struct.unpack_from("=I", info, _RTT)[0]) / 1e6 if len(info) == _RTT + 4 else 0.0


_RESULTS = {
    errno.ECONNREFUSED: LinkAnswer.REFUSED,
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH), LinkAnswer.NO_ROUTE),
    **dict.fromkeys((errno.EINVAL, errno.EACCES, errno.EPERM), LinkAnswer.NO_ROUTE),  # rules of this node's firewall
    errno.ETIMEDOUT: LinkAnswer.NO_ANSWER,
}


def _why(code: int) -> str:
    """Convert an error number to the result of a try."""
    return _RESULTS.get(code) or os.strerror(code)


# -- how much goes through


def fill_link(node: NodeContext, request: requests.SendRequest) -> answers.SpeedAnswer:
    """Send data over one link for some seconds: {speed: bytes per second that arrived}.

    {} if the link broke, or leads to another node.
    """
    target, address, port = request["target"]
    seconds = request["seconds"]
    data = memoryview(bytes(_CHUNK))
    with contextlib.suppress(OSError, ValueError):
        with socket.create_connection((address, port), timeout=2 * seconds + _STRANGER) as sock:
            sock.sendall(request["token"].encode() + _BULK)
            if sock.recv(8, socket.MSG_WAITALL) != b"%08d" % target:
                return {}
            start = time.monotonic()
            while time.monotonic() < start + seconds:
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            arrived = int(sock.recv(16, socket.MSG_WAITALL))
            return {"speed": arrived / (time.monotonic() - start)}
    return {}
