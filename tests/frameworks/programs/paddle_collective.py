"""Training with Paddle's DataParallel. It prints its environment, and its result: the mean loss of each step."""

import json
import os
from pathlib import Path

import paddle
import paddle.distributed as dist

# The environment with which this process was started: importing Paddle sets variables.
given = Path("/proc/self/environ").read_text().rstrip("\0").split("\0")
print(json.dumps({"env": dict(pair.split("=", 1) for pair in given)}), flush=True)

dist.init_parallel_env()
rank, world = dist.get_rank(), dist.get_world_size()
assert dist.ParallelEnv().current_endpoint == os.environ["PADDLE_CURRENT_ENDPOINT"]
paddle.seed(0)
model = paddle.DataParallel(paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 1)))
optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
paddle.seed(1 + rank)
losses = []
for _ in range(5):
    inputs = paddle.randn([32, 8])
    loss = paddle.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(f"{total.item() / world:.6f}")
print(json.dumps({"result": losses}), flush=True)
dist.barrier()
