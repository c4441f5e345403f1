"""Fit a line with mpi4py: each rank computes the gradient of its blocks of data, and MPI sums the gradients.

Each rank prints its rank, the number of ranks, its host, and the sum of all ranks by all-reduce; then the loss of each epoch.
The number of ranks decides which rank has a block, and does not change the sum over all blocks. So the losses are equal for
any number of ranks.
"""

from __future__ import annotations

import argparse
import random
from array import array

from mpi4py import MPI

BLOCKS, POINTS = 24, 50
SLOPE, START, NOISE = 2.0, -1.0, 0.1


def block(number: int) -> list[tuple[float, float]]:
    """Make the points of a block, which are the same on each rank and in each run."""
    dice = random.Random(number)
    xs = [dice.uniform(-1, 1) for _ in range(POINTS)]
    return [(x, SLOPE * x + START + dice.gauss(0, NOISE)) for x in xs]


def gradient(points: list[tuple[float, float]], slope: float, start: float) -> array[float]:
    """Sum over points: the derivative of the squared error by slope and by start, the squared error, and 1."""
    sums = array("d", [0, 0, 0, 0])
    for x, y in points:
        error = slope * x + start - y
        for i, value in enumerate((2 * error * x, 2 * error, error * error, 1)):
            sums[i] += value
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line; MPI sums the gradients of all ranks.")
    parser.add_argument("--epochs", type=int, default=10, help="times through the data")
    parser.add_argument("--lr", type=float, default=0.5, help="size of a step")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    total = world.allreduce(world.rank + 1)
    print(f"rank={world.rank} size={world.size} sum={total} host={MPI.Get_processor_name()}", flush=True)
    mine = [point for number in range(world.rank, BLOCKS, world.size) for point in block(number)]
    slope = start = 0.0
    for epoch in range(1, args.epochs + 1):
        sums = gradient(mine, slope, start)
        world.Allreduce(MPI.IN_PLACE, sums)
        by_slope, by_start, errors, count = sums
        slope, start = slope - args.lr * by_slope / count, start - args.lr * by_start / count
        print(f"epoch={epoch} loss={errors / count:.6f} slope={slope:.4f} start={start:.4f}", flush=True)


if __name__ == "__main__":
    main()
