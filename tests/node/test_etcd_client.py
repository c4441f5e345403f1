"""The client of etcd with servers that are no etcd."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from clustertool.node.join.etcd_client import EtcdAccess, EtcdClient, EtcdError


def test_a_server_that_sends_its_answer_slowly() -> None:
    """The limit is for the whole answer, its headers included, not for each byte."""
    stop = threading.Event()

    def answer() -> None:
        connection = listener.accept()[0]
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n{" + b" " * 39:
                connection.sendall(bytes([byte]))
                if stop.wait(0.1):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer)
        server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(EtcdError, match="no answer in time"):
            EtcdClient(EtcdAccess((url,)), (5, 0.5)).read("key")
        stop.set()
        server.join(10)
    assert 0.5 <= time.monotonic() - start < 5
