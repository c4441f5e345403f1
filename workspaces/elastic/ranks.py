"""What the ranks of a job exchange in the place of a framework: vectors of numbers, over rank 0."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

START_SECONDS = 120.0  # until rank 0 listens


class Ranks:
    """All ranks of the job. A rank whose connection ends raises EOFError or OSError in all others."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if self.rank:
            self._peers = [_connect(address)]
            self._send(self._peers[0], np.array([self.rank], float))
            return
        with Listener(address, backlog=self.size) as listener:
            peers = [listener.accept() for _ in range(1, self.size)]
        of = {int(self._receive(peer)[0]): peer for peer in peers}
        self._peers = [of[rank] for rank in range(1, self.size)]

    def gather(self, mine: Vector) -> list[Vector]:
        """The vectors of all ranks, by rank. All ranks call this at the same time, with vectors of one length."""
        if self.rank:
            self._send(self._peers[0], mine)
            whole = self._receive(self._peers[0])
        else:
            whole = np.concatenate([mine, *(self._receive(peer) for peer in self._peers)])
            for peer in self._peers:
                self._send(peer, whole)
        return list(whole.reshape(self.size, -1))

    @staticmethod
    def _send(peer: Connection, vector: Vector) -> None:
        peer.send_bytes(vector.tobytes())

    @staticmethod
    def _receive(peer: Connection) -> Vector:
        return np.frombuffer(peer.recv_bytes())


def _connect(address: tuple[str, int]) -> Connection:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return Client(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
