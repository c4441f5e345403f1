"""A worker of torch's rpc: it asks the next one to add, and prints the answer."""

import os

import torch.distributed.rpc as rpc


def add(a: int, b: int) -> int:
    return a + b


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
print("answer", rpc.rpc_sync(f"worker{(rank + 1) % world}", add, args=(rank, 40)), flush=True)
rpc.shutdown()
