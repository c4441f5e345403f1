"""Training with fleet's parameter servers, async. It prints its environment; a trainer its result: the loss of each epoch.

The loss is linear in the table. So its gradients do not depend on what a trainer has seen of the pushes of others, and the
table after an epoch is the same in any order of the pushes. All numbers are exact in binary.
"""

import json
import time
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed import fleet

ROWS, WIDTH, RATE, BATCH, EPOCHS, STEPS = 4, 2, 2.0**-7, 4, 2, 6
SPARSE = {
    "sparse_embedx_dim": WIDTH - 1,
    "sparse_embedx_threshold": 0,
    "sparse_optimizer": "naive",  # SGD; without these settings Paddle takes Adam
    "sparse_learning_rate": RATE,
    "sparse_initial_range": 0.0,
}


def train(executor: paddle.static.Executor) -> list[float]:
    program = paddle.static.default_main_program()
    reader = paddle.static.normalize_program(program, [ids], [rows])
    numbers, wishes = np.arange(ROWS).reshape(-1, 1), np.repeat(np.arange(1.0, 1 + ROWS), WIDTH).reshape(ROWS, WIDTH)
    total = sum(range(1, 1 + fleet.worker_num())) * STEPS * RATE * BATCH  # what an epoch adds, for each wish

    def push(factor: float) -> None:
        executor.run(program, {"ids": numbers, "wishes": np.float32(factor * wishes)}, [loss])

    def table() -> np.ndarray:
        """The first column. The others lack a part: a pserver makes them with the first push, whose gradient it drops."""
        return executor.run(reader, {"ids": numbers}, [rows])[0].reshape(ROWS, WIDTH)[:, 0]

    losses = []
    for epoch in range(1, 1 + EPOCHS):
        for _ in range(STEPS):
            push(1.0 + fleet.worker_index())
        end = time.monotonic() + 60
        while not np.array_equal(table(), epoch * total * wishes[:, 0]) and time.monotonic() < end:
            push(0.0)  # a push is sent when several others wait behind it
            time.sleep(0.1)
        losses.append(-float(table() @ wishes[:, 0]))
        fleet.barrier_worker()
    return losses


# The environment with which this process was started: importing Paddle sets variables.
given = Path("/proc/self/environ").read_text().rstrip("\0").split("\0")
print(json.dumps({"env": dict(pair.split("=", 1) for pair in given)}), flush=True)

paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [None, 1], "int64")
wishes = paddle.static.data("wishes", [None, WIDTH], "float32")
rows = paddle.static.nn.sparse_embedding(ids, [ROWS, WIDTH], param_attr=paddle.ParamAttr(name="table"))
loss = -(rows.reshape([-1, WIDTH]) * wishes).sum()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True  # Paddle's sync mode crashes in 2.6
strategy.fleet_desc_configs = {"use_cvm": False, "table": SPARSE}
fleet.distributed_optimizer(paddle.optimizer.SGD(RATE), strategy).minimize(loss)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()  # it never returns
else:
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    print(json.dumps({"result": train(executor)}), flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()
