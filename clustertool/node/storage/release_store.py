"""The store of a node has pieces by their SHA-256, and releases, each a manifest that appears by one rename.

ROOT_DIR/.clustertool/pieces/<sha256> and ROOT_DIR/.clustertool/releases/<release>. A piece has its name only after its
bytes matched it. A release exists only when all its pieces do. So an interrupted dispatch continues where it stopped,
and releases share common pieces. A job gets copies, so its writes never reach the store.

After a crash of the machine a release is complete or absent: its pieces, and the names in their folder, are written to the disk
before its manifest, and the manifest before its name. Damaged files are removed, and a dispatch sends them again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import time
from typing import Any, Callable, Container, Dict, Iterable, Iterator, List, Optional, Sequence, Set

from clustertool.errors import DispatchError
from clustertool.model import paths
from clustertool.model.dispatch import manifest
from clustertool.node.storage import files
from clustertool.node.storage.piece_writer import Part
from clustertool.node.system import mounts
from clustertool.node.system.work_counter import step

_KEEP = 4  # releases, the newest included
_STALE = 3600.0  # seconds after which an incomplete file has no writer any more


class Store:
    """Created on first use. Raises PreflightError if ROOT_DIR is not this user's."""

    def __init__(self, root: str) -> None:
        files.make_root(root)
        self.releases = files.make_dir(root, paths.OURS, "releases")
        self.top = files.make_dir(root, paths.OURS, "pieces")

    def missing(self, wanted: Dict[str, int]) -> List[str]:
        """Names of {name: size} that are not here, or not whole: a power cut may leave a file without its bytes."""
        here = self._files(wanted)
        return [name for name, size in wanted.items() if name not in here or here[name].st_size != size]

    def volatile(self, wanted: Container[str]) -> Set[str]:
        """Those pieces which a crash of the machine may still take: new ones that no release names. Raises OSError.

        They come from a dispatch that was interrupted.
        """
        now = time.time()
        young = {name for name, info in self._files(wanted).items() if now - info.st_mtime < _STALE}
        try:
            return young - self._needed(_by_age(self.releases)) if young else young
        except OSError:
            return young  # one too many does no harm

    def _files(self, wanted: Container[str]) -> Dict[str, os.stat_result]:
        with os.scandir(self.top) as entries:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in entries if entry.name in wanted}

    @property
    def empty(self) -> bool:
        with os.scandir(self.top) as entries:
            return next(entries, None) is None

    def add(self, name: str, data: bytes) -> bool:
        """A piece that came as a whole. False: it does not match its name. Raises OSError."""
        part = Part(self.top, name, len(data))
        part.write(memoryview(data))
        return part.keep()

    def open(self, name: str) -> int:
        return os.open(os.path.join(self.top, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, name: str) -> bytes:
        with open(self.open(name), "rb") as file:
            return file.read()

    def has(self, release: str) -> bool:
        return os.path.isfile(os.path.join(self.releases, release))

    def manifest(self, release: str) -> bytes:
        """Raises OSError."""
        with open(os.path.join(self.releases, release), "rb") as file:
            return file.read()

    def sync(self, name: str) -> None:
        """Write a piece to the disk. Raises OSError, also for what the disk refused earlier."""
        fd = self.open(name)
        try:
            files.sync(fd)
        finally:
            os.close(fd)

    def complete(self, release: str, manifest: bytes) -> None:
        """All pieces are here, and sync() has written those that came: the release is, too, also after a crash.

        Raises OSError.
        """
        files.sync_dir(self.top)
        part = os.path.join(self.releases, f"{release}.{os.urandom(4).hex()}.part")
        try:
            _write(part, manifest)
            os.rename(part, os.path.join(self.releases, release))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        files.sync_dir(self.releases)

    def forget(self, release: str, *pieces: str) -> None:
        """Remove a release that is damaged, and these pieces of it: the next dispatch sends them again."""
        for path in (os.path.join(self.releases, release), *(os.path.join(self.top, name) for name in pieces)):
            with contextlib.suppress(OSError):
                os.unlink(path)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """As long as this lasts nothing is pruned."""
        with _lock(self.releases, fcntl.LOCK_SH):
            yield

    def prune(self, keep: int = _KEEP) -> None:
        """Remove old releases, pieces that only they had, and incomplete files of killed processes.

        A job has its own copy, so none is ever in use. Where the file system has no locks, other dispatches may be running:
        then young pieces stay.
        """
        names = _by_age(self.releases)
        with contextlib.suppress(OSError), _lock(self.releases, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            for name in names[:-keep]:
                remove(os.path.join(self.releases, name))
            needed = self._needed(names[-keep:]) if len(names) > keep else None
            for path in self._unwanted(needed, 0.0 if locked else _STALE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                step()

    def _unwanted(self, needed: Optional[Set[str]], age: float) -> Iterator[str]:
        """Paths of incomplete pieces without a writer, and of pieces of at least that age that are not `needed` (None:
        all are)."""
        with os.scandir(self.top) as entries:
            for entry in entries:
                part = entry.name.endswith(".part")
                if not part and (needed is None or entry.name in needed):
                    continue
                if time.time() - entry.stat().st_mtime >= (_STALE if part else age):
                    yield entry.path

    def _needed(self, releases: Sequence[str]) -> Set[str]:
        """The pieces of releases. One whose manifest is damaged is removed. Raises OSError."""
        found: Set[str] = set()
        for release in releases:
            try:
                found.update(piece.name for piece in manifest.pieces(manifest.read_rows(self.manifest(release))))
            except (ValueError, LookupError, TypeError):
                self.forget(release)
        return found


def no_room(error: OSError) -> str:
    """The fix for a store that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "make room (inv clean --older-than 7d), or choose another ROOT_DIR" if full else "choose another ROOT_DIR"


def damaged(release: str) -> DispatchError:
    what = f"release {release} is damaged"
    return DispatchError(what, "run it again: what is missing is sent again")


def _by_age(top: str) -> List[str]:
    """Releases (and directories of an older version of the tool), the oldest first."""
    found = [(os.stat(os.path.join(top, name)).st_mtime, name) for name in os.listdir(top) if name != "lock"]
    return [name for age, name in sorted(found) if not name.endswith(".part") or time.time() - age > _STALE]


def remove(path: str) -> None:
    """Remove a file or a folder; not one in which something is mounted."""
    if os.path.isdir(path) and not os.path.islink(path):
        if not mounts.below(path):
            shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def _write(path: str, data: bytes) -> None:
    fd = files.make_new(path)
    try:
        files.write_all(fd, data)
        files.sync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _lock(folder: str, how: int) -> Iterator[bool]:
    """flock, also of the lock's own file on a shared file system. False where there are none. Raises BlockingIOError."""
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, how)
            locked = True
        except BlockingIOError:
            raise
        except OSError:  # as NFS without its lock service
            locked = False
        yield locked
    finally:
        os.close(fd)


# -- a job's own copy ---------------------------------------------------------------------------------------------------

_FICLONERANGE = 0x4020940D


def unpack(store: Store, release: str, target: str) -> None:
    """Make a release's files below `target`. Raises DispatchError for a release that is damaged (and forgets it)."""
    with store.used():
        try:
            found = manifest.read_rows(store.manifest(release))
            os.utime(os.path.join(store.releases, release))
            sizes = {piece.name: piece.size for piece in manifest.pieces(found)}
        except (OSError, ValueError, LookupError, TypeError):
            store.forget(release)
            raise damaged(release) from None
        if store.missing(sizes):
            store.forget(release)
            raise damaged(release)
        try:
            _Unpack(store, target).rows(found)
        except _WrongPiece as error:
            store.forget(release, str(error))
            raise damaged(release) from None


class _WrongPiece(Exception):
    """A piece whose bytes do not match its name, which is the message."""


class _Unpack:
    """Rows of a manifest become files, in the order of the rows; directories get their modes last."""

    def __init__(self, store: Store, target: str) -> None:
        self._store = store
        self._target = target
        self._pack = b""
        self._file = -1
        self._at = 0
        self._done: Any = None  # mode and times of the file that is being filled

    def rows(self, found: Iterable[Sequence[Any]]) -> None:
        folders = [row for row in found if row[0] == "d"]
        for _, path, _, _ in folders:
            os.makedirs(self._path(path), mode=0o700, exist_ok=True)
            step()
        do: Dict[str, Callable[..., None]] = {
            "p": self._open_pack,
            "s": self._small,
            "f": self._open_file,
            "c": self._chunk,
        }
        do["l"] = self._link
        try:
            for row in found:
                if row[0] != "c":
                    self._close()
                if row[0] != "d":
                    do[row[0]](*row[1:])
                    step()
        finally:
            self._close()
        for _, path, mode, mtime in sorted(folders, key=lambda row: str(row[1]), reverse=True):
            os.chmod(self._path(path), mode)
            os.utime(self._path(path), ns=(mtime, mtime))
            step()

    def _path(self, path: str) -> str:
        return within(self._target, path)

    def _open_pack(self, name: str, size: int, group: str) -> None:
        self._pack = self._store.read(name) if name else b""
        if name and manifest.name_of(self._pack) != name:
            raise _WrongPiece(name)

    def _small(self, path: str, mode: int, mtime: int, offset: int, size: int) -> None:
        self._open(path, mode, mtime)
        files.write_all(self._file, self._pack[offset : offset + size])

    def _open_file(self, path: str, mode: int, mtime: int, size: int, group: str) -> None:
        self._open(path, mode, mtime)

    def _open(self, path: str, mode: int, mtime: int) -> None:
        self._file = files.make_new(self._path(path))
        self._at, self._done = 0, (mode, mtime)

    def _chunk(self, name: str, size: int) -> None:
        """Blocks are shared where the file system can."""
        piece = self._store.open(name)
        try:
            if not _share(piece, self._file, self._at):
                while files.copy_some(piece, self._file):
                    pass
            self._at += size
            os.lseek(self._file, self._at, os.SEEK_SET)
        finally:
            os.close(piece)

    def _link(self, path: str, target: str) -> None:
        os.symlink(target, self._path(path))

    def _close(self) -> None:
        if self._file < 0:
            return
        mode, mtime = self._done
        try:
            os.utime(self._file, ns=(mtime, mtime))
            os.fchmod(self._file, mode)
        finally:
            os.close(self._file)
            self._file = -1


def within(folder: str, path: str) -> str:
    """The path of a file that a manifest names. Raises DispatchError for one outside of `folder`."""
    if path.startswith("/") or ".." in path.split("/"):
        raise DispatchError(f"the manifest names {path!r}, which lies outside of the workspace")
    return f"{folder}/{path}"


def _share(piece: int, file: int, at: int) -> bool:
    """Let a file have all of a piece's blocks as its own from `at` on; False where the file system can't."""
    try:
        fcntl.ioctl(file, _FICLONERANGE, struct.pack("qQQQ", piece, 0, 0, at))
    except OSError:
        return False
    return True
