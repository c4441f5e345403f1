"""Files of a job are made for hostile neighbours: exclusive, never through a link, only in directories of our own.

A job's directory is opened once, checked (a real directory, ours, with our marker), and everything in it is made and
opened relative to that descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from typing import Any, Dict, Iterator, List, Optional

from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.plan.paths import OURS

MARKER = "marker"
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def root_problem(path: str) -> Optional[str]:
    """Why ROOT_DIR, which exists, is not fit: it must be this user's and closed to writers, or root's and sticky."""
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        # A home may well be a link that its administrator made; a link another user can replace is a trap.
        info = os.stat(path)
        if os.lstat(path).st_uid not in (0, os.getuid()):
            return f"{path} is a link that belongs to another user"
    if not stat.S_ISDIR(info.st_mode):
        return f"{path} is no directory"
    if info.st_uid == os.getuid():
        return None
    if info.st_uid == 0 and info.st_mode & stat.S_ISVTX:
        return None
    return f"{path} belongs to uid {info.st_uid}, not to you"


def real_root(path: str) -> str:
    """The directory that holds the jobs: ROOT_DIR, or ROOT_DIR/<user> in a sticky directory of root."""
    if os.path.isdir(path):
        info = os.stat(path)
        if info.st_uid == 0 and info.st_mode & stat.S_ISVTX and os.getuid() != 0:
            return os.path.join(path, str(os.getuid()))
    return path


def make_root(path: str) -> None:
    """Make ROOT_DIR (0700) if it is missing. Raises PreflightError when it is not ours to use."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"ROOT_DIR {path} cannot be made: {error.strerror}", "choose a ROOT_DIR you can write to") from None
    problem = root_problem(path)
    if problem:
        raise PreflightError(f"ROOT_DIR: {problem}", "choose a ROOT_DIR of your own")
    make_dir(path, OURS)
    mark(os.path.join(path, OURS))


def make_dir(parent: str, *names: str) -> str:
    """parent/names..., each level a real directory of ours, made 0700 if missing."""
    path = parent
    for name in names:
        path = os.path.join(path, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise PreflightError(f"{path} is not a directory of yours", "another user put it there: choose another ROOT_DIR")
    return path


def make_job_dir(path: str) -> int:
    """Make a job's directory by exclusive mkdir and mark it; returns its descriptor. Raises UsageError if it exists."""
    make_dir(os.path.dirname(os.path.dirname(path)), os.path.basename(os.path.dirname(path)))
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        raise UsageError(f"{path} is there already", f"take another --job-id, or inv clean --job {os.path.basename(path)[3:]}") from None
    except OSError as error:
        raise PreflightError(f"{path} cannot be made: {error.strerror}", "make room or rights in ROOT_DIR") from None
    fd = os.open(path, _DIR)
    os.mkdir(OURS, 0o700, dir_fd=fd)
    mark(os.path.join(path, OURS))
    return fd


def mark(ours: str) -> None:
    """Our marker: what `clean` looks for before it removes anything."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(os.path.join(ours, MARKER), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))


def is_ours(path: str) -> bool:
    """A directory of this user that carries our marker; no link on the last steps."""
    try:
        own = os.lstat(path)
        marker = os.lstat(os.path.join(path, OURS, MARKER))
    except OSError:
        return False
    return stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and stat.S_ISREG(marker.st_mode) and marker.st_uid == os.getuid()


def open_job_dir(path: str) -> int:
    """A descriptor of an existing job directory. Raises NotFound."""
    if not is_ours(path):
        raise NotFound(f"{path} is no job directory of yours", "inv jobs lists the jobs")
    return os.open(path, _DIR)


@contextlib.contextmanager
def _parent(directory: int, name: str, make: bool) -> Iterator[int]:
    """A descriptor of the folder that holds `name` (a relative path), reached without following any link."""
    fd = os.dup(directory)
    try:
        for part in name.split("/")[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            down = os.open(part, _DIR, dir_fd=fd)
            os.close(fd)
            fd = down
        yield fd
    finally:
        os.close(fd)


def create(directory: int, name: str, data: bytes = b"", exclusive: bool = True) -> None:
    """A new file below `directory`, 0600; with exclusive=False one that exists is replaced, link or not."""
    with _parent(directory, name, make=True) as parent:
        last = name.split("/")[-1]
        if not exclusive:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=parent)
        fd = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def open_append(directory: int, name: str) -> int:
    """A log or events file for appending, made if missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with _parent(directory, name, make=True) as parent:
        return os.open(name.split("/")[-1], flags, 0o600, dir_fd=parent)


def open_read(directory: int, name: str) -> int:
    """A regular file below `directory`; OSError where it is missing, a link, or a device."""
    with _parent(directory, name, make=False) as parent:
        fd = os.open(name.split("/")[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", name)
    return fd


def read(directory: int, name: str, limit: int = 64 << 20) -> bytes:
    fd = open_read(directory, name)
    with open(fd, "rb") as file:
        return file.read(limit)


def link(directory: int, name: str, target: str) -> None:
    """A symbolic link of ours, made anew; what is there and is no link stays."""
    with _parent(directory, name, make=True) as parent:
        last = name.split("/")[-1]
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.lstat(last, dir_fd=parent).st_mode):
                os.unlink(last, dir_fd=parent)
        with contextlib.suppress(FileExistsError):
            os.symlink(target, last, dir_fd=parent)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Journal:
    """An append-only file of JSON lines. A full disk never stops the writer: lines wait in memory, bounded."""

    _MOST = 10_000

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: List[bytes] = []
        self._torn = False

    def write(self, value: Any) -> None:
        if len(self._waiting) < self._MOST:
            self._waiting.append(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits. After a torn write the next line starts on a line of its own."""
        while self._waiting:
            data = (b"\n" if self._torn else b"") + self._waiting[0]
            try:
                done = os.write(self._fd, data)
            except OSError:
                return
            self._torn = done < len(data)
            if self._torn:
                return
            self._waiting.pop(0)

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


def remove_tree(path: str) -> int:
    """Remove a directory of ours without following links; the bytes freed. Raises NotFound if it is not ours."""
    fd = open_job_dir(path)
    try:
        freed = _empty(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)
    return freed


def _empty(fd: int) -> int:
    freed = 0
    names: Dict[str, bool] = {}
    with os.scandir(fd) as entries:
        for entry in entries:
            names[entry.name] = entry.is_dir(follow_symlinks=False)
    for name, is_dir in sorted(names.items(), key=lambda item: item[0] == OURS):  # the marker goes last
        if is_dir:
            os.chmod(name, 0o700, dir_fd=fd)
            down = os.open(name, _DIR, dir_fd=fd)
            try:
                freed += _empty(down)
            finally:
                os.close(down)
            os.rmdir(name, dir_fd=fd)
        else:
            freed += os.lstat(name, dir_fd=fd).st_size
            os.unlink(name, dir_fd=fd)
    return freed
