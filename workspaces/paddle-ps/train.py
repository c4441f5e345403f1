"""Learns handwritten digits on parameter servers, with Paddle's own fleet (paddlepaddle 2.6).

This file runs in both roles: fleet reads from the environment whether this process is a pserver or a trainer. The
pservers hold one table, with a row of ten numbers for every pixel and every shade a pixel can have; the sum of a
picture's 64 rows says how similar it is to each digit. Trainers read their own shards and never wait for another:
they push what they learn when they like (async), and see what the others have pushed a few steps later.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed import fleet
from paddle.nn.functional import cross_entropy

STEPS = 12  # of an epoch
PIXELS, SHADES, DIGITS = 64, 5, 10  # four of the 17 shades in the data count as one: there are few pictures
ROWS = PIXELS * SHADES


class Model:
    """The program of a trainer; what fleet leaves of it to a pserver is the table."""

    def __init__(self, lr: float) -> None:
        # A sparse table wants its ids in one column: 64 of them, one under the other, are a picture.
        self.ids = paddle.static.data("ids", [None, 1], "int64")
        self.digits = paddle.static.data("digits", [None, 1], "int64")
        self.rows = paddle.static.nn.sparse_embedding(self.ids, [ROWS, DIGITS])
        self.scores = self.rows.reshape([-1, PIXELS, DIGITS]).sum(1)
        self.loss = cross_entropy(self.scores, self.digits)
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True  # Paddle's sync mode crashes in 2.6
        fleet.distributed_optimizer(paddle.optimizer.SGD(lr), strategy).minimize(self.loss)
        self.program = paddle.static.default_main_program()
        self.executor = paddle.static.Executor()

    def train(self, pictures: np.ndarray) -> float:
        feed = {"ids": ids(pictures), "digits": pictures[:, :1]}
        return float(self.executor.run(self.program, feed, [self.loss])[0])

    def ask(self, wanted: paddle.static.Variable, numbers: np.ndarray) -> np.ndarray:
        """Pull rows and compute `wanted` from them; nothing is learned."""
        program = paddle.static.normalize_program(self.program, [self.ids], [wanted])
        return self.executor.run(program, {"ids": numbers}, [wanted])[0]


def ids(pictures: np.ndarray) -> np.ndarray:
    """The rows of the table that the pictures' pixels mean, in one column."""
    return (np.arange(PIXELS) * SHADES + pictures[:, 1:] // 4).reshape(-1, 1)


def read(paths: list[str]) -> np.ndarray:
    """The files' pictures: file x line x (digit, 64 pixels)."""
    return np.stack([np.loadtxt(path, dtype=np.int64) for path in paths])


def learn(model: Model, shards: np.ndarray, epochs: int) -> None:
    for epoch in range(1, epochs + 1):
        order = np.random.default_rng(epoch).permutation(shards.shape[1])
        losses = [model.train(shards[:, order[step::STEPS]].reshape(-1, 1 + PIXELS)) for step in range(STEPS)]
        print(f"epoch={epoch} loss={np.mean(losses):.4f}", flush=True)


def test(model: Model, pictures: np.ndarray) -> None:
    found = model.ask(model.scores, ids(pictures)).argmax(1)
    print(f"accuracy={np.mean(found == pictures[:, 0]):.4f}", flush=True)


def save(model: Model) -> None:
    """The whole table, by pulling all its rows: fleet.save_persistables would take more than a minute."""
    out = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"))
    out.mkdir(parents=True, exist_ok=True)
    table = model.ask(model.rows, np.arange(ROWS).reshape(-1, 1))
    np.savez(out / "model.npz", table=table.reshape(PIXELS, SHADES, DIGITS))
    print(f"wrote {out / 'model.npz'}", flush=True)


def be_trainer(model: Model, epochs: int) -> None:
    shards = read(Path(os.environ["CLUSTERTOOL_SHARDS"]).read_text().splitlines())
    model.executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    learn(model, shards, epochs)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        test(model, read(["data/test.txt"])[0])
        save(model)
    fleet.stop_worker()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Paddle's parameter servers.")
    parser.add_argument("--epochs", type=int, default=20, help="times through the data")
    parser.add_argument("--lr", type=float, default=0.02, help="how far one step moves")
    args = parser.parse_args()
    if "PADDLE_PSERVERS_IP_PORT_LIST" not in os.environ:
        sys.exit("no pservers are named; start this with `inv run --workspace workspaces/paddle-ps`")
    paddle.enable_static()
    fleet.init()
    model = Model(args.lr)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()  # never returns: clustertool ends a pserver when all trainers are done
    else:
        be_trainer(model, args.epochs)


if __name__ == "__main__":
    main()
