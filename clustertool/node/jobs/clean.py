"""This module removes a job's files on its node: its directory, its entry in the ledger, the links to it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

from clustertool.errors import ClustertoolError, NotFound
from clustertool.model.paths import OURS
from clustertool.node.jobs import ledger, queries
from clustertool.node.jobs.records import Record, require_ended
from clustertool.node.jobs.stop_request import lives, remove_containers
from clustertool.node.storage import files
from clustertool.node.system import mounts
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import CleanAnswer
    from clustertool.model.wire.agent_requests import CleanRequest

_REPORT = "report it with the line above"
_RUNS = -1  # the size of a job that is not removed because it runs


def clean(node: NodeContext, request: CleanRequest) -> CleanAnswer:
    """Remove the ended jobs that the request names, or all, if they are older than its limit.

    Answers {removed: ids, running: ids of jobs of which something lives, freed: bytes, kept: {id: (error, fix)} of jobs that
    stay}. Jobs in `spare` are left out. With `dry` they are only listed.
    """
    removed: List[str] = []
    running: List[str] = []
    freed = 0
    kept: Dict[str, Tuple[str, str]] = {}
    for record in queries.records(node, request):
        if record.job in request.get("spare", ()):
            continue
        step()
        try:
            size = _clean_one(record, request)
        except ClustertoolError as error:
            kept[record.job] = (error.what, error.fix)
            continue
        except Exception as error:  # noqa: BLE001 - one job's records must not keep the others
            kept[record.job] = (queries.bug(error), _REPORT)
            continue
        if size == _RUNS:
            running.append(record.job)
        elif size is not None:
            removed.append(record.job)
            freed += size
    return {"removed": removed, "running": running, "freed": freed, "kept": kept}


def _clean_one(record: Record, request: CleanRequest) -> Optional[int]:
    """Remove a job's containers, the links to it, its directory and its entry, and return the bytes freed; 0 in a dry run.

    Of a named job of another machine without a directory, only the entry is removed. Returns None for a job that is too young,
    _RUNS for one that lives. Raises ClustertoolError if it is not known whether it lives, or it cannot be removed wholly.
    """
    if request.get("exact") and record.other_machine() and not os.path.lexists(record.paths.dir):
        if not request.get("dry"):  # the user has removed its directory and names it: only the ledger's copy is left
            ledger.remove(record.paths)
        return 0
    if record.here:
        if lives(record):
            return _RUNS
    else:
        require_ended(record, request.get("ended", ()))
    if request["now"] - record.header["created"] < request.get("older_than", 0.0):
        return None  # by the laptop's clock, as `created` is
    mounts.require_none(record.paths.dir)  # before anything is changed
    if request.get("dry"):
        return 0
    if record.here and not record.own().clean:
        remove_containers(record)
    _remove_links(record)
    return ledger.remove_job(record.paths.dir)


def _remove_links(record: Record) -> None:
    """Remove the links into a job's directory from its working directory and its --log-dir; ignore errors.

    The directory to which they lead is removed next.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, NotFound):
        with files.closing(files.open_job_dir(record.paths.dir)) as job:
            spec = json.loads(files.read(job, f"{OURS}/spec.json"))
        shown = os.path.normpath(os.path.join(spec["work_dir"], spec["log_dir"] or "log"))
        inside = [os.path.join(shown, name) for name in os.listdir(shown)] if not os.path.islink(shown) else []
        for link in [shown, os.path.join(spec["work_dir"], "nodefile"), *inside]:
            if os.path.islink(link) and os.path.realpath(link).startswith(os.path.realpath(record.paths.dir) + "/"):
                os.unlink(link)
