"""A scheduler or a user sends these signals for the ranks of a job. Processes of the tool pass them on, and survive them."""

from __future__ import annotations

import signal
from typing import Mapping

_REAL_TIME = getattr(signal, "SIGRTMIN", 1), getattr(signal, "SIGRTMAX", 0)  # a laptop with macOS has none
FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, *range(_REAL_TIME[0], _REAL_TIME[1] + 1))
_STEP_DAEMON = "slurmstepd"  # it belongs to root, and starts the first process of a task
_SLURMS_OWN = 0xFFFFFFF0  # and all steps above: the shell of salloc on a node is 4294967290, and uses no resources


def signals_all(sender: str, is_parent: bool, environ: Mapping[str, str]) -> bool:
    """Return whether the sender of a signal sends it to all processes of a scheduler's task.

    sender: the name of its process, "" where /proc hides it. is_parent: of the process that has received the signal, which has
    these variables.
    """
    return sender == _STEP_DAEMON or (not sender and is_parent and "SLURM_STEP_ID" in environ)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether a process with these variables is one of a scheduler's step, whose processes all get the same signals."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and len(step) <= 10 and int(step) < _SLURMS_OWN
