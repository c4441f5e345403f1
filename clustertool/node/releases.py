"""Releases are the workspaces this node has received, each whole under its digest; what still arrives is `<digest>.part`.

Two dispatches of one release at a time do not write into one directory: the second one fills `<digest>.<pid>.part`.

A node that has the release already only looks: what receiving needs (hashes, removing trees) is imported there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import zlib
from typing import TYPE_CHECKING, Any, Dict, List

from clustertool.errors import DispatchError
from clustertool.node import claims, files
from clustertool.plan import paths

if TYPE_CHECKING:
    from clustertool.plan.manifest import Entry

_KEEP = 3  # releases besides the one in use
_FORGOTTEN = 86400.0  # seconds
_parts: Dict[str, str] = {}  # what this agent has staged: release -> its directory
_locks: Dict[str, int] = {}  # descriptors that must stay open


def stage(root: str, release: str) -> Dict[str, Any]:
    """A staging directory for a release; "have" if it is complete already. `base`: a release whose files rsync may link."""
    files.make_root(root)
    top = files.make_dir(root, paths.OURS, "releases")
    if os.path.isdir(os.path.join(top, release)):
        return {"have": True}
    name = release + ".part" if _alone(os.path.join(top, release)) else f"{release}.{os.getpid()}.part"
    part = _parts[release] = files.make_dir(top, name)
    others = sorted(_complete(top), key=lambda name: -_age(os.path.join(top, name)))
    return {"have": False, "path": part, "base": [f"../{name}" for name in others[-2:]]}


def seal(root: str, release: str) -> Dict[str, Any]:
    """Verify what arrived against the release's name and make it complete by one rename. Raises DispatchError."""
    top = paths.releases(root)
    part, whole = _parts[release], os.path.join(top, release)
    if os.path.isdir(whole):
        return _second(part)
    from clustertool.plan.manifest import digest

    found = digest(walk(part))
    if found != release:
        raise DispatchError("what arrived is not what was sent", "a file changed while it was sent? run it again")
    try:
        os.rename(part, whole)
    except OSError:
        if not os.path.isdir(whole):
            raise
        return _second(part)
    os.utime(whole)
    _prune(top, release)
    return {"have": True}


def _alone(whole: str) -> bool:
    """Whether no other agent of this node fills the release. A record lock, gone with this agent, on node-local storage."""
    if "stage" not in _locks:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        _locks["stage"] = os.open(os.path.join(claims.directory(), "stage.lock"), flags, 0o600)
    try:
        fcntl.lockf(_locks["stage"], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(os.fsencode(whole)))
    except OSError:
        return False
    return True


def _second(part: str) -> Dict[str, Any]:
    """Another dispatch was first: the release is there."""
    import shutil

    shutil.rmtree(part, ignore_errors=True)
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


def _age(path: str) -> float:
    """Seconds since it was finished, or begun; 0 of what another agent has removed meanwhile."""
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _prune(top: str, keep: str) -> None:
    """Old releases go; a job has its own copy, so none is ever in use. What was never finished goes after a day."""
    import shutil

    ages = {name: _age(os.path.join(top, name)) for name in os.listdir(top)}
    others = sorted((name for name in _complete(top) if name != keep), key=lambda name: -ages[name])
    forgotten = [name for name, age in ages.items() if name.endswith(".part") and age > _FORGOTTEN]
    for name in [*others[:-_KEEP], *forgotten]:
        with contextlib.suppress(OSError):
            shutil.rmtree(os.path.join(top, name))
