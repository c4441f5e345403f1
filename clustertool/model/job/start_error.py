"""The exit code and the reason of a process whose program cannot be started. It is apart from outcome.py, which a probe does
not need."""

from __future__ import annotations

from typing import Tuple

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as a shell has them


def not_started(error: OSError, program: str) -> Tuple[int, str]:
    """`program`: what the process was to run."""
    what = error.filename if error.filename is not None else program
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return code, f"cannot start {what!r}: {error.strerror}"
