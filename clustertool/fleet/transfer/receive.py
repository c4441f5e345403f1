"""Bring a folder of a node to this machine.

By rsync where both have it and a shell starts it, else in answers of the node's agent.

Nothing is written outside of the target, whatever a node names: each folder is opened relative to the one above and no link is
followed. Links that lead out of the folder are left out, as rsync's --safe-links does.
"""

from __future__ import annotations

import base64
import contextlib
import os
import posixpath
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clustertool.errors import BadAnswer, ClustertoolError, DispatchError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.this_machine import ProgramLink
from clustertool.fleet.transfer.rsync_session import Check, Copied, RsyncMissing, pull, pull_file
from clustertool.model.wire.messages import FIND_FILE, LIST_FOLDER, READ_FILE
from clustertool.ssh.parallel import each

_LISTED = 8  # files that an error names
_WIDTH = 8  # files at a time: each costs a round trip, and one more for each 512 KiB
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class FolderEntry:
    """A file or folder on a node. kind: file, dir, link or unreadable. modified, changed (ctime): times in ns.

    link: the target of a link, or why it is unreadable.
    """

    path: str
    kind: str
    executable: bool
    modified: int
    size: int
    link: str
    changed: int = 0

    @property
    def parts(self) -> list[str]:
        """The names of the path. Raises BadAnswer for a path that leads out of the folder."""
        parts = self.path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise BadAnswer(f"it names a file {self.path!r}", "check that node")
        return parts

    @property
    def stays_inside(self) -> bool:
        """Whether a link leads into the folder: `..` only at the front, and not too often."""
        parts = [part for part in self.link.split("/") if part not in ("", ".")]
        ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
        return not self.link.startswith("/") and ups < len(self.parts) and ".." not in parts[ups:]


@dataclass(frozen=True)
class NodeFolder:
    """A directory of a node, by its path there. All methods raise NotFound, DispatchError, Unreachable."""

    fleet: Fleet
    node: int
    path: str

    def entries(self) -> list[FolderEntry]:
        """List all files, folders and links in the directory, at any depth."""
        return [FolderEntry(*row) for row in self.fleet.ask_one(self.node, LIST_FOLDER({"dir": self.path}))["entries"]]

    def find(self, path: str) -> FolderEntry:
        """Find a file by its path in the directory. A link is followed if it stays in the directory."""
        found = self.fleet.ask_one(self.node, FIND_FILE({"dir": self.path, "path": path}))
        return FolderEntry(
            found["path"], "file", found["executable"], found["modified"], found["size"], "", found["changed"]
        )

    def receive(self, target: Path, check: Check, only: Sequence[FolderEntry] | None = None) -> Copied:
        """Copy the directory into `target`, which is made: by rsync, or, if a side has none, in answers of the agent.

        The latter also where the node's link starts programs only. only: these entries of it; None: all.
        """
        link = self.fleet.agents[self.node].link
        names = None if only is None else [entry.path for entry in only if entry.parts]
        with contextlib.suppress(RsyncMissing):
            try:
                if not isinstance(link, ProgramLink):
                    return pull(link, self.path, target, check, names)
            except OSError as error:
                raise _unwritable(target, error) from None
        return self._receive_in_frames(target, check, only)

    def _receive_in_frames(self, target: Path, check: Check, only: Sequence[FolderEntry] | None) -> Copied:
        """Copy the directory without rsync, eight files at a time. Files of the same size and time are not copied again.

        An empty target is removed first, and made again when the node has listed the directory. Links that lead out of the
        directory are left out. As with rsync, files that cannot be read are in the error at the end, and all else is copied.
        """
        with contextlib.suppress(OSError):  # made by rsync's attempt; it stays away if there is nothing to copy
            os.rmdir(target)
        listed = self.entries() if only is None else only
        os.makedirs(target, exist_ok=True)
        copy = _Copy(self, target)
        try:
            for entry in listed:
                if entry.kind == "dir":
                    with copy.folder(entry.parts):
                        pass
            changed = [entry for entry in listed if entry.kind == "file" and not copy.has(entry)]
            gathered = each(changed, copy.file, width=_WIDTH, check=check)
            for entry in listed:
                if entry.kind == "link" and entry.stays_inside:
                    copy.link(entry)
        except OSError as error:
            raise _unwritable(target, error) from None
        _require_all(self.fleet.name(self.node), listed, gathered.failed.values())
        return Copied(sum(gathered.ok.values()), len(gathered.ok))

    def receive_file(self, path: str, entry: FolderEntry, target: Path, check: Check) -> Copied:
        """Copy one file of the directory into the folder `target`, which is made, but not left empty after an error.

        entry: what find() has found at `path`; the copy has the name of the path. A file that is there already, with the same
        size and time, counts as copied with 0 bytes. Raises BadAnswer, too, if what comes is no file.
        """
        name, sent = posixpath.basename(path), entry.parts[-1]
        made = not target.is_dir()
        try:
            os.makedirs(target, exist_ok=True)
            if _Copy(self, target).has(replace(entry, path=name)):
                return Copied(0, 1)
            # Nothing else can be replaced by a node.
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as stage:
                copied = self._stage_file(entry, Path(stage), check)
                os.replace(Path(stage, sent), target / name)
            return copied
        except OSError as error:
            raise _unwritable(target / name, error) from None
        finally:
            if made:
                with contextlib.suppress(OSError):  # not empty: it has the file
                    os.rmdir(target)

    def _stage_file(self, entry: FolderEntry, stage: Path, check: Check) -> Copied:
        """Copy a file into the folder `stage`, by rsync if possible. Raises BadAnswer if what comes is no regular file."""
        link, flat = self.fleet.agents[self.node].link, entry.parts[-1]
        copied: Copied | None = None
        if not isinstance(link, ProgramLink):
            with contextlib.suppress(RsyncMissing):
                copied = pull_file(link, self.path, entry.path, stage, check)
        if copied is None:
            copy = _Copy(self, stage)
            copied = Copied(each([entry], lambda one: copy.file(one, [flat]), check=check).all()[0], 1)
        if not stat.S_ISREG(os.lstat(stage / flat).st_mode):
            what = f"it has sent {entry.path!r}, which is no file"
            raise BadAnswer(what, "check that node", self.fleet.name(self.node))
        return copied


