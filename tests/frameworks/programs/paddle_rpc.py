"""A worker of Paddle's rpc asks the next one to add. It prints its environment, and its result: the answer."""

import json
import os
from pathlib import Path

import paddle.distributed.rpc as rpc


def add(a: int, b: int) -> int:
    return a + b


# The environment with which this process was started: importing Paddle sets variables.
given = Path("/proc/self/environ").read_text().rstrip("\0").split("\0")
print(json.dumps({"env": dict(pair.split("=", 1) for pair in given)}), flush=True)

rank, world = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
rpc.init_rpc(f"worker{rank}")
infos = {info.name: f"{info.ip}:{info.port}" for info in rpc.get_all_worker_infos()}
assert infos[f"worker{rank}"] == os.environ["PADDLE_WORKER_ENDPOINT"], infos
answer = rpc.rpc_sync(f"worker{(rank + 1) % world}", add, args=(rank, 40))
print(json.dumps({"result": answer}), flush=True)
rpc.shutdown()
