"""Processes of this machine, found by /proc or by ps and identified by their start time. A zombie does not live."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def freeze(pid: int, start: str) -> dict[int, str]:
    """Stop a process and all its descendants, level by level until there is no new one; pid -> start time."""
    tree = {pid: start}
    new = tree
    while new:
        for child, since in new.items():
            send_signal(child, since, signal.SIGSTOP)
        new = {
            child: since
            for child, (parent, since) in find_all().items()
            if parent in tree and child not in tree and child != os.getpid()  # we may sit in a session of a node
        }
        tree = {**tree, **new}
    return tree


def send_signal(pid: int, start: str, number: signal.Signals) -> None:
    """Signal that process and no other one that has got its pid."""
    if lives(pid, start):
        # Ended meanwhile, or not of this user (a sudo in a session): the wait that follows distinguishes them.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def lives(pid: int, start: str) -> bool:
    """Whether the process that started then is still there."""
    process = find(pid)
    return process is not None and process[1] == start


def find(pid: int) -> tuple[int, str] | None:
    """(parent, start time) of a living process."""
    if not Path("/proc/self/stat").exists():
        return _ps("-p", str(pid)).get(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain any character
    return None if fields[0] in "ZX" else (int(fields[1]), fields[19])


def find_all() -> dict[int, tuple[int, str]]:
    """(parent, start time) of each living process."""
    if not Path("/proc/self/stat").exists():
        return _ps("-A")
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid: found for pid in pids if (found := find(pid))}


def _ps(*which: str) -> dict[int, tuple[int, str]]:
    """The same without /proc (macOS)."""
    argv = ["ps", "-o", "pid=,ppid=,stat=,lstart=", *which]
    output = subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace").stdout
    rows = [line.split(None, 3) for line in output.splitlines()]
    return {int(pid): (int(parent), start) for pid, parent, state, start in rows if not state.startswith("Z")}


def argv(pid: int) -> str:
    """The command line, "" if there is no such process."""
    if not Path("/proc/self/stat").exists():
        argv = ["ps", "-o", "command=", "-p", str(pid)]
        return subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace").stdout
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace", encoding="utf-8").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def boot_id() -> str:
    """An id that this start of the machine has alone."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    return subprocess.run(
        ["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, encoding="ascii"
    ).stdout.strip()
