"""A training that saves a snapshot after each epoch and begins with the newest one, as scripts for torchrun do.

It is the same file for torchrun and for this tool. STOP_AFTER: the epoch after which rank 1 exits with code 3.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SNAPSHOT, EPOCHS = "output/snapshot.pt", 6


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    begin = 0
    if os.path.exists(SNAPSHOT):
        found = torch.load(SNAPSHOT)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        begin = found["epochs"]
    print(f"rank {rank} of {size} begins at epoch {begin}", flush=True)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    mine, target = data[rank::size], data.sum(1, keepdim=True)[rank::size]
    for epoch in range(begin, EPOCHS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine), target)
        loss.backward()
        optimizer.step()
        if rank == 0:
            os.makedirs("output", exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, SNAPSHOT + ".part")
            os.replace(SNAPSHOT + ".part", SNAPSHOT)
        dist.barrier()
        if str(epoch) == os.environ.get("STOP_AFTER") and rank == 1:
            os._exit(3)
    weights = [round(value, 6) for value in model.module.weight.flatten().tolist()]
    print(f"rank {rank} ends with {weights}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
