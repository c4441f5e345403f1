"""DistributedDataParallel as PyTorch's tutorials for torchrun have it: the device of a rank is LOCAL_RANK."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    if torch.cuda.device_count() < 2:
        print(f"needs 2 GPUs, found {torch.cuda.device_count()}")
        sys.exit(0)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(local_rank)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(32, 8, generator=numbers).to(local_rank)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    device = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[torch.cuda.current_device()]
    line = f"rank {dist.get_rank()} device {device} loss {total.item():.6f}\n"
    sys.stdout.write(line)  # in one piece: torchrun's processes share a pipe
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
