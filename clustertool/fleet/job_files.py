"""This module finds files of stored jobs by their names. Its import is fast: completion needs no more than job names."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from clustertool.fleet import this_user
from clustertool.model.paths import is_job_id

END = ".json"


def default_directory() -> Path:
    """Return the folder of this user's stored jobs. Raises ConfigError."""
    return this_user.state() / "jobs"


def job_of(path: Path) -> str:
    """Return the id of the job whose file this is."""
    return path.name[: -len(END)]


def paths(directory: Path) -> list[Path]:
    """List the files of stored jobs, in any order."""
    try:
        names = [name for name in os.listdir(directory) if name.endswith(END)]
    except OSError:
        return []
    return [directory / name for name in names if is_job_id(name[: -len(END)])]


def by_age(directory: Path) -> list[Path]:
    """List the files of stored jobs, the oldest first."""
    found: list[tuple[int, Path]] = []
    for path in paths(directory):
        with contextlib.suppress(OSError):  # another command has removed it
            found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]
