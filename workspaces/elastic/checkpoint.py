"""Checkpoints of nodes that share no disk: each node writes its own, and all ranks take the newest one of all nodes.

`save` is called by all ranks after the same steps, `resume` by all ranks before the first one. A file is its SHA-256 and
the numbers. It gets its name when it is complete on the disk; the last two stay. A damaged one is ignored.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ranks import Ranks, Vector

FOLDER = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"), "checkpoints")


def save(step: int, state: Vector) -> None:
    if os.environ["LOCAL_RANK"] != "0":
        return  # the first rank of each node writes
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = state.tobytes()
    with (FOLDER / "part").open("wb") as file:
        file.write(hashlib.sha256(data).digest() + data)
        file.flush()
        os.fsync(file.fileno())
    (FOLDER / "part").replace(FOLDER / f"step-{step:09}")
    for old in sorted(FOLDER.glob("step-*"))[:-2]:
        old.unlink()


def newest() -> tuple[int, bytes]:
    """The last step whose checkpoint on this node is valid, and its state; step 0 if there is none."""
    for path in sorted(FOLDER.glob("step-*"), reverse=True):
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() == data[:32]:
            return int(path.name[5:]), data[32:]
    return 0, b""


def resume(ranks: Ranks, state: Vector) -> int:
    """Give all ranks the newest state that any node has, in place. Returns its step."""
    step, data = newest()
    steps = [int(found[0]) for found in ranks.gather(np.array([step], float))]
    rank = steps.index(max(steps))
    if steps[rank]:
        mine = np.frombuffer(data) if ranks.rank == rank else state
        state[:] = ranks.gather(mine)[rank]
        print(f"resumed at step {steps[rank]} (from rank {rank})", flush=True)
    return steps[rank]
