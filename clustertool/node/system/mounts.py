"""This module lists mounts below a directory and those of the network, and finds one that does not answer.

A bind mount of the same file system has the same device number as the directory around it. The kernel lists it nevertheless.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import Dict, List, Optional

from clustertool.errors import PreflightError

_LIST = "/proc/self/mountinfo"
_NETWORK = "nfs nfs4 cifs smb3 lustre gpfs beegfs beegfs_nodev ceph glusterfs 9p afs".split()
_POINT = 4  # the field of a line that names the mount point
_PATIENCE = 5.0  # seconds for one look at a path; a login must answer within CONNECT_TIMEOUT, too
_LINKS = 40  # as the kernel allows


def mount_points_below(path: str) -> List[str]:
    """List the mount points at `path` or below it, as this process sees them, sorted. Raises OSError."""
    top = os.fsencode(os.path.realpath(path))
    with open(_LIST, "rb") as file:
        points = [_decode(line.split(b" ")[_POINT]) for line in file]
    return sorted({os.fsdecode(point) for point in points if point == top or point.startswith(top.rstrip(b"/") + b"/")})


def require_none(path: str) -> None:
    """Raise PreflightError if anything is mounted at `path` or below it, or if this cannot be known."""
    try:
        found = mount_points_below(path)
    except OSError as error:
        what = f"{path} is not removed: {_LIST} cannot be read ({error.strerror}), so a mount in it could be emptied"
        raise PreflightError(what, "mount /proc on the node") from None
    if found:
        raise mounted_error(path, ", ".join(found))


def mounted_error(path: str, points: str) -> PreflightError:
    """Build the error that `path` is not removed, since other file systems are mounted at `points`."""
    what = f"{path} is not removed: another file system is mounted there, at {points}"
    return PreflightError(what, "unmount it on the node (umount, or fusermount -u), then clean again")


def unanswered(path: str) -> Optional[PreflightError]:
    """Return an error, with the mount, if a path is on a file system that does not answer within 5 s; else None.

    An error of the file system is an answer, too.
    """
    reached, answered = ["/"], threading.Event()

    def walk() -> None:
        with contextlib.suppress(OSError):  # an answer, too
            _follow_path(path, reached)
        answered.set()

    threading.Thread(target=walk, daemon=True).start()
    if answered.wait(_PATIENCE):
        return None
    with open(_LIST, "rb") as file:
        rows = [line.split() for line in file]
    mounts = {os.fsdecode(_decode(row[_POINT])): row[row.index(b"-") + 1 :] for row in rows}  # the last one is on top
    above = [point for point in mounts if (reached[0] + "/").startswith(point.rstrip("/") + "/")]
    at = max(above, key=len, default="/")
    kind, source = (os.fsdecode(_decode(field)) for field in mounts.get(at, [b"?", b"?"])[:2])
    what = f"{at} ({kind} {source}) does not answer, and {path} is on it"
    fix = "repair its server, or unmount it there (umount -l, fusermount -uz), or choose another folder"
    return PreflightError(what, fix)


def _follow_path(path: str, reached: List[str]) -> None:
    """Read each part of a path, through links, and then its file system. Raises OSError if that fails.

    reached[0]: the part that is being read, which may never answer. Missing parts are passed over. Stops after 40 links.
    """
    rest, links = path.split("/")[::-1], 0
    while rest:
        name = rest.pop()
        at = os.path.normpath(os.path.join(reached[0], name))
        reached[0] = at
        try:
            target = os.readlink(at)
        except OSError:  # it is none, or is not there
            continue
        links += 1
        if links > _LINKS:
            return
        reached[0] = "/" if target.startswith("/") else os.path.dirname(at)
        rest += target.split("/")[::-1]
    os.statvfs(reached[0])


def _decode(field: bytes) -> bytes:
    r"""Decode a name: the kernel writes a space, tab, newline or backslash as \ooo."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match.group(1), 8)]), field)


def network_mounts() -> Dict[str, str]:
    """Map major:minor to `fstype source` of network file systems and those of FUSE; {} if the mounts cannot be read."""
    found: Dict[str, str] = {}
    with contextlib.suppress(OSError), open(_LIST, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, source = right.split()[:2]
            if kind in _NETWORK or kind.startswith("fuse."):
                found.setdefault(left.split()[2], f"{kind} {source}")
    return found


def device_name(device: int) -> str:
    """Return a device number as the keys of network_mounts() are written."""
    return f"{os.major(device)}:{os.minor(device)}"
