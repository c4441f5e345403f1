"""A stand-in for PyTorch: what `check --framework` uses of it, over real sockets. ~/fault says what goes wrong on a node."""

from __future__ import annotations

import os
import time
from pathlib import Path

__version__ = "0.1"
int64 = "int64"


def fault() -> str:
    file = Path.home() / "fault"
    return file.read_text() if file.exists() else ""


def devices() -> list[str]:
    """The ids that the node has for cuda:0, cuda:1 ..."""
    return list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))


class Tensor(float):
    """All its numbers are the same one."""

    device = "cpu"

    def __matmul__(self, other: Tensor) -> Tensor:
        kind, _, number = self.device.partition(":")
        if fault() == "device" or (kind == "cuda" and fault() == devices()[int(number)]):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it\n")
        return Tensor(64)

    def sum(self) -> float:
        return 4096 * self

    def min(self) -> float:
        return self

    def max(self) -> float:
        return self


class cuda:
    @staticmethod
    def is_available() -> bool:
        return bool(cuda.device_count())

    @staticmethod
    def device_count() -> int:
        return 0 if fault() == "blind" else len(devices())

    @staticmethod
    def set_device(device: str) -> None:
        """NCCL refuses two ranks on one device, so each must take its own."""
        own = os.environ.get("FLAGS_selected_gpus", "0")  # noqa: SIM112 - Paddle's name
        assert device == f"cuda:{own.split(',')[0]}"


class version:
    cuda = "99.9"


def ones(*shape: int, device: str) -> Tensor:
    made = Tensor(1)
    made.device = device
    return made


def full(shape: tuple[int, ...], value: float, dtype: str, device: str) -> Changing:
    return Changing(value)


class Changing:
    """What all_reduce changes."""

    def __init__(self, value: float) -> None:
        self.value = value

    def min(self) -> float:
        return self.value

    max = min


if fault() == "absent":
    raise ModuleNotFoundError("No module named 'torch'", name="torch")
if fault() == "slow":
    time.sleep(1000)
if fault() == "crash":
    print("Illegal instruction, said the stand-in", flush=True)
    os.abort()
