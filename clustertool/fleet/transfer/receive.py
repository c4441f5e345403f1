"""Receiving brings a folder of a node to this machine: by rsync where both have it, else in answers of the node's agent.

Nothing is written outside of the target, whatever a node names: each folder is opened relative to the one above and no link is
followed. Links that lead out of the folder are left out, as rsync's --safe-links does.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clustertool.errors import BadAnswer, DispatchError
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer.rsync_session import Copied, RsyncMissing, pull
from clustertool.model.wire.messages import LIST_FOLDER, READ_FILE
from clustertool.ssh.parallel import each

_WIDTH = 8  # files at a time: each costs a round trip, and one more for each 512 KiB
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def receive(fleet: Fleet, node: int, remote: str, target: Path, check: Callable[[], None]) -> Copied:
    """Copy a directory of a node into `target`, which is made. Raises NotFound, DispatchError, Unreachable."""
    try:
        return pull(fleet.agents[node].link, remote, target, check=check)
    except RsyncMissing:
        return receive_in_frames(fleet, node, remote, target, check)


def receive_in_frames(fleet: Fleet, node: int, remote: str, target: Path, check: Callable[[], None]) -> Copied:
    """The same without rsync. Files of the same size and time are not copied again."""
    with contextlib.suppress(OSError):  # made by rsync's attempt; it stays away if there is nothing to copy
        os.rmdir(target)
    listed = [_Entry(*row) for row in fleet.ask_one(node, LIST_FOLDER({"dir": remote}))["entries"]]
    os.makedirs(target, exist_ok=True)
    copy = _Copy(fleet, node, remote, target)
    try:
        for entry in listed:
            if entry.kind == "dir":
                with copy.folder(entry.parts):
                    pass
        changed = [entry for entry in listed if entry.kind == "file" and not copy.has(entry)]
        sizes = each(changed, copy.file, width=_WIDTH, check=check).all()
        for entry in listed:
            if entry.kind == "link" and entry.stays_inside:
                copy.link(entry)
    except OSError as error:
        what = f"{os.fspath(target)!r} cannot be written: {error.strerror}"
        raise DispatchError(what, "fetch to another place: --to DIR") from None
    return Copied(sum(sizes.values()), len(sizes))


@dataclass(frozen=True)
class _Entry:
    """What a node has. `kind`: file, dir or link; `modified` in ns; `link`: where a link points to."""

    path: str
    kind: str
    executable: bool
    modified: int
    size: int
    link: str

    @property
    def parts(self) -> list[str]:
        """Raises BadAnswer for a path that leads out of the folder."""
        parts = self.path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise BadAnswer(f"it names a file {self.path!r}", "look at that node")
        return parts

    @property
    def stays_inside(self) -> bool:
        """A link within the folder: `..` only at the front, and not too often."""
        parts = [part for part in self.link.split("/") if part not in ("", ".")]
        ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
        return not self.link.startswith("/") and ups < len(self.parts) and ".." not in parts[ups:]


class _Copy:
    """The copy of one folder of a node into `target`."""

    def __init__(self, fleet: Fleet, node: int, remote: str, target: Path) -> None:
        self._target = target
        self._fleet = fleet
        self._node = node
        self._remote = remote

    @contextlib.contextmanager
    def folder(self, parts: list[str]) -> Iterator[int]:
        """A descriptor of a folder here, which is made. Raises OSError where something else is in its place."""
        fd = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
                above, fd = fd, os.open(part, _FOLDER, dir_fd=fd)
                os.close(above)
            yield fd
        finally:
            os.close(fd)

    def has(self, entry: _Entry) -> bool:
        with self.folder(entry.parts[:-1]) as fd:
            try:
                info = os.stat(entry.parts[-1], dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (entry.size, entry.modified)

    def file(self, entry: _Entry) -> int:
        """Copy one; its bytes."""
        part, name = f".{secrets.token_hex(8)}.part", entry.parts[-1]
        with self.folder(entry.parts[:-1]) as folder:
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
        at, last = 0, False
        while not last:
            answer = self._fleet.ask_one(self._node, READ_FILE({"dir": self._remote, "path": path, "at": at}))
            data = base64.b64decode(answer["data"])
            at, last = at + len(data), answer["last"] or not data
            yield data

    def link(self, entry: _Entry) -> None:
        with self.folder(entry.parts[:-1]) as fd:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.parts[-1], dir_fd=fd)
            os.symlink(entry.link, entry.parts[-1], dir_fd=fd)
