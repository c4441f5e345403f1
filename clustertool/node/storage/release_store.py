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
import hashlib
import os
import shutil
import time
from typing import Container, ContextManager, Dict, Iterator, List, Optional, Sequence, Set

from clustertool.errors import DispatchError
from clustertool.model import paths
from clustertool.model.dispatch import manifest
from clustertool.model.hints import PROGRAM
from clustertool.model.wire.frames import Sink
from clustertool.node.storage import files, submissions
from clustertool.node.system import mounts
from clustertool.node.system.node_context import step

_KEEP = 4  # releases, the newest included
_UNUSED = 7 * 86400.0  # seconds in which a job may start ranks again
_STALE = 3600.0  # seconds after which an incomplete file has no writer any more
_CHUNK = 1 << 20


class Part(Sink):
    """An incoming piece: on disk as *.part, and under its name in `top`, the folder of pieces, once all of it matches that.

    Unless keep() or drop() is called, the *.part stays there. An error of the disk is raised when the piece is kept, since the
    sender of the bytes is not the cause.
    """

    def __init__(self, top: str, name: str, size: int) -> None:
        super().__init__(size)
        self._target = os.path.join(top, name)
        self._path = f"{self._target}.{os.urandom(4).hex()}.part"
        self._name = name
        self._fd = -1
        self._hash = hashlib.sha256()
        self._failed: Optional[OSError] = None

    def put(self, data: memoryview) -> None:
        """Hash the bytes, and write them to the *.part; after an error of the disk only hash them."""
        self._hash.update(data)
        if self._failed is None:
            try:
                if self._fd < 0:
                    self._fd = files.make_new(self._path)
                files.write_all(self._fd, data)
            except OSError as error:
                self.drop()
                self._failed = error

    def keep(self) -> bool:
        """Rename the *.part to the piece's name. Return False, and remove it, if its bytes do not match the name.

        Raises OSError, also for an earlier error of the disk.
        """
        if self._hash.hexdigest() != self._name:
            self.drop()
            return False
        if self._failed is not None:
            raise self._failed
        try:
            os.close(self._fd)
            self._fd = -1
            os.rename(self._path, self._target)
        except OSError:
            self.drop()
            raise
        return True

    def drop(self) -> None:
        """Close and remove the *.part."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class Store:
    """The pieces and releases below ROOT_DIR."""

    def __init__(self, root: str) -> None:
        """Create the store's folders below ROOT_DIR if missing. Raises PreflightError if ROOT_DIR is not this user's."""
        self._root = root
        files.make_root(root)
        self.releases = files.make_dir(root, paths.OURS, "releases")
        self.top = files.make_dir(root, paths.OURS, "pieces")
        self._pack = ("", b"")

    def missing(self, wanted: Dict[str, int]) -> List[str]:
        """List the names of `wanted`, {name: size}, that the store does not have with this size.

        A power cut may leave a file without its bytes.
        """
        here = self._stat_pieces(wanted)
        return [name for name, size in wanted.items() if name not in here or here[name].st_size != size]

    def volatile(self, wanted: Container[str]) -> Set[str]:
        """Find those of `wanted` that are younger than an hour and in no release: a crash of the machine may lose their bytes.

        They come from a dispatch that was interrupted. Raises OSError; if the releases cannot be read, all young ones count.
        """
        now = time.time()
        young = {name for name, info in self._stat_pieces(wanted).items() if now - info.st_mtime < _STALE}
        with contextlib.suppress(OSError):
            return young - self._pieces_of(_by_age(self.releases)) if young else young
        return young  # one too many does no harm

    def _stat_pieces(self, wanted: Container[str]) -> Dict[str, os.stat_result]:
        """Map those of `wanted` that are in the store to what stat() reports.

        Raises OSError.
        """
        with os.scandir(self.top) as entries:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in entries if entry.name in wanted}

    @property
    def empty(self) -> bool:
        """Whether the store has no piece."""
        with os.scandir(self.top) as entries:
            return next(entries, None) is None

    def add(self, name: str, data: bytes) -> bool:
        """Add a piece. Return False, and add nothing, if it does not match its name. Raises OSError."""
        part = Part(self.top, name, len(data))
        part.write(memoryview(data))
        return part.keep()

    def open(self, name: str) -> int:
        """Open a piece for reading, and return its descriptor. Raises OSError."""
        return os.open(os.path.join(self.top, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, name: str) -> bytes:
        """Read the bytes of a piece. Raises OSError."""
        with open(self.open(name), "rb") as file:
            return file.read()

    def read_packed(self, file: manifest.File) -> bytes:
        """Return the bytes of a file that is in a pack, and keep the pack in memory for the next file.

        Raises OSError, and WrongPiece if the pack's bytes do not match its name.
        """
        if self._pack[0] != file.pack:
            pack = self.read(file.pack)
            if manifest.name_of(pack) != file.pack:
                raise WrongPiece(file.pack)
            self._pack = (file.pack, pack)
        _, offset, size = file.parts[0]
        return self._pack[1][offset : offset + size]

    def has(self, release: str) -> bool:
        """Check whether there is a manifest of the release."""
        return os.path.isfile(os.path.join(self.releases, release))

    def manifest(self, release: str) -> bytes:
        """Read the manifest of a release. Raises OSError."""
        with open(os.path.join(self.releases, release), "rb") as file:
            return file.read()

    def sync(self, name: str) -> None:
        """Write what the system has in memory of a piece to the disk.

        Raises OSError, also for what the disk refused earlier.
        """
        with files.closing(self.open(name)) as fd:
            files.sync(fd)

    def complete(self, release: str, text: bytes) -> None:
        """Write the manifest of a release whose pieces are all here, and were written by sync(): it survives a crash.

        Raises OSError.
        """
        files.sync_dir(self.top)
        files.replace(os.path.join(self.releases, release), text, durable=True)
        files.sync_dir(self.releases)

    def forget(self, release: str, *pieces: str) -> None:
        """Remove the manifest of a damaged release, and these pieces of it: the next dispatch sends them again."""
        for path in (os.path.join(self.releases, release), *(os.path.join(self.top, name) for name in pieces)):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def used(self) -> ContextManager[bool]:
        """Lock the store against prune() during the `with` block; several processes may do so at the same time."""
        return _lock(self.releases, fcntl.LOCK_SH)

    def prune(self) -> None:
        """Remove old releases and images, then pieces that no release needs, and incomplete files older than an hour.

        If no release is old, pieces stay. The four newest releases stay, and those of queued jobs; a job that has started has
        its own copy. Of images stay those of these releases, and those that were used in the last seven days. Does nothing if
        the store is in use. Where the file system has no locks, other dispatches may be running: then pieces younger than an
        hour stay. Ignores OSError.
        """
        names = _by_age(self.releases)
        with contextlib.suppress(OSError), _lock(self.releases, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            queued = submissions.queued_releases(self._root)
            old = [name for name in names[:-_KEEP] if name not in queued]
            for name in old:
                remove(os.path.join(self.releases, name))
            needed = self._pieces_of([name for name in names if name not in old]) if old else None
            for path in self._find_unwanted(needed, 0.0 if locked else _STALE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                step()
            self._prune_images([name for name in names if name not in old])

    def _prune_images(self, kept: Container[str]) -> None:
        """Remove the folders of images that are no release in `kept` and have not been used for seven days, by their time.

        They hold .sif files, of releases or pulled (node/container/image_store.py). Incomplete ones of that age go, too.
        """
        top = os.path.join(self._root, paths.OURS, paths.IMAGES)
        for name in os.listdir(top) if os.path.isdir(top) else ():
            path = os.path.join(top, name)
            with contextlib.suppress(FileNotFoundError):
                if name not in kept and time.time() - os.stat(path).st_mtime > _UNUSED:
                    remove(path)

    def _find_unwanted(self, needed: Optional[Set[str]], age: float) -> Iterator[str]:
        """Yield the paths of incomplete pieces older than an hour, and of other pieces that are not needed and old enough.

        age: of the latter, in seconds. needed: the names of the needed ones; None: all are, so only incomplete ones are found.
        """
        with os.scandir(self.top) as entries:
            for entry in entries:
                part = entry.name.endswith(".part")
                if not part and (needed is None or entry.name in needed):
                    continue
                if time.time() - entry.stat().st_mtime >= (_STALE if part else age):
                    yield entry.path

    def _pieces_of(self, releases: Sequence[str]) -> Set[str]:
        """Return the names of all pieces of releases. Removes a release whose manifest is damaged. Raises OSError."""
        found: Set[str] = set()
        for release in releases:
            try:
                found.update(manifest.sizes(manifest.read_rows(self.manifest(release))))
            except (ValueError, LookupError, TypeError):
                self.forget(release)
        return found


@contextlib.contextmanager
def writing(store: Store) -> Iterator[None]:
    """Convert an OSError in the `with` block to a DispatchError."""
    try:
        yield
    except OSError as error:
        what = f"the release cannot be written below {store.top}: {error.strerror}"
        raise DispatchError(what, no_room(error)) from None


def no_room(error: OSError) -> str:
    """Return the fix for a store that cannot be written because of `error`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"make room ({PROGRAM} clean --older-than 7d), or choose another ROOT_DIR"
    return "choose another ROOT_DIR"


