"""Learns handwritten digits with PyTorch's DistributedDataParallel; every trainer reads only its own shards.

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
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS = 12  # of an epoch: with 24 shards of 59 lines, all trainers together see 118 pictures in a step


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # clustertool shows a process its own cards only, torchrun shows it all of the machine: this is right for both.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def read(paths: list[str]) -> torch.Tensor:
    """The files' pictures: file x line x (digit, 64 pixels)."""
    return torch.from_numpy(np.stack([np.loadtxt(path, dtype=np.float32) for path in paths]))


def pictures(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels from 0 to 1, and digits."""
    rows = rows.reshape(-1, rows.shape[-1])
    return rows[:, 1:] / 16, rows[:, 0].long()


def weight(shards: torch.Tensor) -> float:
    """What DDP's mean over trainers must count this trainer's loss: 1, or more for one that has more shards."""
    count = torch.tensor(len(shards), dtype=torch.float32, device=shards.device)
    dist.all_reduce(count)
    return len(shards) * dist.get_world_size() / count.item()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, shards: torch.Tensor, epoch: int) -> float:
    """Once through all shards. Returns the mean loss over the pictures of all trainers."""
    share = weight(shards)
    total = torch.zeros((), device=shards.device)
    order = torch.randperm(shards.shape[1], generator=torch.Generator().manual_seed(epoch))
    for step in range(STEPS):
        pixels, digits = pictures(shards[:, order[step::STEPS]])
        loss = share * cross_entropy(net(pixels), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / STEPS / dist.get_world_size()


@torch.no_grad()
def accuracy(net: nn.Module, test: torch.Tensor) -> float:
    pixels, digits = pictures(test)
    return (net(pixels).argmax(1) == digits).float().mean().item()


def save(net: nn.Module) -> None:
    out = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"))
    out.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), out / "model.pt")
    print(f"wrote {out / 'model.pt'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DistributedDataParallel.")
    parser.add_argument("--epochs", type=int, default=20, help="times through the data")
    parser.add_argument("--lr", type=float, default=0.1, help="how far one step moves")
    parser.add_argument(
        "--backend", help="gloo or nccl (default: nccl where there are GPUs); gloo also lets two trainers share a card"
    )
    args = parser.parse_args()
    device = pick_device()
    if "CLUSTERTOOL_SHARDS" not in os.environ:
        sys.exit("no shards are given; start this with `inv run --workspace workspaces/digits-torch`")
    shards = read(Path(os.environ["CLUSTERTOOL_SHARDS"]).read_text().splitlines()).to(device)
    test = read(["data/test.txt"]).to(device)

    # The own rank, where rank 0 listens, and the number of ranks: RANK, MASTER_ADDR, WORLD_SIZE ... in the environment.
    dist.init_process_group(args.backend or ("nccl" if device.type == "cuda" else "gloo"))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    step = checkpoint.resume(net, optimizer)
    together = DistributedDataParallel(net)
    for epoch in range(step // STEPS + 1, args.epochs + 1):
        loss = train(together, optimizer, shards, epoch)
        step += STEPS
        checkpoint.save(step, net, optimizer)
        print(f"epoch={epoch} step={step} loss={loss:.6f} accuracy={accuracy(net, test):.4f}", flush=True)
    if dist.get_rank() == 0:
        save(net)
    dist.destroy_process_group()
    # Gloo's threads live on where DistributedDataParallel was used (2.13), and one that still holds a tensor while the
    # interpreter ends aborts the process. All is written: leave at once.
    os._exit(0)


if __name__ == "__main__":
    main()
