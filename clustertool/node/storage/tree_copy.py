"""This module copies a folder on its node: blocks are shared where the file system can, and no link is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import List, Sequence, Tuple, Union

from clustertool.node.storage import files
from clustertool.node.system.node_context import step

_CHUNK = 8 << 20
# The kernel, or one of the two file systems, cannot copy in one call.
_NO_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


def has_files(folder: str) -> bool:
    """Check whether a path is a folder, or a link to one, that is not empty; False if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def copy_tree(source: str, target: str) -> None:
    """Copy what is in `source` into `target`, a folder that exists: files, folders and links, with modes and times.

    Files of the same name in `target` are replaced. A link to a place inside of `source` leads to the copy. Other kinds of
    files are left out, and so is `target` inside of `source`. Nothing is done where both are the same folder: a link of the
    workspace can cause both. Raises OSError.
    """
    into = os.stat(target)
    if os.path.samestat(os.stat(source), into):
        return
    # A program may have made its links with either path.
    tops = (os.path.abspath(source), os.path.realpath(source))
    folders: List[Tuple[str, os.stat_result]] = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(os.path.join(source, below)) as entries:
            for entry in entries:
                path = os.path.join(below, entry.name)
                info = entry.stat(follow_symlinks=False)
                to = os.path.join(target, path)
                if os.path.samestat(info, into):
                    continue
                if stat.S_ISDIR(info.st_mode):
                    if os.path.islink(to):  # else files outside of `target` would be replaced
                        os.unlink(to)
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(to, 0o700)
                    folders.append((to, info))
                    waiting.append(path)
                elif stat.S_ISLNK(info.st_mode):
                    _remove_file(to)
                    os.symlink(_link_target(os.readlink(entry.path), tops, target), to)
                elif stat.S_ISREG(info.st_mode):
                    _remove_file(to)
                    _copy_file(entry.path, to, info)
                step()
    for to, info in reversed(folders):  # last: a folder may be read-only, and each new file changes its time
        _copy_attributes(to, info)


def copy_file(source: str, target: str) -> None:
    """Copy a regular file, with its mode and time, in place of what is at `target`. Raises OSError."""
    _remove_file(target)
    _copy_file(source, target, os.stat(source))


def _remove_file(path: str) -> None:
    """Remove a file or link, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _link_target(link: str, sources: Sequence[str], target: str) -> str:
    """Return the target of the copy of a link: an absolute one into the source leads to the same place in `target`.

    sources: the paths of the source.
    """
    for source in sources:
        if link == source or link.startswith(source + "/"):
            return os.path.realpath(target) + link[len(source) :]
    return link


def _copy_file(source: str, target: str, info: os.stat_result) -> None:
    """Copy a regular file to a new one, with mode and time; blocks are shared if the file system can. Raises OSError."""
    with files.closing(files.open_file(source)) as old, files.closing(files.make_new(target)) as new:
        if not files.share(old, new, 0):
            _copy_bytes(old, new)
        _copy_attributes(new, info)


def _copy_bytes(old: int, new: int) -> None:
    """Copy the bytes of an open file, in the kernel if it can. Raises OSError."""
    try:
        while os.copy_file_range(old, new, _CHUNK):
            step()
    except (AttributeError, OSError) as error:  # AttributeError: an old C library
        if isinstance(error, OSError) and error.errno not in _NO_RANGE:
            raise
    # What is left: all, or nothing.
    for data in iter(lambda: os.read(old, _CHUNK), b""):
        files.write_all(new, data)


def _copy_attributes(target: Union[str, int], info: os.stat_result) -> None:
    """Set the mode and times of a folder, or of an open file."""
    os.chmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
