"""What /proc shows of a process of this machine. The name of a process need not be text."""

from __future__ import annotations

from pathlib import Path

STUB = "ct-stub"  # the name of a process in whose place another one is the agent (see forked_agents.py)


def stat(pid: int) -> list[str]:
    """State, parent, ... of /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str:
    """The letter of its state; X, as of a dead one, if there is no such process."""
    return (stat(pid) or "X")[0]


def living(pid: int) -> bool:
    """Whether it is there, is no zombie, and has its memory: one that ends gives it back first, and its arguments with it."""
    fields = stat(pid)
    return bool(fields) and fields[0] not in "ZX" and fields[20] != "0"


def comm(pid: int) -> str:
    """Its name; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
