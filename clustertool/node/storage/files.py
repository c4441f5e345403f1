"""Files of a job are safe against hostile users: created exclusively, never through a link, only in directories of this user.

A job's directory is opened once and checked (a real directory, of this user, with our marker). Everything in it is created and
opened relative to that descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
from typing import Iterable, Iterator, List, Union

from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.paths import OURS
from clustertool.node.system import mounts, path_trust
from clustertool.node.system.node_context import step

MARKER = "marker"
_FICLONERANGE = 0x4020940D
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST = 64 << 20  # bytes of a file that are read
_PASSES = 3  # over a directory that is removed, if it is not empty after the first one
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end of the `with` block."""
    try:
        yield fd
    finally:
        os.close(fd)


def resolve(root: str) -> str:
    """Return conf.py's ROOT_DIR with ~ replaced; below a sticky directory of root (/tmp) the folder named by the uid.

    For root itself nothing is added.
    """
    path = os.path.normpath(os.path.expanduser(root))
    if os.path.isdir(path):
        info = os.stat(path)
        if info.st_uid == 0 and info.st_mode & stat.S_ISVTX and os.getuid() != 0:
            return os.path.join(path, str(os.getuid()))
    return path


def make_root(path: str) -> None:
    """Create ROOT_DIR (0700) with the tool's folder and marker in it, and folders above it with the default mode, if missing.

    Raises PreflightError if ROOT_DIR cannot be made, or other users could replace it, and OSError if the rest cannot be
    written.
    """
    _require_safe(path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        what = f"ROOT_DIR {path} cannot be made: {error.strerror}"
        raise PreflightError(what, "choose a ROOT_DIR you can write to") from None
    _require_safe(path)
    make_dir(path, OURS)
    mark(os.path.join(path, OURS))


def _require_safe(path: str) -> None:
    """Raise PreflightError if another user could replace ROOT_DIR."""
    wrong = path_trust.unsafe(path)
    if wrong:
        raise PreflightError(f"ROOT_DIR: {wrong.what}", wrong.fix)


def is_own_dir(path: str) -> bool:
    """Check whether a path is a directory of this user, and no link. Raises OSError."""
    info = os.lstat(path)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def make_dir(parent: str, *names: str) -> str:
    """Create the folders parent/names... that are missing (0700), and return the path of the last one.

    Raises PreflightError if one of them is a link or no directory of this user (in a pod it may belong to root), and OSError if
    one cannot be made.
    """
    path = parent
    for name in names:
        path = os.path.join(path, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not (is_own_dir(path) or path_trust.is_of_pod(path)):
            fix = "another user put it there: choose another ROOT_DIR"
            raise PreflightError(f"{path} is not a directory of yours", fix)
    return path


def make_job_dir(path: str) -> int:
    """Create a job's directory with the marker, and the folder above it if missing, and return the directory's descriptor.

    Raises UsageError if it exists, PreflightError if it cannot be created; then nothing of it is left.
    """
    make_dir(os.path.dirname(os.path.dirname(path)), os.path.basename(os.path.dirname(path)))
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        fix = "take another --job-id, or remove that folder"
        raise UsageError(f"{path} is there already", fix) from None
    except OSError as error:
        raise PreflightError(f"{path} cannot be made: {error.strerror}", "make room or rights in ROOT_DIR") from None
    fd = os.open(path, _DIR)
    try:
        os.mkdir(OURS, 0o700, dir_fd=fd)
        mark(os.path.join(path_of(fd), OURS))
    except OSError as error:
        os.close(fd)
        for folder in (os.path.join(path, OURS), path):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise PreflightError(f"{path} cannot be filled: {error.strerror}", "make room in ROOT_DIR") from None
    return fd


def path_of(directory: int) -> str:
    """Return a path to an open directory that is valid while it is open, also if a folder above it is renamed or replaced."""
    return f"/proc/self/fd/{directory}"


def mark(ours: str) -> None:
    """Create the tool's marker in its folder if it is missing: `clean` requires it before it removes anything."""
    with contextlib.suppress(FileExistsError):
        os.close(make_new(os.path.join(ours, MARKER)))


def mark_again(job_dir: str) -> None:
    """Create the marker in a job's directory again, if this user owns the directory; never follow a link; ignore errors."""
    with contextlib.suppress(OSError), closing(os.open(job_dir, _DIR)) as fd:
        if os.fstat(fd).st_uid == os.getuid():
            create(fd, f"{OURS}/{MARKER}")


def exists(path: str) -> bool:
    """Check whether anything is at a path, also a broken link. Raises OSError if this cannot be known."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_ours(path: str) -> bool:
    """Check whether a path is a job's directory: no link, of this user, with the tool's marker."""
    with contextlib.suppress(NotFound):
        os.close(open_job_dir(path))
        return True
    return False


def open_job_dir(path: str) -> int:
    """Open a job's directory: no link, of this user, with the tool's marker; return its descriptor. Else raise NotFound."""
    wrong = NotFound(f"{path} is no job directory of yours", f"{PROGRAM} jobs lists the jobs")
    try:
        fd = os.open(path, _DIR)
    except OSError:
        raise wrong from None
    try:
        marker = os.lstat(f"{OURS}/{MARKER}", dir_fd=fd)
        good = stat.S_ISREG(marker.st_mode) and {marker.st_uid, os.fstat(fd).st_uid} == {os.getuid()}
    except OSError:
        good = False
    if not good:
        os.close(fd)
        raise wrong
    return fd


@contextlib.contextmanager
def _open_parent(directory: int, name: str, make: bool) -> Iterator[int]:
    """Yield a descriptor of the folder that contains `name` (a relative path), opened without following any link.

    Closes it at the end of the `with` block. make: create missing folders.
    """
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
    """Create a file below `directory`, 0600, with the folders that are missing, and write `data`.

    Raises OSError if it exists; with exclusive=False it is replaced.
    """
    with _open_parent(directory, name, make=True) as parent:
        last = name.split("/")[-1]
        if not exclusive:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=parent)
        with closing(os.open(last, _NEW, 0o600, dir_fd=parent)) as fd:
            write_all(fd, data)


def remove(directory: int, name: str) -> None:
    """Remove a file or link below `directory`, if it is there. Raises OSError for a folder."""
    with contextlib.suppress(FileNotFoundError), _open_parent(directory, name, make=False) as parent:
        os.unlink(name.split("/")[-1], dir_fd=parent)


def open_append(directory: int, name: str, make: bool = True) -> int:
    """Open a file below `directory` for appending. make: create it, and its folder, if missing; otherwise OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    with _open_parent(directory, name, make) as parent:
        return os.open(name.split("/")[-1], flags, 0o600, dir_fd=parent)


def open_new(directory: int, name: str) -> int:
    """Create a file below `directory`, 0600, with the folders that are missing, and open it for reading and writing.

    Raises OSError if there is anything of this name.
    """
    with _open_parent(directory, name, make=True) as parent:
        return os.open(name.split("/")[-1], _NEW & ~os.O_WRONLY | os.O_RDWR, 0o600, dir_fd=parent)


def open_read(directory: int, name: str) -> int:
    """Open a regular file below `directory` for reading. Raises OSError if it is missing, a link, or no regular file."""
    with _open_parent(directory, name, make=False) as parent:
        return _require_regular(os.open(name.split("/")[-1], _READ, dir_fd=parent), name)


def open_file(path: str) -> int:
    """Open a regular file by its path for reading. Raises OSError for anything else.

    A fifo or a device in the place of a file must not make the reader wait.
    """
    return _require_regular(os.open(path, _READ), path)


def _require_regular(fd: int, name: str) -> int:
    """Return the descriptor of a regular file; close another one, and raise OSError."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", name)
    return fd


def read_file(path: str) -> bytes:
    """Read a whole regular file by its path. Raises OSError, also for a link or another kind of file."""
    with open(open_file(path), "rb") as file:
        return file.read()


def read(directory: int, name: str) -> bytes:
    """Read a regular file below `directory`, 64 MiB at most. Raises OSError."""
    with open(open_read(directory, name), "rb") as file:
        return file.read(_MOST)


def make_new(path: str) -> int:
    """Create a file, 0600, and open it for writing. Raises OSError if there is anything at the path, a link too."""
    return os.open(path, _NEW, 0o600)


def write_all(fd: int, data: Union[bytes, memoryview]) -> None:
    """Write all the data to a descriptor, and count a step for each part. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
        step()


def sync(fd: int) -> None:
    """Write what the system still has in memory of a file, or of a folder's names, to the disk. Raises OSError.

    Ignores EINVAL: some file systems (FUSE) cannot do this for a folder, and keep names in their own way.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def sync_dir(path: str) -> None:
    """Write the names in a folder to the disk: a rename or a new file survives a crash from here on. Raises OSError."""
    with closing(os.open(path, _DIR)) as fd:
        sync(fd)


def replace(path: str, data: bytes, durable: bool, mode: int = 0o600) -> None:
    """Write a file as *.part and rename it to `path`, so that it is whole or absent. durable: it survives a crash.

    Raises OSError, after it has removed the *.part.
    """
    part = f"{path}.{os.urandom(4).hex()}.part"
    try:
        with closing(make_new(part)) as fd:
            os.fchmod(fd, mode)
            write_all(fd, data)
            if durable:
                sync(fd)
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def share(source: int, file: int, at: int) -> bool:
    """Clone all blocks of `source` into `file`, from the offset `at` on; return False if the file system cannot do this."""
    try:
        fcntl.ioctl(file, _FICLONERANGE, struct.pack("qQQQ", source, 0, 0, at))
    except OSError:
        return False
    return True


class Journal:
    """An append-only file of lines, with its descriptor. A full disk never stops the writer: lines wait in memory, bounded."""

    _MOST = 10_000
    _BATCH = 500

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: List[bytes] = []
        # An earlier writer may have died in the middle of a line.
        self._torn = os.fstat(fd).st_size > 0

    def write(self, *values: object) -> None:
        """Append each value as a line of JSON, as lines() does."""
        self.lines([json.dumps(value, separators=(",", ":")).encode() for value in values])

    def lines(self, lines: Iterable[bytes]) -> None:
        """Queue lines, and write as many as the disk takes now. Of more than 10,000 queued lines the last ones are dropped."""
        self._waiting += (line + b"\n" for line in lines)
        del self._waiting[self._MOST :]
        self.flush()

    def flush(self) -> None:
        """Write the queued lines, until the disk takes no more. After a torn line, begin with a newline."""
        while self._waiting:
            data = b"\n" * self._torn + b"".join(self._waiting[: self._BATCH])
            try:
                done = os.write(self._fd, data)
            except OSError:
                return
            del self._waiting[: data.count(b"\n", 0, done) - self._torn]
            self._torn = data[done - 1 : done] != b"\n"
            if done < len(data):
                return

    def close(self, durable: bool = False) -> None:
        """Write the queued lines, and close the file. durable: wait until they are on the disk and survive a crash."""
        self.flush()
        if durable:
            with contextlib.suppress(OSError):  # a disk that fails keeps no line, whatever we do
                sync(self._fd)
        os.close(self._fd)


def remove_tree(path: str) -> int:
    """Remove a directory with a marker, of this user, without following links; return the bytes freed.

    Raises NotFound for another directory, PreflightError if something is mounted at it or in it, or it cannot be removed.
    """
    try:
        with closing(open_job_dir(path)) as fd:
            mounts.require_none(path)
            freed = _remove_content(fd, path, os.fstat(fd).st_dev)
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)
    except OSError as error:
        raise PreflightError(f"{path} cannot be removed: {error.strerror}", "does something still use it?") from None
    return freed


def _remove_content(fd: int, path: str, device: int) -> int:
    """Remove what is in a directory, the tool's own folder last, and return the bytes freed. path: for messages.

    device: that of its file system. Raises PreflightError for a folder of another file system, OSError.
    """
    freed = 0
    for _ in range(_PASSES):  # what ends at this moment may still have written a file
        with os.scandir(fd) as entries:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        if not names:
            break
        # The tool's own folder is the last, or `jobs` makes it again.
        for name, is_dir in sorted(names.items(), key=lambda item: item[0] in (OURS, MARKER)):
            with contextlib.suppress(FileNotFoundError):  # two may remove at the same time
                freed += _remove_dir(name, fd, os.path.join(path, name), device) if is_dir else _remove_file(name, fd)
    return freed


def _remove_file(name: str, parent: int) -> int:
    """Remove a file, and return its size in bytes."""
    step()
    size = os.lstat(name, dir_fd=parent).st_size
    os.unlink(name, dir_fd=parent)
    return size


def _remove_dir(name: str, parent: int, path: str, device: int) -> int:
    """Remove a folder with what is in it, also one that its owner may not enter or change; return the bytes freed.

    Raises PreflightError, before anything is changed, for a folder of another file system: it was mounted a moment ago.
    """
    step()
    _require_device(os.lstat(name, dir_fd=parent), path, device)
    try:
        fd = os.open(name, _DIR, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        fd = os.open(name, _DIR, dir_fd=parent)
    with closing(fd):
        _require_device(os.fstat(fd), path, device)  # to open it may have mounted it (autofs)
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o700)
        freed = _remove_content(fd, path, device)
    os.rmdir(name, dir_fd=parent)
    return freed


def _require_device(info: os.stat_result, path: str, device: int) -> None:
    """Raise PreflightError if a folder is on another file system than `device`."""
    if info.st_dev != device:
        raise mounts.mounted_error(os.path.dirname(path), path)
