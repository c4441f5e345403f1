"""This module packs the records of a pod's node into the last line of its log."""

from __future__ import annotations

import contextlib
import os
from typing import Dict, List

from clustertool.model.kubernetes.pod_record import EVENTS, GROWTH, LEDGER, SPEC, USAGE, Log
from clustertool.model.masking import HIDDEN
from clustertool.model.paths import CUT, LOG_NAMES, JobPaths
from clustertool.node.jobs import ledger
from clustertool.node.storage import files

_MOST = 4 << 20  # bytes of a file: its first line, and its end


def read_records(paths: JobPaths) -> Dict[str, bytes]:
    """Read the records that are there, by their names, without the token of the job: nodes of it may still listen."""
    found: Dict[str, bytes] = {}
    places = {EVENTS: paths.events, LEDGER: paths.ledger, SPEC: paths.spec, GROWTH: paths.growth, USAGE: paths.usage}
    for name, path in places.items():
        with contextlib.suppress(OSError):
            found[name] = _read(path)
    token = str(ledger.read(paths).get("token") or "").encode()
    return {name: data.replace(token, HIDDEN.encode()) for name, data in found.items()} if token else found


def _read(path: str) -> bytes:
    """Read the first line and the newest part of a file. Raises OSError."""
    with open(files.open_file(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= _MOST:
            return file.read(_MOST)
        first = file.readline(_MOST)
        file.seek(size - _MOST + len(first))
        file.readline(_MOST)
        return first + file.read(_MOST)


def sizes_of_logs(paths: JobPaths) -> List[Log]:
    """List the logs of the ranks with their sizes, by their names in the job's directory."""
    found: Dict[str, int] = {}
    with contextlib.suppress(OSError):
        job = files.open_job_dir(paths.dir)
        with files.closing(job):
            top = os.path.join(files.path_of(job), paths.written("log"))
            for folder, _, names in os.walk(top):
                place = os.path.relpath(folder, os.path.dirname(top))
                for name in sorted(names):
                    path = os.path.join(folder, name)
                    if name.partition(".")[0] in LOG_NAMES and not os.path.islink(path):
                        log = f"{place}/{name[: -len(CUT)] if name.endswith(CUT) else name}"
                        found[log] = found.get(log, 0) + os.lstat(path).st_size
    return list(found.items())


def has_output(folder: str) -> bool:
    """Check whether there is anything in a folder, which may be a link to one."""
    with contextlib.suppress(OSError):
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    return False


def leave_message(data: bytes, path: str = "/dev/termination-log") -> None:
    """Write the termination message of the container, if its runtime wants one: then the file is there."""
    with contextlib.suppress(OSError):
        with files.closing(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)) as fd:
            files.write_all(fd, data)
