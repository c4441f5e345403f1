"""Python imports this module at its start: torch.cuda with the devices of CUDA_VISIBLE_DEVICES, whose tensors are in memory.

Device numbers are checked as CUDA does it. NCCL is replaced by gloo.
"""

import os
from collections.abc import Callable
from typing import Any


def install() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    current = [0]

    def count() -> int:
        return len([one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one])

    def number(device: Any) -> int:
        at = int(str(device).rpartition(":")[2]) if not isinstance(device, int) else device
        if not 0 <= at < count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        return at

    def set_device(device: Any) -> None:
        current[0] = number(device)

    def to(self: Any, device: Any) -> Any:
        number(device)
        return self

    plain_init, plain_ddp = dist.init_process_group, DistributedDataParallel.__init__

    def init_process_group(backend: str) -> None:
        assert backend == "nccl"
        plain_init("gloo")

    def ddp(self: Any, module: Any, device_ids: list[Any]) -> None:
        for device in device_ids:
            number(device)
        plain_ddp(self, module)

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "is_available", lambda: count() > 0),
        (torch.cuda, "device_count", count),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "current_device", lambda: current[0]),
        (torch.Tensor, "to", to),
        (torch.nn.Module, "to", to),
        (dist, "init_process_group", init_process_group),
        (DistributedDataParallel, "__init__", ddp),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)


if "RANK" in os.environ:  # a rank, and not torchrun
    install()
