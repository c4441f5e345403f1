"""A folder of the user shows the logs of the newest job by links: that of --log-dir, on the user's machine and on nodes.

One rule counts for all of them: links to earlier jobs are removed, other files with the name of a log get the ending .old, and
everything else stays.
"""

from __future__ import annotations

import binascii
import contextlib
import os
from typing import TYPE_CHECKING

from clustertool.model.paths import FIRST_NAMES, LOG_NAMES, JobPaths, folder_of

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_JOB = "JOB"
_NAMES = ("endpoints.log", *FIRST_NAMES)


def show(spec: Spec) -> None:
    """Link the logs of a job that is placed on this node into --log-dir, else its log/ and nodefile into --job-workspace.

    Without either it does nothing.
    """
    if spec["log_dir"]:
        _show_in(os.path.normpath(os.path.join(spec["work_dir"], spec["log_dir"])), spec)
    elif spec["work_dir"] != spec["job_dir"]:  # --job-workspace: DIR/log and DIR/nodefile show the newest job
        for name in ("log", "nodefile"):
            _make_link(os.path.join(spec["work_dir"], name), JobPaths.at(spec["job_dir"]).of(name), spec["work_dir"])


def _show_in(folder: str, spec: Spec) -> None:
    """Make `folder` a link to the job's log/, or put links to the logs into it if it is a folder or several nodes may share it.

    In the second case clear() comes first. Does nothing if it is log/ itself. Ignores OSError.
    """
    job_paths = JobPaths.at(spec["job_dir"])
    outside = os.path.isabs(spec["log_dir"]) and len(spec["header"]["nodes"]) > 1
    logs, shared = job_paths.of("log"), outside or job_paths.base != spec["root"]
    if os.path.realpath(folder) == os.path.realpath(logs):
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        if shared:
            if is_of_job(folder):
                with contextlib.suppress(OSError):  # another node has done so, and has made the folder
                    os.unlink(folder)
            os.makedirs(folder, exist_ok=True)
        if os.path.islink(folder) or not os.path.isdir(folder):
            _make_link(folder, logs, spec["work_dir"])
            return
        clear(folder, spec["job"])
        of_ranks = [log for one in spec["processes"] for log in (one["log"], JobPaths.first_log(one["role"]))]
        for name in {*os.listdir(logs), *map(os.path.basename, of_ranks)}:
            _make_link(os.path.join(folder, name), os.path.join(logs, name), spec["work_dir"])


def _make_link(place_: str, target: str, top: str) -> None:
    """Make the link `place_` to something of a job, in place of such a link, but not of anything else. Ignores OSError.

    In the folder `top` it is relative: it survives that the folder is moved, and is right on each machine that shares it.
    """
    parent = os.path.realpath(os.path.dirname(place_))
    if os.path.commonpath([parent, target, top]) == top:
        target = os.path.relpath(target, parent)
    with contextlib.suppress(OSError):
        if os.path.islink(place_):
            if not is_of_job(place_):
                return
            os.unlink(place_)
        os.symlink(target, place_)


def is_of_job(path: str, job: str = "") -> bool:
    """Check whether a path is a link into the directory of any job, or of `job`."""
    try:
        parts = os.readlink(path).split("/")
    except OSError:
        return False
    return folder_of(job) in parts if job else any(part.startswith(_JOB) for part in parts)


def clear(folder: str, job: str = "") -> None:
    """Remove links to jobs, except to `job`, from names of logs in a folder, and rename others with such names to *.old.

    Another node may put links to `job` there at the same time: they stay, too. Raises OSError.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not is_log_name(name) or (job and is_of_job(path, job)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another node was faster
            if is_of_job(path):
                os.unlink(path)
                continue
            moved = os.path.join(folder, f".{name}.{binascii.hexlify(os.urandom(8)).decode()}")
            os.rename(path, moved)
            meanwhile = job and is_of_job(moved, job)  # another node has put its link there
            os.rename(moved, path if meanwhile else _unused_name(path))


def is_log_name(name: str) -> bool:
    """Check whether a name is one in a job's log folder: workerlog.3, attempt1, endpoints.log, train.log."""
    stem, _, number = name.partition(".")
    restart = name.startswith("attempt") and name[len("attempt") :].isdigit()
    return (stem in LOG_NAMES and number.isdigit()) or restart or name in _NAMES


def _unused_name(path: str) -> str:
    """Return the path with .old, .old2, ... appended, the first that does not exist."""
    found, number = f"{path}.old", 1
    while os.path.lexists(found):
        number += 1
        found = f"{path}.old{number}"
    return found
