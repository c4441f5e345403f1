"""The session folders of a job on one node have the sockets and the shared memory of mpirun, its daemons and its ranks.

They are private (0700), and on file systems of this machine. Sockets need a short path, and shared memory one in memory.
Their names come from the job's marker, so that a guard or a stop without supervisor finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Dict, Tuple

from clustertool.errors import ClustertoolError, PreflightError
from clustertool.model.paths import OURS
from clustertool.node.storage import files


def _folder_paths(mark: str) -> Tuple[str, str]:
    """Compute the paths of a job's folders from its mark: that for sockets, and that in memory."""
    name = f"ct-mpi-{os.getuid()}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    return os.path.join("/tmp", name), os.path.join("/dev/shm", name)


def make(mark: str) -> Dict[str, str]:
    """Create the folders of the job with this mark: {"sockets": path in /tmp, "memory": path in /dev/shm}.

    If the second one cannot be made, both are the first. Raises PreflightError if that one cannot be made, or exists.
    """
    sockets, memory = _folder_paths(mark)
    try:
        _make_folder(sockets)
    except OSError as error:
        what = f"{sockets} cannot be made: {error.strerror}"
        raise PreflightError(what, "make room in /tmp, or have it made writable") from None
    try:
        _make_folder(memory)
    except OSError:
        memory = sockets
    return {"sockets": sockets, "memory": memory}


def _make_folder(path: str) -> None:
    """Create a folder with the tool's marker. Raises OSError, also if it exists."""
    os.mkdir(path, 0o700)
    os.mkdir(os.path.join(path, OURS), 0o700)
    files.mark(os.path.join(path, OURS))


def remove(mark: str) -> None:
    """Remove the job's folders and what is in them, if they are there. No process of the job may live any more."""
    for path in _folder_paths(mark):
        with contextlib.suppress(ClustertoolError, OSError):
            files.remove_tree(path)
