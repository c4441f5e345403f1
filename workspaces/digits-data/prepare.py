"""Handwritten digits in, shards out: the data of digits-torch, digits-paddle and paddle-ps. Runs once, on the laptop.

The digits (1797 pictures of 8 x 8 pixels, written by 43 people) come with scikit-learn, so nothing has to be
downloaded, and the nodes need no scikit-learn. A line is one picture: the digit, then its 64 pixels from 0 to 16.

    pip install -r workspaces/digits-data/requirements.txt
    python workspaces/digits-data/prepare.py
    inv run --workspace workspaces/digits-torch --nproc-per-node 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

WORKSPACES = Path(__file__).resolve().parents[1]
JOBS = ("digits-torch", "digits-paddle", "paddle-ps")
TEST_SHARE = 0.2
SEED = 1


def pictures() -> np.ndarray:
    """All pictures in random order, one a row: digit, 64 pixels."""
    digits = load_digits()
    rows = np.column_stack([digits.target, digits.data]).astype(int)
    return np.random.default_rng(SEED).permutation(rows)


def write(out: Path, rows: np.ndarray, shards: int) -> int:
    """The shards, and what is left as the test set. Returns the rows of one shard."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("train.txt-*"):  # a run with fewer shards must not leave some of the former ones
        old.unlink()
    each = int(len(rows) * (1 - TEST_SHARE)) // shards  # all of one size: every trainer makes equally many steps
    for number in range(shards):
        np.savetxt(out / f"train.txt-{number:05d}", rows[number * each : (number + 1) * each], "%d")
    # Not named like a shard: every node gets it.
    np.savetxt(out / "test.txt", rows[shards * each :], "%d")
    return each


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut scikit-learn's handwritten digits into shards.")
    parser.add_argument(
        "--out", type=Path, action="append", help="where the files go (default: the data/ of all three jobs)"
    )
    parser.add_argument(
        "--shards", type=int, default=24, help="files to cut into (default 24: even for 2, 3, 4, 6, 8 trainers)"
    )
    args = parser.parse_args()
    rows = pictures()
    if not 1 <= args.shards <= 0.5 * len(rows):
        parser.error(f"--shards must be from 1 to {len(rows) // 2}")
    for out in args.out or [WORKSPACES / job / "data" for job in JOBS]:
        each = write(out, rows, args.shards)
        print(f"{args.shards} shards of {each} pictures, {len(rows) - args.shards * each} to test with: {out}")


if __name__ == "__main__":
    main()
