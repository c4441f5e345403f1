"""Variables of each kind of devices decide which devices a process sees. This module knows what their values name."""

from __future__ import annotations

import itertools
from typing import Dict, List, Mapping, Sequence

# kind -> (the kind's own variable for physical ids, Paddle's flag for ids relative to the visible ones)
VARIABLES = {
    "gpu": ("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"),
    "dcu": ("HIP_VISIBLE_DEVICES", "FLAGS_selected_gpus"),
    "xpu": ("XPU_VISIBLE_DEVICES", "FLAGS_selected_xpus"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "FLAGS_selected_npus"),
}
_BELOW_HIP = "ROCR_VISIBLE_DEVICES"  # HIP numbers the devices that this one shows
_NO_DEVICES = ("NoDevFiles",)  # what Slurm sets for a task without devices
_MIG = "MIG-"


def shown(text: str) -> List[str]:
    """Split the value of a variable into names: numbers, UUIDs, MIG instances. A negative one hides itself and all after it."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    return list(itertools.takewhile(lambda item: not item.startswith("-") and item not in _NO_DEVICES, items))


def allocated(kind: str, environ: Mapping[str, str]) -> List[str]:
    """List the devices that an engine has allocated, as their kind's variable names them.

    Without the variable there are none.
    """
    if kind not in VARIABLES:
        return []
    names = shown(environ.get(VARIABLES[kind][0], ""))
    if kind == "dcu" and not names:
        return list(map(str, range(len(shown(environ.get(_BELOW_HIP, ""))))))
    return names


def numbers(names: Sequence[str]) -> Dict[int, int]:
    """Map the numbers of devices on their node to their positions, for the names that are numbers."""
    return {int(name): at for at, name in enumerate(names) if name.isdecimal()}


def one_each(names: Sequence[str]) -> bool:
    """Check whether a process can use only the first device that it sees: CUDA shows a process one MIG instance."""
    return any(name.startswith(_MIG) for name in names)
