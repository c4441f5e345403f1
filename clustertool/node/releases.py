"""Releases are the workspaces this node has received, each whole under its digest; what still arrives is `<digest>.part`.

A node that has the release already only looks: what receiving needs (hashes, removing trees) is imported there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Any, Dict, List

from clustertool.errors import DispatchError
from clustertool.node import files
from clustertool.plan import paths

if TYPE_CHECKING:
    from clustertool.plan.manifest import Entry

_KEEP = 3  # releases besides the one in use


def stage(root: str, release: str) -> Dict[str, Any]:
    """A staging directory for a release; "have" if it is complete already. `base`: a release whose files rsync may link."""
    files.make_root(root)
    top = files.make_dir(root, paths.OURS, "releases")
    if os.path.isdir(os.path.join(top, release)):
        return {"have": True}
    files.make_dir(top, release + ".part")
    others = sorted(_complete(top), key=lambda name: os.stat(os.path.join(top, name)).st_mtime)
    return {"have": False, "path": os.path.join(top, release + ".part"), "base": [f"../{name}" for name in others[-2:]]}


def seal(root: str, release: str) -> Dict[str, Any]:
    """Verify what arrived against the release's name and make it complete by one rename. Raises DispatchError."""
    top = paths.releases(root)
    part, whole = os.path.join(top, release + ".part"), os.path.join(top, release)
    if os.path.isdir(whole):
        return {"have": True}
    from clustertool.plan.manifest import digest

    found = digest(walk(part))
    if found != release:
        raise DispatchError("what arrived is not what was sent", "a file changed while it was sent? run it again")
    os.rename(part, whole)
    os.utime(whole)
    _prune(top, release)
    return {"have": True}


def walk(top: str) -> List[Entry]:
    """The entries of a tree as a manifest lists them, files with their digests."""
    from clustertool.plan.manifest import Entry, file_digest

    found: List[Entry] = []
    for folder, folders, names in os.walk(top):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            relative = os.path.relpath(path, top)
            mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISLNK(info.st_mode):
                found.append(Entry(relative, "link", 0, 0, os.readlink(path)))
            elif stat.S_ISDIR(info.st_mode):
                found.append(Entry(relative, "dir", mode, 0, ""))
            else:
                with open(path, "rb") as file:
                    found.append(Entry(relative, "file", mode, info.st_size, file_digest(file)))
    return found


def _complete(top: str) -> List[str]:
    return [name for name in os.listdir(top) if "." not in name]


def _prune(top: str, keep: str) -> None:
    """Old releases go; a job has its own copy, so none is ever in use."""
    import shutil

    others = sorted((n for n in _complete(top) if n != keep), key=lambda n: os.stat(os.path.join(top, n)).st_mtime)
    for name in others[:-_KEEP]:
        with contextlib.suppress(OSError):
            shutil.rmtree(os.path.join(top, name))
