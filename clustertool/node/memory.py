"""Out-of-memory kills are told by the kernel's counters: one that grew while a rank was killed is evidence, nothing else is."""

from __future__ import annotations

import contextlib
from typing import Dict, List


def oom_kills(pid: int) -> Dict[str, int]:
    """Counter file -> kills so far: the cgroups of a process (v2, v1), and the whole machine's /proc/vmstat."""
    found: Dict[str, int] = {}
    for path in [*_cgroup_files(pid), "/proc/vmstat"]:
        with contextlib.suppress(OSError, ValueError):
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        found[path] = int(line.split()[1])
    return found


def _cgroup_files(pid: int) -> List[str]:
    paths: List[str] = []
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cgroup") as file:
            for line in file:
                _, controllers, group = line.rstrip("\n").split(":", 2)
                if controllers == "":
                    paths.append(f"/sys/fs/cgroup{group}/memory.events")
                elif "memory" in controllers.split(","):
                    paths.append(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
    return paths


def grew(before: Dict[str, int], after: Dict[str, int]) -> str:
    """Which counter grew, the nearest one first; "" if none."""
    for path in before:
        if after.get(path, 0) > before[path]:
            return path
    return ""
