"""Out-of-memory kills are told by the kernel's counters: one that grew while a rank was killed is evidence, nothing else is."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterable, List


def counters(pid: int) -> Dict[str, int]:
    """Counter file -> kills so far: the cgroups of a process (v2, v1), and the whole machine's /proc/vmstat."""
    return read([*_cgroup_files(pid), "/proc/vmstat"])


def read(paths: Iterable[str]) -> Dict[str, int]:
    """The same for known files: a process that is dead has no cgroups any more."""
    found: Dict[str, int] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        found[path] = int(line.split()[1])
    return found


def _cgroup_files(pid: int) -> List[str]:
    paths: List[str] = []
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                _, controllers, group = line.rstrip("\n").split(":", 2)
                if controllers == "":
                    paths.append(f"/sys/fs/cgroup{group}/memory.events")
                elif "memory" in controllers.split(","):
                    paths.append(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
    return paths


def verdict(before: Dict[str, int]) -> str:
    """In words, if a counter has grown since `before`; the nearest one speaks."""
    after = read(before)
    for path, kills in before.items():
        if after.get(path, 0) > kills:
            return f"out of memory: the kernel killed it (oom_kill in {path})"
    return ""


class Watch:
    """One rank's counters as they were half a second ago and more: the kernel counts a kill before the victim is reaped."""

    def __init__(self, pid: int) -> None:
        self._before = self._now = counters(pid)

    def look(self, pid: int) -> None:
        self._before, self._now = self._now, counters(pid)

    def verdict(self) -> str:
        return verdict(self._before)
