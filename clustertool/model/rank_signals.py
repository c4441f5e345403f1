"""A scheduler or a user sends these signals for the ranks of a job. Processes of the tool pass them on, and survive them."""

from __future__ import annotations

import re
import signal
from typing import Mapping

# A laptop with macOS has none.
REAL_TIME = tuple(range(getattr(signal, "SIGRTMIN", 1), getattr(signal, "SIGRTMAX", 0) + 1))
FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, *REAL_TIME)
_STEP_DAEMON = "slurmstepd"  # it belongs to root, and starts the first process of a task
_SLURMS_OWN = 0xFFFFFFF0  # and all steps above: the shell of salloc on a node is 4294967290, and uses no resources


def signals_all(sender: str, is_parent: bool, environ: Mapping[str, str]) -> bool:
    """Return whether the sender of a signal sends it to all processes of a scheduler's task: Slurm's step daemon does.

    sender: the name of its process, "" where /proc hides it: then a parent in a step counts as the daemon. is_parent: of the
    process that has received the signal, which has these variables.
    """
    return sender == _STEP_DAEMON or (not sender and is_parent and "SLURM_STEP_ID" in environ)


def proctrack(configuration: str) -> str:
    """Read the plugin by which Slurm finds the processes of a step, such as linuxproc; "" if this slurm.conf does not name it.

    Only linuxproc signals all of them. cgroup sends no other signal than SIGKILL to a process below a task, and pgid none to
    another process group.
    """
    found = re.findall(r"^\s*ProctrackType\s*=\s*proctrack/(\w+)", configuration, re.MULTILINE | re.IGNORECASE)
    return found[-1].lower() if found else ""


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether a process with these variables is in a step of srun. Slurm's own steps (salloc's shell) do not count."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and len(step) <= 10 and int(step) < _SLURMS_OWN
