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
    """Show the logs of a job that is placed on this node, in --log-dir, else in the folder of --job-workspace."""
    if spec["log_dir"]:
        _show_in(os.path.normpath(os.path.join(spec["work_dir"], spec["log_dir"])), spec)
    elif spec["work_dir"] != spec["job_dir"]:  # --job-workspace: DIR/log and DIR/nodefile show the newest job
        for name in ("log", "nodefile"):
            _link(os.path.join(spec["work_dir"], name), JobPaths.at(spec["job_dir"]).of(name), spec["work_dir"])


def _show_in(folder: str, spec: Spec) -> None:
    """Make `folder` a link to the logs. It gets links to them if it is a folder already, or may have those of other nodes."""
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
            _link(folder, logs, spec["work_dir"])
            return
        clear(folder, spec["job"])
        of_ranks = [log for one in spec["processes"] for log in (one["log"], JobPaths.first_log(one["role"]))]
        for name in {*os.listdir(logs), *map(os.path.basename, of_ranks)}:
            _link(os.path.join(folder, name), os.path.join(logs, name), spec["work_dir"])


def _link(place_: str, target: str, top: str) -> None:
    """Make a link to something of a job, where nothing is but such a link.

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
            os.rename(moved, path if meanwhile else _unused_name(path))


def is_name(name: str) -> bool:
    """Return whether it is a name in a job's log folder: workerlog.3, attempt1, endpoints.log, train.log."""
    stem, _, number = name.partition(".")
    restart = name.startswith("attempt") and name[len("attempt") :].isdigit()
    return (stem in LOG_NAMES and number.isdigit()) or restart or name in _NAMES


def _unused_name(path: str) -> str:
    """Return a name like this one that nothing has."""
    found, number = f"{path}.old", 1
    while os.path.lexists(found):
        number += 1
        found = f"{path}.old{number}"
    return found
