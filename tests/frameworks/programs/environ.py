"""A rank that prints the variables it was given and, with MEET, whether those of torch lead to the others. One line of JSON."""

import json
import os
import sys
from typing import Any, Dict


def meet() -> Dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.zeros(dist.get_world_size())
    ranks[dist.get_rank()] = 1
    dist.all_reduce(ranks)

    # What stands at MASTER_ADDR:MASTER_PORT is the store in which the job's ranks meet.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if dist.get_rank() == 0:
        store.set("first", str(os.getpid()))
    found = {"ranks": ranks.tolist(), "pid": str(os.getpid()), "first": store.get("first").decode()}
    dist.barrier()
    dist.destroy_process_group()
    return found


given = dict(os.environ)  # torch adds some
output = {"env": given, **(meet() if "MEET" in given else {})}
sys.stdout.write(json.dumps(output) + "\n")  # in one piece: torchrun's processes share a pipe
