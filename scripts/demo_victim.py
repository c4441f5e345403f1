"""This script waits until the newest job runs and has reached a step, and prints the processes that are the second node of it.

    demo_victim.py CLUSTERTOOL STEP

These are its sshd with its sessions, and the process that takes care of the job there. Exits with 1 if the job does not
come so far.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from clustertool.node.system import processes

PATIENCE = 60.0  # seconds
NODE = 1
CONF = f"{os.environ['XDG_STATE_HOME']}/clustertool/local/run/{NODE}.conf"  # of the sshd of the embedded cluster


def status(tool: str) -> dict[str, object]:
    """Return the newest job as `status --json` has it, {} while there is none."""
    done = subprocess.run([tool, "status", "--json"], capture_output=True, text=True, check=False)
    found: dict[str, object] = json.loads(done.stdout or "{}")
    return found


def servers() -> list[int]:
    """List the sshd of the node, and what its sessions have started.

    Over an open session `run` would start the node again.
    """
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if CONF in path.read_text():
                pid = int(path.parent.name)
                found += [pid, *(one.pid for one in processes.descendants(pid))]
        except OSError:
            continue  # it has ended
    return found


def main(tool: str, step: float) -> int:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        known = status(tool)
        ranks, nodes = known.get("processes"), known.get("nodes")
        # Without "running" it would take the job of the demonstration before.
        if known.get("state") == "running" and isinstance(ranks, list) and isinstance(nodes, list):
            steps = [one["step"] for one in ranks if one["step"] is not None]
            if steps and min(steps) >= step:
                print(*servers(), next(node["supervisor"] for node in nodes if node["index"] == NODE))
                return 0
        time.sleep(0.5)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