def _unwritable(path: Path, error: OSError) -> DispatchError:
    """Build the error of a path of this machine that cannot be written."""
    return DispatchError(f"{os.fspath(path)!r} cannot be written: {error.strerror}", "fetch to another place: --to DIR")


def _require_all(node: str, listed: Sequence[FolderEntry], failed: Iterable[ClustertoolError]) -> None:
    """Raise a DispatchError that lists up to eight files which could not be read on the node; do nothing if there are none.

    The first error of another kind, or of this machine, is raised instead.
    """
    raise_all([error for error in failed if type(error) is not DispatchError or not error.node][:1])
    lines = [f"{entry.path!r} cannot be read: {entry.link}" for entry in listed if entry.kind == "unreadable"]
    lines += [error.what for error in failed]
    if lines:
        more = f"\nand {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
        what = "\n".join(lines[:_LISTED]) + more
        raise DispatchError(what, "correct the permissions on the node; all else was copied", node)


@dataclass(frozen=True)
class _Copy:
    """The copy of one folder of a node into `target`."""

    source: NodeFolder
    target: Path

    @contextlib.contextmanager
    def folder(self, parts: list[str]) -> Iterator[int]:
        """Return a context manager that makes and opens a folder below `target`; its value is the folder's descriptor.

        parts: the path below `target`. Raises OSError where something else is in its place.
        """
        fd = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
                above, fd = fd, os.open(part, _FOLDER, dir_fd=fd)
                os.close(above)
            yield fd
        finally:
            os.close(fd)

    def has(self, entry: FolderEntry) -> bool:
        """Check whether `target` has a regular file with the entry's path, size and time. Makes the folders above it."""
        with self.folder(entry.parts[:-1]) as fd:
            try:
                info = os.stat(entry.parts[-1], dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (entry.size, entry.modified)

    def file(self, entry: FolderEntry, to: Sequence[str] = ()) -> int:
        """Copy a file, by default to the same path, and return its bytes. It replaces a file there when it is complete.

        to: the path below `target`, in parts. Raises DispatchError where it cannot be written.
        """
        *above, name = to or entry.parts
        part = f".{secrets.token_hex(8)}.part"
        with self.folder(above) as folder:
            fd = os.open(part, _NEW, 0o777 if entry.executable else 0o666, dir_fd=folder)
            try:
                with open(fd, "wb") as file:
                    size = sum(file.write(data) for data in self._content(entry.path))
                    file.flush()
                    os.utime(fd, ns=(entry.modified, entry.modified))
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                what = f"{entry.path!r} cannot be written: {error.strerror}"
                raise DispatchError(what, "free some space, or fetch to another place: --to DIR") from None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)
        return size

    def _content(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a file, by one request after the other."""
        source, at, last = self.source, 0, False
        while not last:
            answer = source.fleet.ask_one(source.node, READ_FILE({"dir": source.path, "path": path, "at": at}))
            data = base64.b64decode(answer["data"])
            at, last = at + len(data), answer["last"] or not data
            yield data

    def link(self, entry: FolderEntry) -> None:
        """Make a link of the node's folder on this machine, at the same path below `target`, in place of a file or link there.

        Folders above it are made. Raises OSError where a folder is in its place.
        """
        with self.folder(entry.parts[:-1]) as fd:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.parts[-1], dir_fd=fd)
            os.symlink(entry.link, entry.parts[-1], dir_fd=fd)
