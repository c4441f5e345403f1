"""A job's devices are locked by a file on the node that its supervisor and its guard keep open. The lock ends with them.

Each part of a job on a node has its own file in /tmp, which all users may read and only its owner may change. It counts while
its flock exists: dead owners, reboots and old files need no clean-up, and other users' locks are visible without access to
their processes. A job takes devices under one lock of the machine, for milliseconds.

Another user can pretend to use devices, as he could use them. He cannot take, hide or forge a lock of another user. He also
cannot stop other users with the lock of the machine: after 2 s they continue without it. For this case a job creates its own
file first and reads the other files then: of two jobs that do so at the same time, at least one sees the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from clustertool.errors import DeviceInUse, PreflightError
from clustertool.model.cards import IN_USE_FIX, holder, in_use
from clustertool.model.job import formats
from clustertool.node.devices import detect
from clustertool.node.storage import files
from clustertool.node.system import users
from clustertool.node.system.file_lock import lock_within, try_lock

_TMP = "/tmp"
_PREFIX = "clustertool-devices-"
_MACHINE = "clustertool-devices.lock"
_PATIENCE = 2.0  # seconds for others that are taking devices at this moment
_AGAIN = 3  # times that a job tries again which met another one while none had the lock of the machine
_APART = 0.3  # seconds between two of these tries, at most
_MOST = 1 << 16  # bytes of a file that are read
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


# The lock of a job, of the user who owns the file, on these cards.
Lock = NamedTuple("Lock", [("job", str), ("user", str), ("uid", int), ("keys", Sequence[str])])


class DeviceLock:
    """A lock of this process: it lasts as long as `fd` is open in any process."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def touch(self) -> None:
        """Renew the time of the file: what is old in /tmp is swept away on many machines."""
        with contextlib.suppress(OSError):
            os.utime(self.fd)

    def release(self) -> None:
        """Remove the file of the lock, and close its descriptor in this process."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        os.close(self.fd)


def take(kind: str, ids: Sequence[int], job: str) -> DeviceLock:
    """Lock all these devices for a job or none, and return the lock.

    Raises DeviceInUse if another job has one of them, and PreflightError if /tmp cannot be written. The same job may have a
    card on two of its nodes that are one machine. Without the lock of the machine it tries up to 4 times.
    """
    keys = detect.keys(kind, ids)
    for again in range(_AGAIN, -1, -1):
        with _machine_locked() as why:
            mine = _make({formats.KEY: formats.FORMAT, "job": job, "keys": sorted(keys.values())})
            locks = _locks(clean=not why)
            others = {key: lock for lock in locks if (lock.job, lock.uid) != (job, os.getuid()) for key in lock.keys}
            taken = {index: others[key] for index, key in keys.items() if key in others}
            if not taken:
                return mine
            mine.release()
        if not why or not again:
            break
        time.sleep(_APART * os.urandom(1)[0] / 255)  # by chance, or they would meet again
    raise DeviceInUse(in_use(kind, {index: holder(lock.job, lock.user) for index, lock in taken.items()}), IN_USE_FIX)


def locked() -> Dict[str, Dict[str, str]]:
    """Map each locked card's key to {job, user} of its lock. Nothing is written."""
    return {key: {"job": lock.job, "user": lock.user} for lock in _locks() for key in lock.keys}


def trouble() -> str:
    """Return why the lock of the machine cannot be taken, "" if it can. Its file is not made: without it the answer is ""."""
    if not os.path.lexists(os.path.join(_TMP, _MACHINE)):
        return ""
    with _machine_locked() as why:
        return why


@contextlib.contextmanager
def _machine_locked() -> Iterator[str]:
    """Lock the machine for the body, for all jobs that take devices. Any user may own the file; only its flock means anything.

    Yields "" with the lock, or why it could not be taken: another user can keep it locked, or put something else in its place.
    """
    fd, why = _lock_machine(os.path.join(_TMP, _MACHINE))
    try:
        yield why
    finally:
        if not why:
            os.close(fd)


def _lock_machine(path: str) -> Tuple[int, str]:
    """Open and lock the file of the machine, for up to 2 s; return (descriptor, ""), or (-1, why not)."""
    end, holding = time.monotonic() + _PATIENCE, ""
    while time.monotonic() < end:
        try:
            fd = _open_shared(path)
        except (FileNotFoundError, FileExistsError):  # it was removed or made a moment ago
            continue
        except OSError as error:
            return -1, f"{path} ({_maker(path)}) cannot be used: {error.strerror}"
        if try_lock(fd, fcntl.LOCK_EX) and os.fstat(fd).st_nlink:
            return fd, ""
        holding = _holder(os.fstat(fd)) or holding
        os.close(fd)
        time.sleep(0.01)
    return -1, f"{path} ({_maker(path)}) has been locked for {_PATIENCE:g} s{holding}"


def _maker(path: str) -> str:
    """Name the user who owns a file, "of user anna", or "removed"."""
    with contextlib.suppress(OSError):
        return f"of user {users.name_of(os.lstat(path).st_uid)}"
    return "removed"


def _holder(file: os.stat_result) -> str:
    """Return ` by process 12 of user anna` for the process that has a file's flock, "" if the kernel does not show it."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError, ValueError), open("/proc/locks") as locks:
        for fields in map(str.split, locks):
            if fields[1:2] == ["FLOCK"] and fields[5] == wanted:
                return f" by process {fields[4]} of user {users.name_of(os.stat(f'/proc/{fields[4]}').st_uid)}"
    return ""


def _open_shared(path: str) -> int:
    """Open the file of the machine's lock, and create it for all users if it is missing. Raises OSError."""
    if os.path.lexists(path):
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    else:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644)
        os.fchmod(fd, 0o644)  # whatever the umask is
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no file")
    return fd


def _make(content: Mapping[str, Any]) -> DeviceLock:
    """Create a lock's file with this content, readable for others only once it is locked and whole.

    Raises PreflightError if /tmp cannot be written.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        path = os.path.join(_TMP, f"{_PREFIX}{os.getuid()}-{os.urandom(8).hex()}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            lock_within(fd, fcntl.LOCK_EX, end - time.monotonic())  # a reader has it for a moment
            os.write(fd, json.dumps(content).encode())
            os.fchmod(fd, 0o644)
        except OSError as error:
            raise PreflightError(f"{path} cannot be written: {error.strerror}", "make room in /tmp") from None
        if os.fstat(fd).st_nlink or time.monotonic() > end:
            return DeviceLock(fd, path)
        os.close(fd)  # another process of this user removed it, as not locked, before it was locked


def _locks(clean: bool = False) -> List[Lock]:
    """Read the locks whose files are locked. clean: remove this user's unlocked files; only with the machine's lock."""
    found = []
    try:
        names = [name for name in os.listdir(_TMP) if name.startswith(_PREFIX)]
    except OSError:
        return []
    for name in names:
        path = os.path.join(_TMP, name)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # any user may write there
            with files.closing(os.open(path, os.O_RDONLY | _FLAGS)) as fd:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    continue
                if not try_lock(fd, fcntl.LOCK_SH):
                    content = json.loads(os.read(fd, _MOST))
                    keys = [str(key) for key in content["keys"]]
                    found.append(Lock(str(content["job"]), users.name_of(info.st_uid), info.st_uid, keys))
                elif clean and info.st_uid == os.getuid():
                    os.unlink(path)
    return found
