"""This module lists mounts below a directory: a removal must not enter them.

A bind mount of the same file system has the same device number as the directory around it. The kernel lists it nevertheless.
"""

from __future__ import annotations

import os
import re
from typing import List

from clustertool.errors import PreflightError

_LIST = "/proc/self/mountinfo"
_POINT = 4  # the field of a line that names the mount point


def below(path: str) -> List[str]:
    """Mount points at `path` or below it, as this process sees them. Raises OSError."""
    top = os.fsencode(os.path.realpath(path))
    with open(_LIST, "rb") as file:
        points = [_plain(line.split(b" ")[_POINT]) for line in file]
    return sorted({os.fsdecode(point) for point in points if point == top or point.startswith(top.rstrip(b"/") + b"/")})


def require_none(path: str) -> None:
    """Raise PreflightError if anything is mounted at `path` or below it, or if this cannot be found out."""
    try:
        found = below(path)
    except OSError as error:
        what = f"{path} is not removed: {_LIST} cannot be read ({error.strerror}), so a mount in it could be emptied"
        raise PreflightError(what, "mount /proc on the node") from None
    if found:
        raise mounted(path, ", ".join(found))


def mounted(path: str, points: str) -> PreflightError:
    """The refusal to remove `path`, in which `points` are other file systems."""
    return PreflightError(
        f"{path} is not removed: another file system is mounted there, at {points}",
        "unmount it on the node (umount, or fusermount -u), then clean again",
    )


def _plain(field: bytes) -> bytes:
    """The kernel writes a space, tab, newline or backslash of a name as \\ooo."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match.group(1), 8)]), field)
