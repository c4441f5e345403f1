"""DistributedDataParallel on GPUs. argv: the backend. The device is that of LOCAL_RANK among those that the rank sees."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

seen = torch.cuda.device_count()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank if local_rank < seen else local_rank % seen)
torch.cuda.set_device(device)
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
model = DistributedDataParallel(model, device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
numbers = torch.Generator().manual_seed(1 + dist.get_rank())
losses = []
for _ in range(30):
    inputs = torch.randn(64, 16, generator=numbers).to(device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
uuid = str(torch.cuda.get_device_properties(device).uuid)
names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "FLAGS_selected_gpus", "LOCAL_RANK", "OMP_NUM_THREADS")
env = {name: os.environ.get(name) for name in names}
weights = sum(parameter.double().sum().item() for parameter in model.parameters())
print(json.dumps({"seen": seen, "uuid": uuid, "env": env, "losses": losses, "weights": weights}), flush=True)
dist.barrier()
dist.destroy_process_group()
