"""The command line that continues a job on other nodes: the one that has started it, with two further options."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_RUN, _RESUME = "run", "--resume"


def resume_command(typed: Sequence[str], job: str, host: str) -> str:
    """Build the command that continues from the output of `job`, without `host`, of the arguments that have started it.

    What follows `run` are options. In place of this verb, clusterrun has a script, which may have options of the same names.
    """
    program, *tokens = typed
    at = tokens.index(_RUN) + 1 if _RUN in tokens and not program.endswith("clusterrun") else 0
    options = _without_resume(tokens[at:]) if at else tokens
    return shlex.join([program, *tokens[:at], f"{_RESUME}={job}", f"--skip={host}", *options])


def _without_resume(tokens: Sequence[str]) -> list[str]:
    """Remove --resume from a command line, and its value, which is no option."""
    kept: list[str] = []
    value = False  # the next word may be that of --resume
    for one in tokens:
        dropped = one == _RESUME or one.startswith(f"{_RESUME}=") or (value and not one.startswith("-"))
        value = one == _RESUME
        if not dropped:
            kept.append(one)
    return kept
