"""Read how busy a machine is, and watch its memory and disk: kills for lack of memory, and a full disk.

What the kernel does not report is 0.
"""

from __future__ import annotations

import contextlib
import os
from typing import Dict, Iterable, List, Tuple

_NO_LIMIT = 1 << 60  # bytes
_MACHINE = "/proc/vmstat"
_V2, _V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"  # the tops of the cgroups


def cpu_ticks() -> Tuple[int, int]:
    """Read (busy, all) ticks of all cores since boot; (0, 0) if they cannot be read. Waiting for a disk is not busy."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/stat", "rb") as file:
            ticks = [int(text) for text in file.readline().split()[1:9]]  # user and nice include the time of guests
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
    return 0, 0


def memory() -> Tuple[int, int]:
    """Read (all, available) bytes of the machine's memory; (0, 0) if they cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        with open("/proc/meminfo", "rb") as file:
            sizes = {line.split(b":")[0]: int(line.split()[1]) << 10 for line in file.readlines(256)}
        return sizes[b"MemTotal"], sizes[b"MemAvailable"]
    return 0, 0


def free_bytes(path: str) -> int:
    """Count the bytes free for users on the disk of a path; -1 if it cannot be examined, as a path of another machine."""
    with contextlib.suppress(OSError):
        space = os.statvfs(path)
        return int(space.f_bavail * space.f_frsize)
    return -1


def _kill_counters(pid: int) -> Dict[str, int]:
    """Map each counter file that concerns a process to its kills so far: those of its cgroups (v2, v1), and /proc/vmstat."""
    return _read_counters([*_cgroup_files(pid), _MACHINE])


def _read_counters(paths: Iterable[str]) -> Dict[str, int]:
    """Map each file to its counter oom_kill; leave out files that have none, or cannot be read.

    A dead process has no cgroups any more, so the files that were found before are read.
    """
    found: Dict[str, int] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    found[path] = int(line.split()[1])
    return found


def _cgroup_files(pid: int) -> List[str]:
    """List the files with the memory counters of a process's cgroups (v2, v1)."""
    paths: List[str] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, group = line.rstrip("\n").split(":", 2)
            if controllers == "":
                paths.append(_visible_path(_V2, group, "memory.events"))
            elif "memory" in controllers.split(","):
                paths.append(_visible_path(_V1, group, "memory.oom_control"))
    return paths


def _visible_path(top: str, group: str, name: str) -> str:
    """Return the path of a cgroup's file; at the top if the whole path does not exist.

    A container may see its own cgroup only, at the top, though /proc names the whole path.
    """
    path = f"{top}{group}/{name}"
    return path if os.path.exists(path) else f"{top}/{name}"


def _describe_limit(path: str) -> str:
    """Describe the memory limit of the cgroup that has this counter file, as ", limit N MiB"; "" if none is found."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(os.path.dirname(path), name), encoding="utf-8") as file:
                limit = int(file.read())
            return f", limit {limit >> 20} MiB" if limit < _NO_LIMIT else ""
    return ""


class OomWatch:
    """The counters of kills for lack of memory that concern a rank, as read at the last two updates.

    The kernel counts a kill before the victim is reaped. update() is called each half second: the older counters are from
    before the kill.
    """

    def __init__(self, pid: int) -> None:
        self._before = self._now = _kill_counters(pid)

    def enter_container(self, pid: int) -> None:
        """Watch the cgroups of a container's program. They are as new as the container: what they count is of this rank."""
        known, paths = self._now, [*_cgroup_files(pid), _MACHINE]
        watched = [path for path in paths if path in known or os.path.dirname(path) not in (_V2, _V1)]
        self._before = self._now = {path: known.get(path, 0) for path in watched}

    def update(self, pid: int) -> None:
        """Read the counters, and keep those of the last call to compare with."""
        self._before, self._now = self._now, _kill_counters(pid)

    def verdict(self) -> str:
        """Describe an out-of-memory kill if the counter has grown since the last update but one; else "".

        The counter is the first one that can still be read: of the cgroup of the rank (memory.events of cgroup v2,
        memory.oom_control of v1), or of the machine, since the cgroup of a container may end with it.
        """
        after = _read_counters(self._before)
        for path, kills in self._before.items():
            if after.get(path, 0) > kills:
                return f"out of memory: the kernel killed it (oom_kill in {path}{_describe_limit(path)})"
            if path in after:
                return ""
        return ""


_LITTLE = 64 << 10  # bytes; less is full
_ROOM = 256 << 10  # full until there is as much again


class DiskWatch:
    """The check whether the file system of an open directory is full. full: the result of the last update()."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self.full = False

    def update(self) -> bool:
        """Set `full` by the free bytes and inodes that this user can use, and return whether it has changed.

        Full is less than 64 KiB, and then until 256 KiB are free; or no inode. Unchanged if they cannot be read.
        """
        was = self.full
        with contextlib.suppress(OSError):
            space = os.fstatvfs(self._directory)
            root = os.geteuid() == 0  # user that may use the reserved blocks
            free = (space.f_bfree if root else space.f_bavail) * space.f_frsize
            no_files = space.f_files > 0 and not (space.f_ffree if root else space.f_favail)
            self.full = no_files or free < (_ROOM if was else _LITTLE)
        return self.full != was
