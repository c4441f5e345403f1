"""This module creates a directory of this user in /tmp. It has a random name and is found by owner and mode.

In a pod whose image has no /tmp that this user can write, it is in /dev/shm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import Iterator, List, Tuple

from clustertool.errors import PreflightError
from clustertool.node.system import path_trust
from clustertool.node.system.file_lock import lock_within

_TMP, _MEMORY = "/tmp", "/dev/shm"
_FIX = "make room in /tmp, or have it made writable"
_LEAST = 64 << 10  # bytes free in /tmp below which it counts as full
_FEW = 64 << 20  # bytes free in /tmp below which compilers and data loaders may fail
_PATIENCE = 10.0  # seconds for other processes that read or write a file
_MOST = 1 << 22  # bytes of a file
_SETTLED = 200_000_000  # ns between a rename and its entry in the directory; 20 ms were too few on a loaded machine


def _top() -> str:
    """Return /tmp, or /dev/shm in a pod in which this user cannot write to /tmp."""
    return _MEMORY if path_trust.in_pod() and not os.access(_TMP, os.W_OK | os.X_OK) else _TMP


def find() -> str:
    """Return the path of /tmp/clustertool-UID-RANDOM, a real directory of this user with mode 0700; "" if there is none.

    Of several the oldest counts. Waits until it is 0.2 s old: what is in /tmp is not listed at one instant, so a directory that
    another process has just made may be missing in a list that has a newer one. A time to come, after the clock was set back,
    is no reason to wait.
    """
    while True:
        before = time.time_ns()
        made, path = _oldest()
        if not path or before - made >= _SETTLED or made > time.time_ns():
            return path
        time.sleep(_SETTLED / 1e9)


def _oldest() -> Tuple[int, str]:
    """Find the oldest directory: when it was made (ns), and its path; (0, "") if there is none."""
    prefix = f"clustertool-{os.getuid()}-"
    found: List[Tuple[int, str]] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(_top()):
            if name.startswith(prefix):
                path = os.path.join(_top(), name)
                with contextlib.suppress(OSError):
                    info = os.lstat(path)
                    if info.st_uid == os.getuid() and info.st_mode == stat.S_IFDIR | 0o700:
                        found.append((info.st_ctime_ns, path))
    return min(found) if found else (0, "")


def make(name: str) -> str:
    """Return the path of the directory; create it, with an empty file `name` in it, if there is none.

    Raises PreflightError if it cannot be created. The directory gets its final name when it is complete. Nothing changes it
    later, so its ctime is the time of that. Two processes may create one each at the same time: both search again, and use the
    older one.
    """
    there = find()
    if there:
        return there
    number = os.urandom(8).hex()
    part, path = (os.path.join(_top(), f"clustertool-{kind}{os.getuid()}-{number}") for kind in ("new-", ""))
    try:
        os.mkdir(part, 0o700)
        os.close(os.open(os.path.join(part, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.rename(part, path)
    except OSError as error:
        _remove(part, name)
        raise unusable(error) from None
    oldest = find() or path
    if oldest != path:
        _remove(path, name)
    return oldest


def _remove(path: str, name: str) -> None:
    """Remove the file `name` in a directory, if it is there, and the directory, if it can be removed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)


@contextlib.contextmanager
def locked(name: str) -> Iterator[int]:
    """Open a file of the directory, both created if missing, lock it, and yield its descriptor; close it at the end.

    Raises PreflightError if it cannot be opened, or another process keeps it locked for 10 s.
    """
    path = os.path.join(make(name), name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(error) from None
    try:
        lock(fd, fcntl.LOCK_EX, path)
        yield fd
    finally:
        os.close(fd)


def lock(fd: int, kind: int, path: str) -> None:
    """Lock an open file, and wait up to 10 s for that. kind: as for flock().

    Raises PreflightError if another process still has the lock.
    """
    if not lock_within(fd, kind, _PATIENCE):
        what = f"{path} has been locked for {_PATIENCE:g} s by another process of yours"
        raise PreflightError(what, f"end that process: fuser {path} shows it")


def content(fd: int) -> bytes:
    """Read an open file of the directory, 4 MiB at most."""
    return os.pread(fd, _MOST, 0)


def rewrite(fd: int, data: bytes) -> None:
    """Replace the content of a locked file. Raises PreflightError if it cannot be written; then the old content is restored."""
    before = content(fd)
    try:
        if os.pwrite(fd, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        os.pwrite(fd, before, 0)
        os.ftruncate(fd, len(before))
        raise unusable(error) from None
    os.ftruncate(fd, len(data))


def unusable(error: OSError) -> PreflightError:
    """Build the error that the directory cannot be written."""
    return PreflightError(f"{_top()} cannot be written: {error.strerror}", _FIX)


def low_space() -> Tuple[str, str]:
    """Describe how little room /tmp has for programs, and the fix; empty texts if 64 MiB are free, or it cannot be examined."""
    with contextlib.suppress(OSError):
        free = _free(os.statvfs(_top()))
        if free < _FEW:
            return f"{free >> 10} KiB free in {_top()}", f"make room in {_top()}: programs fail without"
    return "", ""


def _free(about: os.statvfs_result) -> int:
    """Return the free bytes of a file system that this user can write."""
    return (about.f_bfree if os.getuid() == 0 else about.f_bavail) * about.f_frsize


def trouble() -> Tuple[str, str]:
    """Describe why nothing can be written to /tmp (read-only, full, no inodes, no right), and the fix; else empty texts.

    Writes nothing.
    """
    try:
        about = os.statvfs(_top())
    except OSError as error:
        return f"{_top()} cannot be examined: {error.strerror}", _FIX
    root = os.getuid() == 0
    if about.f_flag & os.ST_RDONLY:
        return f"{_top()} is read-only", _FIX
    if _free(about) < _LEAST:
        return f"{_top()} is full", _FIX
    if about.f_files and not (about.f_ffree if root else about.f_favail):
        return f"{_top()} has no inodes left", _FIX
    if not os.access(_top(), os.W_OK | os.X_OK):
        return f"you may not write to {_top()}", f"chmod 1777 {_top()} (as root)"
    return "", ""
