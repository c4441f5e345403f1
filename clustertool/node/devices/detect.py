"""This module detects a node's cards from their device files: their kind, and the ids by which programs know them.

The ids are those of CUDA_VISIBLE_DEVICES and similar variables. NVIDIA's and ROCm's libraries number visible cards from 0,
independent of the numbers of the files (a container with only /dev/nvidia3 has card 0). Kunlun's and Ascend's ids are the
numbers of the files.
"""

from __future__ import annotations

import contextlib
import os
import sys
from threading import Thread
from typing import Callable, Dict, List, Sequence, Tuple, TypeVar

from clustertool.node.system import programs, users

T = TypeVar("T")

LIBRARY = "libnvidia-ml.so.1"
_HYGON = 0x1D94  # PCI vendor
_HYGON_HOME = "/opt/hyhal"
_WSL = "/usr/lib/wsl/lib"
_PATIENCE = 5.0  # seconds for a library that may hang
_COUNT = f"""
import ctypes
number, nvml = ctypes.c_uint(0), ctypes.CDLL({LIBRARY!r})
if nvml.nvmlInit_v2() == 0:
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    nvml.nvmlShutdown()
print(number.value)
"""


def detect_cards(dev: str = "/dev", system: str = "/sys") -> Tuple[str, List[int]]:
    """Return the kind of this node's cards and their ids, as ("gpu", [0, 1]); ("cpu", []) without cards.

    Of several kinds the first of gpu, dcu, xpu and npu.
    """
    gpus = _numbered(dev, "nvidia")
    if gpus:
        return "gpu", list(range(len(gpus)))
    if library():
        gpus = list(range(_count_by_library()))
        if gpus:
            return "gpu", gpus
    dcus = _count_dcus(dev, system)
    if dcus:
        return "dcu", list(range(dcus))
    for kind, prefix in (("xpu", "xpu"), ("npu", "davinci")):
        ids = _numbered(dev, prefix)
        if ids:
            return kind, ids
    return "cpu", []


def keys(kind: str, ids: Sequence[int], dev: str = "/dev") -> Dict[int, str]:
    """Map each id to a name of the card that is the same in all processes and containers of this machine.

    It is the name of the device file, or library and index.
    """
    files = {"gpu": "nvidia", "xpu": "xpu", "npu": "davinci"}.get(kind, kind)
    numbers = _numbered(dev, "nvidia") if kind == "gpu" else []
    if kind == "gpu" and not numbers and library():
        return {index: f"{library()}:{index}" for index in ids}
    return {index: f"{files}{numbers[index] if index < len(numbers) else index}" for index in ids}


def models(count: int, listed: str = "/proc/driver/nvidia/gpus") -> List[str]:
    """List the models of NVIDIA's cards in the order of their ids, which is that of the bus.

    [] where the driver does not list `count` cards, as in a container with some of them, or does not answer.
    """

    def read() -> List[str]:
        with contextlib.suppress(OSError):
            return [_model(os.path.join(listed, bus)) for bus in sorted(os.listdir(listed))]
        return []

    late: List[str] = []
    found = within(1.0, read, late)
    return found if len(found) == count and all(found) else []


def _model(card: str) -> str:
    """Read the model from a card's folder of the driver, "" if it is not there. Raises OSError."""
    with open(os.path.join(card, "information"), encoding="utf-8", errors="replace") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("Model:")), "")


def place() -> str:
    """Return the path of ~/.cache/clustertool, where the node keeps what laptops sent."""
    return os.path.join(users.home() or "/", ".cache", "clustertool")


def sent(kind: str) -> List[str]:
    """List the digests of the files of a kind that are kept here, from the names of their folders alone."""
    with contextlib.suppress(OSError):
        return [name[len(kind) + 1 :] for name in os.listdir(place()) if name.startswith(f"{kind}-")]
    return []


def _numbered(folder: str, prefix: str = "") -> List[int]:
    """List the numbers that follow the prefix in the names of a folder, sorted; [] if the folder cannot be read."""
    with contextlib.suppress(OSError):
        rests = [name[len(prefix) :] for name in os.listdir(folder) if name.startswith(prefix)]
        return sorted(int(rest) for rest in rests if rest.isdecimal())
    return []


def library() -> str:
    """Return the path of NVIDIA's library on LD_LIBRARY_PATH, or of Windows (WSL); "" if it is in neither.

    Such nodes have no /dev/nvidia0.
    """
    for folder in [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), _WSL]:
        path = os.path.join(folder, LIBRARY)
        if folder and os.path.exists(path):
            return path
    return ""


def _count_by_library() -> int:
    """Count cards by NVIDIA's library; 0 if it is missing, is another one of this name, or does not answer within 5 s.

    A process of its own loads the library: it may hang or crash, and most nodes have no use for it.
    """
    code, out, _ = programs.output([sys.executable, "-ESs", "-c", _COUNT], _PATIENCE)
    return int(out) if code == 0 else 0


def _count_dcus(dev: str, system: str) -> int:
    """Count the DCUs: nodes of the kernel's topology with compute units, on a machine with Hygon's driver; 0 on others."""
    if not os.path.exists(os.path.join(dev, "kfd")) and not os.path.exists(os.path.join(dev, "mkfd")):
        return 0
    top = os.path.join(system, "class/kfd/kfd/topology/nodes")
    count, hygon = 0, os.path.isdir(_HYGON_HOME)
    for number in _numbered(top):
        properties = _properties(os.path.join(top, str(number), "properties"))
        if properties.get("simd_count"):
            count += 1
            hygon = hygon or properties.get("vendor_id") == _HYGON
    return count if hygon else 0


def _properties(path: str) -> Dict[str, int]:
    """Read the lines "name number" of a file: {name: number}; {} if it cannot be read, or has another line."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return {name: int(value) for name, value in (line.split() for line in file)}
    return {}


def within(seconds: float, do: Callable[[], T], late: T) -> T:
    """Call `do` in a thread, and return its result, or `late` if it takes longer than `seconds`.

    Raises what `do` raises in this time. A driver that hangs cannot be interrupted: its thread is left, and ends with the
    agent.
    """
    answer: List[T] = []
    errors: List[Exception] = []

    def run() -> None:
        try:
            answer.append(do())
        except (OSError, AttributeError, ValueError, RuntimeError, LookupError, TypeError) as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return answer[0] if answer else late
