"""Measure the CPU time of nodes that share this machine with the laptop's side.

A node is an sshd and all that was started through it. What outlives its session becomes a child of this process, so that its
CPU time is not lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from tests import proc_files

_PR_SET_CHILD_SUBREAPER = 36
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class NodesCpu:
    """`roots`: the pids of the sshds.

    Measure while no command of the laptop runs: other children of this process that have ended count as orphans of
    nodes, and are reaped.
    """

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = set(roots)
        self._ended = 0.0  # seconds of the orphans that have ended
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def seconds(self) -> float:
        """CPU time of all nodes since they were started, with that of processes that have ended."""
        parents, ended = {}, set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            fields = proc_files.stat(int(name))
            if fields:
                parents[int(name)] = int(fields[1])
                if fields[0] == "Z":
                    ended.add(int(name))
        own = {pid for pid, parent in parents.items() if parent == os.getpid()}
        for pid in own & ended - self._roots:
            usage = os.wait4(pid, 0)[2]
            self._ended += usage.ru_utime + usage.ru_stime
        living = self._roots | own - ended
        grown = True
        while grown:
            below = {pid for pid, parent in parents.items() if parent in living and pid not in living}
            grown = bool(below)
            living |= below
        return self._ended + sum(_used(pid) for pid in living)


def _used(pid: int) -> float:
    """Seconds of a process with those of the children it has waited for.

    The scheduler counts nanoseconds; stat counts ticks of 10 ms.
    """
    total = 0.0
    fields = proc_files.stat(pid)
    if fields:
        total = (int(fields[13]) + int(fields[14])) * _TICK
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total
