"""This module lists the files of a folder in which a job runs in place, and computes a digest of the program in it.

Nothing is sent. The digest shows that two machines have different programs. It does not cover data and results, which are large
and may differ.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from clustertool.model.paths import OURS

PROGRAM_FILES = (".py", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".ini")  # docs/without-ssh.md names them
_LEFT_OUT = {".git", "__pycache__", "log", "output", "node_modules", OURS}
_MOST = 20_000  # files and folders that are visited
_LARGEST = 1 << 20  # bytes of a file that is read


def names(top: Path) -> tuple[str, ...]:
    """List all files, relative, as far as they are no results, version control or environments of Python."""
    return tuple(_walk(top))


def digest(top: Path) -> str:
    """Hash names and content of the program files; "" where the folder has too many files to read them all at a start."""
    found = hashlib.sha256()
    for number, path in enumerate(_walk(top)):
        if number >= _MOST:
            return ""
        if path.endswith(PROGRAM_FILES):
            found.update(f"{path}\0{_content(top / path)}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _walk(top: Path) -> Iterator[str]:
    """Yield files below `top`, relative, in the order of their names; without hidden folders and virtual environments."""
    for folder, folders, names in os.walk(top):
        kept = (name for name in folders if name not in _LEFT_OUT and not name.startswith("."))
        folders[:] = sorted(name for name in kept if not os.path.exists(os.path.join(folder, name, "pyvenv.cfg")))
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), top)


def _content(path: Path) -> str:
    """Hash a file's bytes; its size where it is large, "" where it cannot be read."""
    try:
        if path.stat().st_size > _LARGEST:
            return str(path.stat().st_size)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
