"""A workspace is a folder walked once: what is sent, what is left out and why, and the digest that names it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from clustertool.errors import DataError
from clustertool.plan.manifest import Entry, digest, file_digest
from clustertool.plan.paths import OURS

IGNORE_FILE = ".clusterignore"
# Written by jobs, by tools or for this laptop only. `log` and `output` count at the top only: a package may be named so.
_ANYWHERE = {".git": "version control", "__pycache__": "compiled code", OURS: "the tool's own"}
_TOP = {"output": "results of jobs", "log": "logs of jobs"}
_SIZE_LIMIT = 200_000  # files that are counted in a folder that is left out


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not sent. `size` in bytes."""

    path: str
    why: str
    size: int


@dataclass(frozen=True)
class Workspace:
    top: Path
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = field(default=())

    @property
    def release(self) -> str:
        return digest(self.entries)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(entry.path for entry in self.entries if entry.kind == "file")

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(entry.path for entry in self.entries if entry.kind == "link")

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def read_workspace(top: Path) -> Workspace:
    """Raises DataError for a folder that is not there, or that holds what cannot be copied."""
    if not top.is_dir():
        raise DataError(f"there is no workspace {str(top)!r}", "give a folder: --workspace ./job")
    walk = _Walk(top)
    found = list(walk.tree(os.fsencode(top), ""))
    odd = [path for path, info in found if not _plain(info)]
    if odd:
        what = f"the workspace has devices, pipes or sockets: {', '.join(map(repr, odd[:5]))}"
        raise DataError(what, f"remove them or name them in {IGNORE_FILE}")
    with ThreadPoolExecutor(4) as pool:
        entries = tuple(pool.map(lambda item: _entry(top, *item), found))
    return Workspace(top, entries, tuple(walk.left_out))


def _plain(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)


def _entry(top: Path, path: str, info: os.stat_result) -> Entry:
    full = os.fsencode(top) + b"/" + os.fsencode(path)
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISLNK(info.st_mode):
        return Entry(path, "link", 0, 0, os.fsdecode(os.readlink(full)))
    if stat.S_ISDIR(info.st_mode):
        return Entry(path, "dir", mode, 0, "")
    try:
        with open(full, "rb") as file:
            return Entry(path, "file", mode, info.st_size, file_digest(file))
    except OSError as error:
        raise DataError(f"{path!r} cannot be read: {error.strerror}", f"give rights, or name it in {IGNORE_FILE}") from None


class _Walk:
    """One pass over the tree, without following links; remembers what it leaves out."""

    def __init__(self, top: Path) -> None:
        import pathspec

        self.left_out: list[LeftOut] = []
        lines: list[str] = []
        if (top / IGNORE_FILE).is_file():
            lines = (top / IGNORE_FILE).read_text(errors="surrogateescape").splitlines()
        self._spec = pathspec.GitIgnoreSpec.from_lines(lines)

    def tree(self, folder: bytes, relative: str) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = relative + os.fsdecode(entry.name)
                is_dir = entry.is_dir(follow_symlinks=False)
                why = self._reason(entry, path, is_dir, relative == "")
                if why:
                    self.left_out.append(LeftOut(path + "/" * is_dir, why, _size(entry.path, is_dir)))
                    continue
                yield path, entry.stat(follow_symlinks=False)
                if is_dir:
                    yield from self.tree(entry.path, path + "/")

    def _reason(self, entry: os.DirEntry[bytes], path: str, is_dir: bool, top: bool) -> str:
        name = os.fsdecode(entry.name)
        if name in _ANYWHERE:
            return _ANYWHERE[name]
        if (is_dir or entry.is_symlink()) and top and name in _TOP:
            return _TOP[name]
        if is_dir and os.path.exists(entry.path + b"/pyvenv.cfg"):
            return "virtual environment"
        if self._spec.match_file(path + "/" if is_dir else path):
            return IGNORE_FILE
        return ""


def _size(path: bytes, is_dir: bool) -> int:
    """Bytes below a path that is left out; an estimate once there are very many files."""
    if not is_dir:
        return os.lstat(path).st_size
    total = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            count += 1
            if count > _SIZE_LIMIT:
                return total
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
