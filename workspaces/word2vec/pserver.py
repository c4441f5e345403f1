"""A pserver: it owns every n-th row of the parameter table, and only it changes them.

Row r of the table lies on pserver r modulo n, as that pserver's row r // n. Trainers pull the rows they need
and push gradients for them (wire.py). In sync mode a step ends when every trainer has pushed: the gradients
are summed in the order of the trainers and applied together, so N trainers walk as one with an N times larger
batch, and a second run has the same losses. In async mode each push is applied as it comes. A pserver runs
until SIGTERM, which clustertool sends when all trainers are done.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
from wire import DIFFERS, HELLO, LEAVE, LOST, NO_VALUES, OK, PULL, PUSH, WAIT, Frame, Link, address

if TYPE_CHECKING:
    from wire import Floats, Ints

SEED = 1


class Slice:
    """The rows of one pserver, with Adagrad: a number that has moved much moves less and less."""

    def __init__(self, index: int, pservers: int, settings: tuple[int, int], lr: float) -> None:
        total, dim = settings
        # Drawn as a whole and then cut, so that the table starts alike however many pservers share it.
        whole = np.random.default_rng(SEED).uniform(-0.5 / dim, 0.5 / dim, (total, dim)).astype(np.float32)
        whole[total // 2 :] = 0  # the second half: vectors of words as context, by custom from zero
        self.pservers, self.dim, self.lr = pservers, dim, lr
        self.rows = whole[index::pservers].copy()
        self.squares = np.full_like(self.rows, 1e-8)
        self.sums = np.zeros_like(self.rows)
        self.pushed: dict[int, tuple[Ints, Floats]] = {}  # by trainer

    def pull(self, keys: Ints) -> Floats:
        return self.rows[keys // self.pservers]

    def add(self, trainer: int, keys: Ints, gradients: Floats) -> None:
        self.pushed[trainer] = keys // self.pservers, gradients.reshape(-1, self.dim)

    def apply(self) -> None:
        """One step: everything added since the last one. The order of a sum decides its last digit."""
        for _, (rows, gradients) in sorted(self.pushed.items(), key=lambda item: item[0]):
            self.sums[rows] += gradients  # keys of one push are distinct
        mine = np.unique(np.concatenate([rows for rows, _ in self.pushed.values()]))
        gradients = self.sums[mine]
        self.squares[mine] += gradients * gradients
        self.rows[mine] -= self.lr * gradients / np.sqrt(self.squares[mine])
        self.sums[mine] = 0
        self.pushed.clear()


class Pserver:
    """What all connections share, under one lock: the slice, and how many still train."""

    def __init__(self, index: int, pservers: int, trainers: int) -> None:
        self.index, self.pservers = index, pservers
        self.training = trainers  # have not left yet; counted from the start, so that no trainer runs ahead alone
        self.steps = 0
        self.broken = False
        self.settings: tuple[list[int], float] | None = None
        self.slice: Slice
        self.sync = True
        self.changed = threading.Condition()

    def answer(self, trainer: int, frame: Frame) -> tuple[int, Floats]:
        with self.changed:
            if frame.op == HELLO:
                return self.hello(frame), NO_VALUES
            if frame.op == PULL:
                return OK, self.slice.pull(frame.keys)
            if frame.op == PUSH:
                return self.push(trainer, frame), NO_VALUES
            if frame.op == LEAVE:
                return self.leave(), NO_VALUES
            if frame.op == WAIT:
                self.changed.wait_for(lambda: self.training == 0 or self.broken)
                return (LOST if self.broken else OK), NO_VALUES
        raise ConnectionError(f"unknown request {frame.op}")

    def hello(self, frame: Frame) -> int:
        """The first trainer's settings make the slice; the others must have come with the same."""
        settings = (frame.keys[1:].tolist(), float(frame.values[0]))
        if self.settings is None:
            (rows, dim, sync), lr = self.settings = settings
            self.sync = bool(sync)
            self.slice = Slice(self.index, self.pservers, (rows, dim), lr)
            say(f"holds {len(self.slice.rows)} of {rows} rows, dim={dim} mode={'sync' if sync else 'async'}")
        return OK if settings == self.settings else DIFFERS

    def push(self, trainer: int, frame: Frame) -> int:
        self.slice.add(trainer, frame.keys, frame.values)
        step = self.steps
        self.end_step()
        self.changed.wait_for(lambda: self.steps > step or self.broken)
        return OK if self.steps > step else LOST

    def end_step(self) -> None:
        pushed = len(self.slice.pushed)
        if pushed and not self.broken and (pushed == self.training or not self.sync):
            self.slice.apply()
            self.steps += 1
            self.changed.notify_all()

    def leave(self) -> int:
        """A trainer has no more data: the others must not wait for it."""
        self.training -= 1
        self.end_step()
        self.changed.notify_all()
        return OK

    def lose(self, trainer: int, why: str) -> None:
        """A trainer went without leaving. Async training goes on without it; a step of all cannot."""
        say(f"lost trainer {trainer}: {why}")
        with self.changed:
            if self.sync:
                self.broken = True
                self.changed.notify_all()
            else:
                self.leave()


def serve(pserver: Pserver, sock: socket.socket) -> None:
    """One connection, one thread. A peer without a HELLO is no trainer: a port check, or a stranger."""
    link, trainer, training, why = Link(sock), -1, False, "bad request"
    try:
        while True:
            frame = link.receive()
            if trainer < 0 and frame.op != HELLO:
                raise ConnectionError("no HELLO")
            op, values = pserver.answer(trainer, frame)
            if frame.op == HELLO and op == OK:
                trainer, training = int(frame.keys[0]), True
            elif frame.op == LEAVE:
                training = False
            link.send(op, values=values)
    except OSError as error:
        why = str(error)
    finally:
        link.close()
        if training:
            pserver.lose(trainer, why)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    env = os.environ
    try:
        mine = env["POD_IP"] + ":" + env["PADDLE_PORT"]
        everyone = env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
        pserver = Pserver(everyone.index(mine), len(everyone), int(env["PADDLE_TRAINERS_NUM"]))
    except KeyError as missing:
        sys.exit(f"{missing} is not set; start this with `inv run --workspace workspaces/word2vec`")
    except ValueError:
        sys.exit(f"{mine} is not in PADDLE_PSERVERS_IP_PORT_LIST={env['PADDLE_PSERVERS_IP_PORT_LIST']}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, port = address(mine)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        say(f"listens on {mine}")
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(pserver, sock), daemon=True).start()


if __name__ == "__main__":
    main()
