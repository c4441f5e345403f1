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
from typing import List

NAME, MARK, PATIENCE = sys.argv[1], sys.argv[2], float(sys.argv[3])
LARGE = 1 << 18  # numbers of 8 bytes: many packets, of the greatest size that the network claims to take
SIDE = 64
MOST = 400  # characters of an error
RULE = "Error Message Summary:"  # below it Paddle prints the error, above it the place


def tell(at: str, **more: str) -> None:
    """One write, and a line of its own, whatever is printed at the same time."""
    os.write(1, ("\n" + MARK + json.dumps(dict(more, at=at)) + "\n").encode())


def describe(error: BaseException) -> str:
    text = re.sub(r"\[[^][]*\.(cc|cpp|h):\d+\] ?", "", str(error))  # where in its sources
    lines = [line.strip(" -") for line in text.partition(RULE)[2 if RULE in text else 0].splitlines()]
    first = next((line for line in lines if line), "")
    return (type(error).__name__ + ": " + first)[:MOST]


def given(*kinds: str) -> List[str]:
    """The devices of these kinds that the job gave us, by the names that the node has for them."""
    values = [os.environ.get(kind + "_VISIBLE_DEVICES", "") for kind in kinds]
    return [f"device {number}" for number in next(filter(None, values), "").split(",") if number]


def require(right: object, what: str) -> None:
    if not right:
        raise RuntimeError(what)


def try_torch() -> None:
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = given("CUDA", "HIP")
    tell("device", version=torch.__version__, what=", ".join(wanted) or "cpu")
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "the CPU alone"
    require(cards >= len(wanted), f"torch (built for {built}) sees {cards} of {len(wanted)}")
    devices = [f"cuda:{card}" for card in range(cards)] or ["cpu"]
    for device, name in zip(devices, wanted or devices):
        tell("device", what=name)
        ones = torch.ones(SIDE, SIDE, device=device)
        found = float((ones @ ones).sum())
        require(found == SIDE**3, f"a product of matrices is {found} there, not {SIDE**3}")
    backend = "nccl" if cards else "gloo"
    tell("meet", backend=backend, nic=interface(backend))
    if cards:
        torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=importlib.import_module("datetime").timedelta(seconds=PATIENCE))
    tell("reduce")
    numbers = torch.full((LARGE,), dist.get_rank() + 1, dtype=torch.int64, device=devices[0])
    dist.all_reduce(numbers)
    compare(int(numbers.min()), int(numbers.max()), dist.get_world_size())


def try_paddle() -> None:
    paddle = importlib.import_module("paddle")
    dist = importlib.import_module("paddle.distributed")
    device = paddle.device.get_device()
    wanted = given("CUDA", "HIP", "XPU", "ASCEND_RT")
    tell("device", version=paddle.__version__, what=", ".join(wanted) or device)
    require(device != "cpu" or not wanted, f"paddle sees 0 of {len(wanted)}")
    paddle.utils.run_check()
    backend = os.environ.get("PADDLE_DISTRI_BACKEND") or {"gpu": "nccl", "xpu": "bkcl"}.get(
        device.partition(":")[0], "gloo"
    )
    tell("meet", backend=backend, nic=interface(backend))
    dist.init_parallel_env()
    tell("reduce")
    numbers = paddle.full([LARGE], dist.get_rank() + 1, dtype="int64")
    dist.all_reduce(numbers)
    compare(int(numbers.min()), int(numbers.max()), dist.get_world_size())


def interface(backend: str) -> str:
    return os.environ.get(("NCCL" if backend == "nccl" else "GLOO") + "_SOCKET_IFNAME", "")


def compare(least: int, most: int, world: int) -> None:
    """Everybody gave its number, from 1 to the world's size."""
    wanted = int(os.environ["WORLD_SIZE"])
    require(world == wanted, f"{world} ranks met, not {wanted}")
    right = wanted * (wanted + 1) // 2
    require(least == most == right, f"the sum is {least} to {most}, not {right}")


def main() -> None:
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
