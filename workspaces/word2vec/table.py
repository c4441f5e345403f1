"""The parameter table as a trainer sees it: one table, though its rows lie on many pservers.

Row r lies on pserver r modulo n. Every request goes to all pservers first and only then are the answers read,
so that they work at the same time. Whatever goes wrong is a TableLost whose text says which pserver and why.
"""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

import numpy as np
from wire import DIFFERS, HELLO, LEAVE, LOST, NO_KEYS, NO_VALUES, OK, PULL, PUSH, WAIT, Link, address

if TYPE_CHECKING:
    from wire import Floats, Ints

PATIENCE = 30.0  # seconds for the pservers to come up; under clustertool they listen before trainers start


class TableLost(Exception):
    pass


class Table:
    def __init__(self, endpoints: list[str], shape: tuple[int, int]) -> None:
        self.endpoints = endpoints
        self.rows, self.dim = shape
        deadline = time.monotonic() + PATIENCE
        self.links = [self._connect(endpoint, deadline) for endpoint in endpoints]

    def hello(self, trainer: int, sync: bool, lr: float) -> None:
        settings = np.array([trainer, self.rows, self.dim, sync], "<i4")
        self._ask_all(HELLO, settings, np.array([lr], "<f4"))

    def pull(self, keys: Ints) -> Floats:
        owner = keys % len(self.links)
        places = [np.flatnonzero(owner == server) for server in range(len(self.links))]
        answers = self._ask(PULL, [keys[place] for place in places])
        rows = np.empty((len(keys), self.dim), np.float32)
        for place, answer in zip(places, answers):
            rows[place] = answer.reshape(-1, self.dim)
        return rows

    def push(self, keys: Ints, gradients: Floats) -> None:
        """To every pserver, even those that get no row: in sync mode each of them waits for every trainer."""
        owner = keys % len(self.links)
        mine = [owner == server for server in range(len(self.links))]
        self._ask(PUSH, [keys[m] for m in mine], [gradients[m] for m in mine])

    def leave(self) -> None:
        self._ask_all(LEAVE)

    def wait_for_all(self) -> None:
        self._ask_all(WAIT)

    def _ask_all(self, op: int, keys: Ints = NO_KEYS, values: Floats = NO_VALUES) -> None:
        self._ask(op, [keys] * len(self.links), [values] * len(self.links))

    def _ask(self, op: int, keys: list[Ints], values: list[Floats] | None = None) -> list[Floats]:
        for server, link in enumerate(self.links):
            with self._blame(server):
                link.send(op, keys[server], values[server] if values else NO_VALUES)
        return [self._answer(server) for server in range(len(self.links))]

    def _answer(self, server: int) -> Floats:
        with self._blame(server):
            frame = self.links[server].receive()
        if frame.op == OK:
            return frame.values
        reason = {
            LOST: "another trainer died, so no step can be complete any more",
            DIFFERS: "the trainers do not agree on dictionary, --dim, --lr or --sync",
        }[frame.op]
        raise TableLost(f"pserver {server} at {self.endpoints[server]} says: {reason}")

    @contextmanager
    def _blame(self, server: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TableLost(f"lost pserver {server} at {self.endpoints[server]}: {error}") from None

    def _connect(self, endpoint: str, deadline: float) -> Link:
        while True:
            try:
                sock = socket.create_connection(address(endpoint), timeout=PATIENCE)
                sock.settimeout(None)  # a step of all trainers takes as long as the slowest needs
                return Link(sock)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TableLost(f"no pserver at {endpoint}: {error}") from None
                time.sleep(0.1)