def damaged(release: str) -> DispatchError:
    """Build the error that a release is damaged."""
    return DispatchError(f"release {release} is damaged", "run it again: what is missing is sent again")


def _by_age(top: str) -> List[str]:
    """List the names in the folder of releases, the oldest first, without the lock and *.part younger than an hour."""
    found = []
    for name in os.listdir(top):
        if name == "lock":
            continue
        # A node that shares ROOT_DIR may have completed or removed it in the meantime.
        with contextlib.suppress(FileNotFoundError):
            found.append((os.stat(os.path.join(top, name)).st_mtime, name))
    return [name for age, name in sorted(found) if not name.endswith(".part") or time.time() - age > _STALE]


def remove(path: str) -> None:
    """Remove a file, or a folder as far as that is possible; leave a folder in which something is mounted.

    Raises OSError if a file cannot be removed, or the mounts cannot be read.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        if not mounts.mount_points_below(path):
            shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


@contextlib.contextmanager
def _lock(folder: str, how: int) -> Iterator[bool]:
    """Lock the folder's lock file by flock, which a shared file system may pass on to other nodes; yield whether it is locked.

    False if the file system has no locks. Raises BlockingIOError if another process has it and `how` does not wait.
    """
    path, flags = os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with files.closing(os.open(path, flags, 0o600)) as fd:
        try:
            fcntl.flock(fd, how)
            locked = True
        except BlockingIOError:
            raise
        except OSError:  # as NFS without its lock service
            locked = False
        yield locked


# -- a job's own copy ---------------------------------------------------------------------------------------------------


def unpack(store: Store, release: str, target: str) -> None:
    """Write a release's files below `target`, and renew its time of use.

    Raises DispatchError for a damaged release, whose manifest and wrong piece are removed; OSError if the files cannot be
    written.
    """
    with store.used():
        try:
            rows = manifest.read_rows(store.manifest(release))
            os.utime(os.path.join(store.releases, release))
            sizes = manifest.sizes(rows)
        except (OSError, ValueError, LookupError, TypeError):
            store.forget(release)
            raise damaged(release) from None
        if store.missing(sizes):
            store.forget(release)
            raise damaged(release)
        try:
            _unpack(store, rows, target)
        except WrongPiece as error:
            store.forget(release, str(error))
            raise damaged(release) from None


class WrongPiece(Exception):
    """A piece whose bytes do not match its name, which is the message."""


def _unpack(store: Store, rows: Sequence[manifest.Row], target: str) -> None:
    """Write the files, folders and links of a release below `target`, with modes and times; folders get theirs last.

    Raises WrongPiece for a damaged pack, DispatchError for a path that leads out of it, and OSError if a file cannot be read or
    written.
    """
    folders = [row[1:] for row in rows if row[0] == "d"]
    for path, _, _ in folders:
        os.makedirs(within(target, path), mode=0o700, exist_ok=True)
        step()
    for file in manifest.files(rows):
        with files.closing(files.make_new(within(target, file.path))) as fd:
            if file.pack:
                files.write_all(fd, store.read_packed(file))
            else:
                _copy_pieces(store, file, fd)
            os.utime(fd, ns=(file.mtime, file.mtime))
            os.fchmod(fd, file.mode)
        step()
    for _, path, to in [row for row in rows if row[0] == "l"]:
        os.symlink(to, within(target, path))
        step()
    for path, mode, mtime in sorted(folders, key=lambda row: str(row[0]), reverse=True):
        os.chmod(within(target, path), mode)
        os.utime(within(target, path), ns=(mtime, mtime))
        step()


def _copy_pieces(store: Store, file: manifest.File, target: int) -> None:
    """Write a file of a release from its pieces, whose blocks are shared if the file system can."""
    at = 0
    for name, _, size in file.parts:
        with files.closing(store.open(name)) as piece:
            if not files.share(piece, target, at):
                for data in iter(lambda: os.read(piece, _CHUNK), b""):
                    files.write_all(target, data)
        at += size
        os.lseek(target, at, os.SEEK_SET)
        step()


def within(folder: str, path: str) -> str:
    """Return the path in `folder` of a file that a manifest names. Raises DispatchError for one outside of it."""
    if path.startswith("/") or ".." in path.split("/"):
        raise DispatchError(f"the manifest names {path!r}, which lies outside of the workspace")
    return f"{folder}/{path}"
