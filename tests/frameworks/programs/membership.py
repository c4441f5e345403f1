"""A rank that records its start and waits for an order: what a launcher gives its ranks while nodes leave and join.

membership.py FOLDER. A start is FOLDER/start-TIME-PID, a JSON object: the environment of the rank, its pid and the time in
seconds. FOLDER/order is `done`, or `PID CODE` for one rank, which then exits with this code, or `all CODE`. A rank exits
with 1 when another one of its world has ended, as ranks do whose connection breaks; not if there is an order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Mapping

WORLD = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "PADDLE_MASTER")


def world(env: Mapping[str, str]) -> list[str | None]:
    """What all ranks that run together have in common."""
    return [env.get(name) for name in WORLD]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> int:
    folder = Path(sys.argv[1])
    record = {"time": time.time(), "pid": os.getpid(), "env": dict(os.environ)}
    start = folder / f"start-{time.time_ns()}-{os.getpid()}"
    start.with_name("part-" + start.name).write_text(json.dumps(record))
    start.with_name("part-" + start.name).rename(start)
    while True:
        order = (folder / "order").read_text().split() if (folder / "order").exists() else []
        if order == ["done"]:
            return 0
        if order and order[0] in (str(os.getpid()), "all"):
            return int(order[1])
        found = [json.loads(path.read_text()) for path in folder.glob("start-*")]
        peers = {its["pid"] for its in found if world(its["env"]) == world(os.environ)}
        if not all(map(runs, peers)) and not (folder / "order").exists():
            return 1
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
