"""Learns handwritten digits with Paddle's collective DataParallel; every trainer reads only its own shards.

A step takes the same lines of every shard, wherever that shard is read. So the batch of all trainers together, and
with it the whole training, is the same for any number of trainers: one process and twelve print the same losses.

Each node writes a checkpoint after each epoch (checkpoint.py). A training that is started again continues after the
newest one, also with another number of trainers: its losses are those of a training that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import checkpoint
import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn.functional import cross_entropy

STEPS = 12  # of an epoch: with 24 shards of 59 lines, all trainers together see 118 pictures in a step


def read(paths: list[str]) -> np.ndarray:
    """The files' pictures: file x line x (digit, 64 pixels)."""
    return np.stack([np.loadtxt(path, dtype=np.float32) for path in paths])


def pictures(rows: np.ndarray) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Pixels from 0 to 1, and digits."""
    rows = rows.reshape(-1, rows.shape[-1])
    return paddle.to_tensor(rows[:, 1:] / 16), paddle.to_tensor(rows[:, 0].astype(np.int64))


def mean(value: float) -> float:
    """The mean of a number that each trainer has."""
    total = paddle.to_tensor([value], dtype="float32")
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(net: nn.Layer, optimizer: paddle.optimizer.Optimizer, shards: np.ndarray, epoch: int) -> float:
    """Once through all shards. Returns the mean loss over the pictures of all trainers."""
    # DataParallel takes the mean over trainers, where one that has more shards must count for more.
    share = len(shards) / mean(len(shards))
    total = 0.0
    order = np.random.default_rng(epoch).permutation(shards.shape[1])
    for step in range(STEPS):
        pixels, digits = pictures(shards[:, order[step::STEPS]])
        loss = share * cross_entropy(net(pixels), digits)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        total += loss.item()
    return mean(total) / STEPS


@paddle.no_grad()
def accuracy(net: nn.Layer, test: np.ndarray) -> float:
    pixels, digits = pictures(test)
    return (net(pixels).argmax(1) == digits).astype("float32").mean().item()


def save(net: nn.Layer) -> None:
    out = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"))
    paddle.save(net.state_dict(), str(out / "model.pdparams"))
    print(f"wrote {out / 'model.pdparams'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Paddle's DataParallel.")
    parser.add_argument("--epochs", type=int, default=20, help="times through the data")
    parser.add_argument("--lr", type=float, default=0.1, help="how far one step moves")
    args = parser.parse_args()
    if "CLUSTERTOOL_SHARDS" not in os.environ:
        sys.exit("no shards are given; start this with `inv run --workspace workspaces/digits-paddle`")
    shards = read(Path(os.environ["CLUSTERTOOL_SHARDS"]).read_text().splitlines())
    test = read(["data/test.txt"])

    # The own rank, where rank 0 listens, and the number of ranks: PADDLE_TRAINER_ID, PADDLE_MASTER ... in the environment.
    dist.init_parallel_env()
    paddle.seed(1)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = paddle.optimizer.Momentum(args.lr, 0.9, parameters=net.parameters())
    step = checkpoint.resume(net, optimizer)
    together = paddle.DataParallel(net)
    for epoch in range(step // STEPS + 1, args.epochs + 1):
        loss = train(together, optimizer, shards, epoch)
        step += STEPS
        checkpoint.save(step, net, optimizer)
        print(f"epoch={epoch} step={step} loss={loss:.6f} accuracy={accuracy(net, test):.4f}", flush=True)
    if dist.get_rank() == 0:
        save(net)


if __name__ == "__main__":
    main()
