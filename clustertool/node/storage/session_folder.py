"""The session folders of a job on one node have the sockets and the shared memory of mpirun, its daemons and its ranks.

They are private (0700), and on file systems of this machine. Sockets need a short path, and shared memory one in memory.
Their names come from the job's marker, so that a guard or a stop without supervisor finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Dict

from clustertool.errors import ClustertoolError, PreflightError
from clustertool.model.paths import OURS
from clustertool.node.storage import files

_SOCKETS, _MEMORY = "/tmp", "/dev/shm"


def _folder_paths(mark: str) -> Dict[str, str]:
    """Compute the paths of a job's folders from its mark: {"/tmp": path, "/dev/shm": path}."""
    name = f"ct-mpi-{os.getuid()}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    return {place: os.path.join(place, name) for place in (_SOCKETS, _MEMORY)}


def make(mark: str) -> Dict[str, str]:
    """Create the folders of the job with this mark: {"sockets": path in /tmp, "memory": path in /dev/shm}.

    If the second one cannot be made, both are the first. Raises PreflightError if that one cannot be made, or exists.
    """
    paths = _folder_paths(mark)
    try:
        _make_folder(paths[_SOCKETS])
    except OSError as error:
        what = f"{paths[_SOCKETS]} cannot be made: {error.strerror}"
        raise PreflightError(what, "make room in /tmp, or have it made writable") from None
    try:
        _make_folder(paths[_MEMORY])
    except OSError:
        return {"sockets": paths[_SOCKETS], "memory": paths[_SOCKETS]}
    return {"sockets": paths[_SOCKETS], "memory": paths[_MEMORY]}


def _make_folder(path: str) -> None:
    """Create a folder with the tool's marker. Raises OSError, also if it exists."""
    os.mkdir(path, 0o700)
    os.mkdir(os.path.join(path, OURS), 0o700)
    files.mark(os.path.join(path, OURS))


def remove(mark: str) -> None:
    """Remove the job's folders and what is in them, if they are there. No process of the job may live any more."""
    for path in _folder_paths(mark).values():
        with contextlib.suppress(ClustertoolError, OSError):
            files.remove_tree(path)
