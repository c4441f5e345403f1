"""A folder is read for a fetch without rsync: what is in it, and the bytes of its files."""

from __future__ import annotations

import binascii
import os
import stat
from typing import TYPE_CHECKING, List, Tuple

from clustertool.errors import DispatchError, NotFound
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.work_counter import step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ContentAnswer, TreeAnswer
    from clustertool.model.wire.agent_requests import ContentRequest, FolderRequest

_CHUNK = 512 << 10


def tree(node: NodeContext, request: FolderRequest) -> TreeAnswer:
    """{entries: [path, kind, executable, mtime in ns, size, target of a link]}. Raises NotFound, DispatchError."""
    folder = request["dir"]
    if not os.path.isdir(folder):
        raise NotFound("no such directory there", "check the path and the job")
    found: List[Tuple[str, str, bool, int, int, str]] = []
    folders = [""]
    while folders:
        below = folders.pop()
        try:
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    path = below + entry.name
                    if stat.S_ISDIR(info.st_mode):
                        folders.append(path + "/")
                        found.append((path, "dir", True, info.st_mtime_ns, 0, ""))
                    elif stat.S_ISLNK(info.st_mode):
                        found.append((path, "link", False, info.st_mtime_ns, 0, os.readlink(entry.path)))
                    elif stat.S_ISREG(info.st_mode):
                        executable = bool(info.st_mode & stat.S_IXUSR)
                        found.append((path, "file", executable, info.st_mtime_ns, info.st_size, ""))
                    step()
        except OSError as error:
            raise _unreadable(below or folder, error) from None
    return {"entries": found}


def content(node: NodeContext, request: ContentRequest) -> ContentAnswer:
    """{data: some bytes of a file in base64, last: whether none follow}. Raises DispatchError."""
    path, at = request["path"], request["at"]
    try:
        fd = os.open(os.path.join(request["dir"], path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            data = os.pread(fd, _CHUNK, at)
            last = at + len(data) >= os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    return {"data": binascii.b2a_base64(data, newline=False).decode(), "last": last}


def _unreadable(path: str, error: OSError) -> DispatchError:
    return DispatchError(f"{path!r} cannot be read: {error.strerror}", "try again when nothing changes it")
