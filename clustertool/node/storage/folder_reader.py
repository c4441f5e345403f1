"""A folder is read for a fetch: what is in it, one file of it, and the bytes of its files where there is no rsync."""

from __future__ import annotations

import binascii
import os
import stat
from typing import TYPE_CHECKING, List, Tuple

from clustertool.errors import DispatchError, NotFound
from clustertool.node.storage import files
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ContentAnswer, FileAnswer, TreeAnswer
    from clustertool.model.wire.agent_requests import ContentRequest, FileRequest, FolderRequest

_CHUNK = 512 << 10


def tree(node: NodeContext, request: FolderRequest) -> TreeAnswer:
    """List all that is in a folder and below: {entries: [path, kind, executable, mtime in ns, size, link, ctime in ns]}.

    Contains files, folders and links; a folder below that cannot be read has a further entry of the kind unreadable, with the
    reason as its link. Raises NotFound; DispatchError if the folder itself cannot be read.
    """
    folder = request["dir"]
    if not os.path.isdir(folder):
        raise NotFound("no such directory there", "check the path and the job")
    found: List[Tuple[str, str, bool, int, int, str, int]] = []
    folders = [""]
    while folders:
        below = folders.pop()
        try:
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    path = below + entry.name
                    executable, size, link = False, 0, ""
                    if stat.S_ISDIR(info.st_mode):
                        folders.append(path + "/")
                        kind, executable = "dir", True
                    elif stat.S_ISLNK(info.st_mode):
                        kind, link = "link", os.readlink(entry.path)
                    elif stat.S_ISREG(info.st_mode):
                        kind, executable, size = "file", bool(info.st_mode & stat.S_IXUSR), info.st_size
                    else:
                        continue
                    found.append((path, kind, executable, info.st_mtime_ns, size, link, info.st_ctime_ns))
                    step()
        except OSError as error:
            if not below:
                raise _read_error(folder, error) from None
            found.append((below[:-1], "unreadable", False, 0, 0, error.strerror or "", 0))
    return {"entries": found}


def find_file(node: NodeContext, request: FileRequest) -> FileAnswer:
    """Describe a regular file of a folder, or the one to which a link leads inside of it.

    {path: of the file itself, from the folder on, executable, modified and changed: ns, size}. Raises NotFound for anything
    else.
    """
    folder = os.path.realpath(request["dir"])
    found = os.path.realpath(os.path.join(folder, request["path"]))
    try:
        info = os.stat(found)
    except OSError:
        info = None
    if info is None or not stat.S_ISREG(info.st_mode) or not found.startswith(folder + "/"):
        raise NotFound("no such file there", "check the path and the job")
    return {
        "path": found[len(folder) + 1 :],
        "executable": bool(info.st_mode & stat.S_IXUSR),
        "modified": info.st_mtime_ns,
        "size": info.st_size,
        "changed": info.st_ctime_ns,
    }


def content(node: NodeContext, request: ContentRequest) -> ContentAnswer:
    """Read up to 512 KiB of a file from an offset: {data: in base64, last: whether no bytes follow}.

    Raises DispatchError if it cannot be read, or is no regular file.
    """
    path, at = request["path"], request["at"]
    try:
        with files.closing(files.open_file(os.path.join(request["dir"], path))) as fd:
            data = os.pread(fd, _CHUNK, at)
            last = at + len(data) >= os.fstat(fd).st_size
    except OSError as error:
        raise _read_error(path, error) from None
    return {"data": binascii.b2a_base64(data, newline=False).decode(), "last": last}


def _read_error(path: str, error: OSError) -> DispatchError:
    """Build the error that a path cannot be read."""
    what = f"{path!r} cannot be read: {error.strerror}"
    return DispatchError(what, "correct its permissions, or try again when nothing changes it")
