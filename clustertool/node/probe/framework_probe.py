"""This program is a rank of `check --framework`: it runs under the job's own Python, tests a framework and reports each step.

It is not imported, but sent as text. argv: the framework, a mark for its reports, seconds that the framework may wait for
others. It never ends by itself, so that its end is not taken for a failure of the others. The laptop ends it.
"""

import importlib
import json
import os
import re
import sys
import time
from typing import Any, Dict, List, Tuple

NAME, MARK, PATIENCE = sys.argv[1], sys.argv[2], float(sys.argv[3])
LARGE = 1 << 18  # numbers of 8 bytes: many packets, of the greatest size that the network claims to take
SIDE = 64
MOST = 400  # characters of an error
RULE = "Error Message Summary:"  # below it Paddle prints the error, above it the place


def tell(at: str, **more: str) -> None:
    """Write the report of a step to stdout, in one write, on a line of its own whatever is printed at the same time."""
    os.write(1, ("\n" + MARK + json.dumps(dict(more, at=at)) + "\n").encode())


def describe(error: BaseException) -> str:
    """Return "Type: first line of the text" of an error, 400 characters at most, without places in the framework's sources."""
    text = re.sub(r"\[[^][]*\.(cc|cpp|h):\d+\] ?", "", str(error))  # where in its sources
    lines = [line.strip(" -") for line in text.partition(RULE)[2 if RULE in text else 0].splitlines()]
    first = next((line for line in lines if line), "")
    return (type(error).__name__ + ": " + first)[:MOST]


def first_set(*names: str) -> List[str]:
    """Return the values of the first of these variables that is not empty, split at commas; [""] if all are."""
    return next(filter(None, (os.environ.get(name, "") for name in names)), "").split(",")


def read_visible_devices(*kinds: str) -> Tuple[int, Dict[int, str]]:
    """Read from variables how many devices this rank is shown, and map the positions of its own ones to their names.

    kinds: "CUDA" and the like. The first KIND_VISIBLE_DEVICES that is set counts; without one there are 0. Its own devices
    are those of the first FLAGS_selected_* that is set, else all.
    """
    seen = [number for number in first_set(*(kind + "_VISIBLE_DEVICES" for kind in kinds)) if number]
    own = first_set("FLAGS_selected_gpus", "FLAGS_selected_xpus", "FLAGS_selected_npus")
    mine = [int(position) for position in own if position.isdigit() and int(position) < len(seen)]
    return len(seen), {position: "device " + seen[position] for position in mine or range(len(seen))}


def require(right: object, what: str) -> None:
    """Raise RuntimeError with this text if the condition is false."""
    if not right:
        raise RuntimeError(what)


def try_torch() -> None:
    """Test torch: multiply matrices on each device of this rank, meet the other ranks, and sum numbers; report each step.

    Raises RuntimeError for devices that torch does not see, or a wrong result; else the errors of torch.
    """
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shown, own = read_visible_devices("CUDA", "HIP")
    tell("device", version=torch.__version__, what=", ".join(own.values()) or "cpu")
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "the CPU alone"
    require(cards >= shown, f"torch (built for {built}) sees {cards} of {shown}")
    devices = [f"cuda:{card}" for card in own or range(cards)] or ["cpu"]
    for device, name in zip(devices, list(own.values()) or devices):
        tell("device", what=name)
        ones = torch.ones(SIDE, SIDE, device=device)
        found = float((ones @ ones).sum())
        require(found == SIDE**3, f"a product of matrices is {found} there, not {SIDE**3}")
    backend = "nccl" if cards else "gloo"
    tell("meet", backend=backend, nic=interface(backend))
    if cards:
        torch.cuda.set_device(devices[0])
    dist.init_process_group(backend, timeout=importlib.import_module("datetime").timedelta(seconds=PATIENCE))
    reduce(dist, torch.full((LARGE,), dist.get_rank() + 1, dtype=torch.int64, device=devices[0]))


def try_paddle() -> None:
    """Test paddle: run its own check of the devices, meet the other ranks, and sum numbers with them; report each step.

    Raises RuntimeError if paddle sees no device, or for a wrong count of ranks or sum; else the errors of paddle.
    """
    paddle = importlib.import_module("paddle")
    dist = importlib.import_module("paddle.distributed")
    device = paddle.device.get_device()
    shown, own = read_visible_devices("CUDA", "HIP", "XPU", "ASCEND_RT")
    tell("device", version=paddle.__version__, what=", ".join(own.values()) or device)
    require(device != "cpu" or not own, f"paddle sees 0 of {shown}")
    paddle.utils.run_check()
    usual = {"gpu": "nccl", "xpu": "bkcl"}.get(device.partition(":")[0], "gloo")
    backend = os.environ.get("PADDLE_DISTRI_BACKEND") or usual
    tell("meet", backend=backend, nic=interface(backend))
    dist.init_parallel_env()
    reduce(dist, paddle.full([LARGE], dist.get_rank() + 1, dtype="int64"))


def interface(backend: str) -> str:
    """Return the network interface that is set for this backend, "" if none is."""
    return os.environ.get(("NCCL" if backend == "nccl" else "GLOO") + "_SOCKET_IFNAME", "")


def reduce(dist: Any, numbers: Any) -> None:
    """Report this step, and sum up numbers of all ranks, each its own from 1 to the world's size.

    Raises RuntimeError for a wrong count of ranks or sum.
    """
    tell("reduce")
    dist.all_reduce(numbers)
    least, most, world = int(numbers.min()), int(numbers.max()), dist.get_world_size()
    wanted = int(os.environ["WORLD_SIZE"])
    require(world == wanted, f"{world} ranks met, not {wanted}")
    right = wanted * (wanted + 1) // 2
    require(least == most == right, f"the sum is {least} to {most}, not {right}")


def main() -> None:
    """Test the framework, report each step and the error, and then sleep until this process is ended."""
    tell("import")
    try:
        {"torch": try_torch, "paddle": try_paddle}[NAME]()
        tell("done")
    except BaseException as error:  # noqa: BLE001 - whatever a framework raises, SystemExit too, is the result of this test
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        tell("", failed=describe(error), missing=missing or "")
    while True:
        time.sleep(60)


main()
