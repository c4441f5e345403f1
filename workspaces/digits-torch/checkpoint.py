"""Checkpoints of nodes that share no disk: each node writes its own, and the newest one of all nodes is broadcast.

`save` is called by all ranks after the same steps, `resume` by all ranks before the first one. A file is its SHA-256 and
what torch.save has made. It gets its name when it is complete on the disk; the last two stay. A damaged one is ignored.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"), "checkpoints")


def save(step: int, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if os.environ["LOCAL_RANK"] != "0":
        return  # the first rank of each node writes
    state = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, state)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "part").open("wb") as file:
        file.write(hashlib.sha256(state.getvalue()).digest() + state.getvalue())
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


def resume(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Give all ranks the newest state that any node has. Returns its step."""
    step, state = newest()
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    rank = steps.index(max(steps))
    if steps[rank]:
        box = [state if dist.get_rank() == rank else None]
        dist.broadcast_object_list(box, src=rank)
        found = torch.load(io.BytesIO(box[0]), map_location="cpu", weights_only=True)
        net.load_state_dict(found["net"])
        optimizer.load_state_dict(found["optimizer"])
        print(f"resumed at step {steps[rank]} (from rank {rank})", flush=True)
    return steps[rank]
