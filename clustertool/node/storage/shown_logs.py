"""A folder of the user shows the logs of the newest job by links: that of --log-dir, on the user's machine and on nodes.

One rule counts for all of them: links to earlier jobs are removed, other files with the name of a log get the ending .old, and
everything else stays.
"""

from __future__ import annotations

import binascii
import contextlib
import os

from clustertool.model.paths import FIRST_NAMES, LOG_NAMES, folder_of

_JOB = "JOB"
_NAMES = ("endpoints.log", *FIRST_NAMES)


def is_of_job(path: str, job: str = "") -> bool:
    """Return whether it is a link into the directory of a job, or of this one."""
    try:
        parts = os.readlink(path).split("/")
    except OSError:
        return False
    return folder_of(job) in parts if job else any(part.startswith(_JOB) for part in parts)


def clear(folder: str, job: str = "") -> None:
    """Let a folder show no log but those of `job`, which other nodes may link at the same time. Raises OSError."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not is_name(name) or (job and is_of_job(path, job)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another node was faster
            if is_of_job(path):
                os.unlink(path)
                continue
            moved = os.path.join(folder, f".{name}.{binascii.hexlify(os.urandom(8)).decode()}")
            os.rename(path, moved)
            meanwhile = job and is_of_job(moved, job)  # another node has put its link there
            os.rename(moved, path if meanwhile else _unused(path))


def is_name(name: str) -> bool:
    """Return whether it is a name in a job's log folder: workerlog.3, attempt1, endpoints.log, train.log."""
    stem, _, number = name.partition(".")
    restart = name.startswith("attempt") and name[len("attempt") :].isdigit()
    return (stem in LOG_NAMES and number.isdigit()) or restart or name in _NAMES


def _unused(path: str) -> str:
    """Return a name like this one that nothing has."""
    found, number = f"{path}.old", 1
    while os.path.lexists(found):
        number += 1
        found = f"{path}.old{number}"
    return found
