"""Nodes that share a ROOT_DIR detect each other: each one creates a mark there, then lists the marks that it sees.

Device and inode numbers prove nothing between two machines (copies of one disk image have the same); a random name does.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from clustertool.model.paths import OURS
from clustertool.node.storage import files
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import SeenAnswer
    from clustertool.model.wire.agent_requests import MeetRequest

_PREFIX = "meet-"
_OLD = 3600.0  # seconds after which the marks of a laptop that went away are rubbish


def meet(node: NodeContext, request: MeetRequest) -> SeenAnswer:
    """Do a step of the meeting: "leave" creates this node's mark, "find" returns the nodes with marks, another removes them.

    Answers {seen: numbers of nodes, sorted} to "find", else {}. Raises PreflightError if ROOT_DIR is not this user's, and
    OSError if it cannot be written or read.
    """
    ours, name = os.path.join(node.root, OURS), _PREFIX + request["token"]
    place = os.path.join(ours, name)
    if request["step"] == "leave":
        files.make_root(node.root)
        _tidy(ours)
        files.make_dir(ours, name)
        os.close(files.make_new(os.path.join(place, str(request["node"]))))
        return {}
    if request["step"] == "find":
        return {"seen": sorted(int(name) for name in os.listdir(place) if name.isdigit())}
    _forget(place)
    return {}


def _forget(place: str) -> None:
    """Remove the marks of a meeting and their folder, `place`. Several nodes do this at once where they share it.

    No folder is entered.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(place, name))
        os.rmdir(place)


def _tidy(ours: str) -> None:
    """Remove the marks of meetings that are older than an hour."""
    for name in os.listdir(ours):
        path = os.path.join(ours, name)
        with contextlib.suppress(OSError):
            if name.startswith(_PREFIX) and time.time() - os.lstat(path).st_mtime > _OLD:
                _forget(path)
