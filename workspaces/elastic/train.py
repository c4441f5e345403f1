"""Learns to tell ten kinds of points apart, with numpy only, and continues after the loss of a node.

A step has the same points for any number of ranks: each rank takes every WORLD_SIZE-th one of them, and the gradients of
all are summed. So the losses after a restart with fewer or more ranks are those of a training that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import checkpoint
import numpy as np
from ranks import Ranks

if TYPE_CHECKING:
    from ranks import Vector

KINDS, SIZE, BATCH = 10, 32, 240
CENTRES = np.random.default_rng(1).normal(size=(KINDS, SIZE)) * 0.6


def points(step: int, ranks: Ranks) -> tuple[Vector, Vector]:
    """This rank's points of a step: place, and kind as a row with a single 1. They depend on the step, not on time or place."""
    random = np.random.default_rng(step)
    kinds = random.integers(KINDS, size=BATCH)
    places = CENTRES[kinds] + random.normal(size=(BATCH, SIZE))
    return places[ranks.rank :: ranks.size], np.eye(KINDS)[kinds[ranks.rank :: ranks.size]]


def slope(weights: Vector, places: Vector, kinds: Vector) -> Vector:
    """The sum of the gradients of these points, and the sum of their losses as the last number."""
    scores = places @ weights.reshape(SIZE, KINDS)
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    return np.append(places.T @ (np.exp(scores) - kinds), -(scores * kinds).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with numpy, and continue from a checkpoint.")
    parser.add_argument("--steps", type=int, default=400, help="of the whole training")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints, and between lines")
    parser.add_argument("--lr", type=float, default=0.002, help="how far one step moves")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step, to watch it")
    args = parser.parse_args()
    ranks = Ranks()
    state = np.zeros(2 * SIZE * KINDS)
    weights, momentum = np.split(state, 2)  # views: what changes them changes the state
    losses: list[float] = []
    for step in range(checkpoint.resume(ranks, state) + 1, args.steps + 1):
        total = np.sum(ranks.gather(slope(weights, *points(step, ranks))), axis=0) / BATCH
        momentum *= 0.9
        momentum -= args.lr * total[:-1]
        weights += momentum
        losses.append(total[-1])
        time.sleep(args.pause)
        if step % args.every == 0:
            checkpoint.save(step, state)
            print(f"step={step} loss={np.mean(losses):.4f} ranks={ranks.size}", flush=True)
            losses.clear()
    if ranks.rank == 0:
        out = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"))
        np.save(out / "weights.npy", weights.reshape(SIZE, KINDS))
        print(f"wrote {out / 'weights.npy'}", flush=True)


if __name__ == "__main__":
    main()
