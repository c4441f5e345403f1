"""This module removes a job's files on its node: its directory, its entry in the ledger, the links to it."""

from __future__ import annotations

import contextlib
import json
import os

from clustertool.errors import NotFound
from clustertool.model import paths
from clustertool.node.jobs import ledger
from clustertool.node.storage import files


def remove(job_dir: str) -> int:
    """A job's directory and its entry in the ledger; the bytes freed. Raises NotFound, PreflightError."""
    paths_ = paths.JobPaths(os.path.dirname(job_dir), os.path.basename(job_dir)[3:])
    freed = files.remove_tree(job_dir) if os.path.lexists(job_dir) else 0
    ledger.remove(paths_)
    return freed


def unlink(job_dir: str) -> None:
    """Before a job's directory is removed: the links to it in its working directory, which would lead nowhere."""
    with contextlib.suppress(OSError, ValueError, KeyError, NotFound):
        job = files.open_job_dir(job_dir)
        try:
            spec = json.loads(files.read(job, f"{paths.OURS}/spec.json"))
        finally:
            os.close(job)
        shown = os.path.normpath(os.path.join(spec["work_dir"], spec["log_dir"] or "log"))
        inside = [os.path.join(shown, name) for name in os.listdir(shown)] if not os.path.islink(shown) else []
        for link in [shown, os.path.join(spec["work_dir"], "nodefile"), *inside]:
            if os.path.islink(link) and os.path.realpath(link).startswith(os.path.realpath(job_dir) + "/"):
                os.unlink(link)
