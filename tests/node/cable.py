"""A cable lies between the coordinator of a job and its other nodes, and a test breaks it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable

from tests.node.harness import Job


class Cable:
    """A TCP proxy in front of the coordinator: cut() resets what is connected, and once pull() has returned nothing comes
    through until plug()."""

    def __init__(self, coordinator: tuple[str, int]) -> None:
        self._coordinator = coordinator
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._open = threading.Event()
        self._open.set()
        self._passing = threading.Lock()
        self._over = self._cut = False
        self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        self._cut = True

    def pull(self) -> None:
        self._open.clear()
        with self._passing:  # what is under way has come through
            pass

    def plug(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self._drop()
        self._listener.close()

    def _run(self) -> None:
        while not self._over:
            if self._cut:
                self._cut = False
                self._drop()
            if self._open.wait(0.01):
                with self._passing:
                    if self._open.is_set():
                        self._pass_on()

    def _pass_on(self) -> None:
        ready, _, _ = select.select([self._listener, *self._pairs], [], [], 0.01)
        for sock in ready:
            if sock is self._listener:
                near = sock.accept()[0]
                with contextlib.suppress(OSError):
                    far = socket.create_connection(self._coordinator, timeout=1)
                    self._pairs.update({near: far, far: near})
                    self.connections += 1
            elif sock in self._pairs:
                try:
                    data = sock.recv(65536)
                    self._pairs[sock].sendall(data)
                except OSError:
                    data = b""
                if not data:
                    for end in (sock, self._pairs.pop(sock)):
                        self._pairs.pop(end, None)
                        end.close()

    def _drop(self) -> None:
        for sock in self._pairs:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        self._pairs.clear()

    def of(self, job: Job, nodes: Iterable[int]) -> None:
        """Let these nodes of a job that is not placed connect to the coordinator by this cable."""
        for node in nodes:
            request = job.place_requests[node]
            coordinator = {**request["spec"]["lead"], "host": self.address[0], "port": self.address[1]}
            request["spec"] = {**request["spec"], "lead": coordinator}


CableOf = Callable[[Job], Cable]
