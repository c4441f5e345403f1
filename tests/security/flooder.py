"""A stranger who floods a port: opens connections at a given rate, sends something on each, and keeps the newest ones open.

    python flooder.py SOURCE HOST PORT RATE PEM KIND...

It runs until its stdin ends, and prints the connections a second that it made. SOURCE: its own address. The kinds of the
connections take turns. PEM: the certificate and key with which two threads make whole handshakes, one after the other.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

_KEPT = 800  # connections that it leaves open
_STEP = 0.005  # seconds between two bursts


def client_hello() -> bytes:
    """What a TLS client sends first."""
    ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ctx.check_hostname, ctx.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ctx.wrap_bio(incoming, outgoing).do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without an answer")


HELLO = client_hello()
KINDS: dict[str, Callable[[], bytes]] = {
    "silent": lambda: b"",
    "half": lambda: HELLO[: len(HELLO) // 2],
    "hello": lambda: HELLO,  # the server answers it, and the client never does
    "garbage": lambda: os.urandom(512),
    "large": lambda: b"\x16\x03\x01\xff\xff" + b"\xff" * 4096,  # a TLS record of the largest size, and a part of it
    "frame": lambda: b"\x7f\xff\xff\xff" * 2 + b"{" * 4096,  # a frame of 2 GiB, without TLS
}


def handshakes(source: str, host: str, port: int, pem: str) -> None:
    ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ctx.check_hostname, ctx.verify_mode = False, ssl.CERT_NONE
    ctx.load_cert_chain(pem)
    while True:
        try:
            with socket.create_connection((host, port), 1.0, (source, 0)) as sock, ctx.wrap_socket(sock) as tls:
                tls.sendall(b"\0" * 4096)
                tls.recv(1)
        except OSError:
            pass


def flood(source: str, host: str, port: int, rate: float, kinds: list[str]) -> float:
    """The connections a second."""
    kept: deque[socket.socket] = deque()
    began = time.monotonic()
    made = 0
    while not select.select([0], [], [], _STEP)[0]:
        due = min(int((time.monotonic() - began) * rate) - made, int(rate / 10))
        for _ in range(due):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.bind((source, 0))
            sock.connect_ex((host, port))
            try:
                sock.send(KINDS[kinds[made % len(kinds)]]())
            except OSError:
                pass  # the queue of the port is full
            kept.append(sock)
            made += 1
            if len(kept) > _KEPT:
                kept.popleft().close()
    return made / (time.monotonic() - began)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    source, host, port, rate, pem, *kinds = sys.argv[1:]
    for _ in range(2):
        threading.Thread(target=handshakes, args=(source, host, int(port), pem), daemon=True).start()
    print(round(flood(source, host, int(port), float(rate), kinds)))
