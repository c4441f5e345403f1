"""The probe of `run` reads the facts of each probe, what is left of jobs, and the earlier jobs that a new one may belong to."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Dict, List, Sequence, Tuple

from clustertool.errors import PreflightError
from clustertool.model.job.node_status import EarlierRow
from clustertool.node.jobs import remains
from clustertool.node.jobs.queries import known_part
from clustertool.node.jobs.records import Record, find
from clustertool.node.probe.probe import probe, timed
from clustertool.node.storage import tree_copy
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import EarlierWanted, ProbeRequest

_EARLIER = 20  # jobs of one kind
_FILES = 10  # names of one job


def probe_for_run(node: NodeContext, request: ProbeRequest) -> ProbeAnswer:
    """Collect the facts of each probe, `leftovers` of jobs, and `earlier` jobs. Needs the field `earlier`."""
    began = time.monotonic()
    answer = probe(node, request)
    answer["leftovers"] = remains.without_caretakers(answer["root"], remains.find_living())
    answer["earlier"] = list_earlier(node, request["earlier"], answer["problems"])
    return timed(answer, began)


def list_earlier(
    node: NodeContext, wanted: EarlierWanted, problems: List[Tuple[str, str, str, str]]
) -> List[Dict[str, object]]:
    """List the jobs that a new one may belong to, the 20 newest ones of each kind.

    Those are the ones that --job-id or --resume mean, or of the same name or workspace. `problems` gets what keeps the node
    from reading its jobs.
    """
    try:
        found = find(node.root, node.entry, os.uname().nodename)
    except PreflightError as error:
        problems.append(("root", "error", error.what, error.fix))
        return []
    chosen: Dict[str, Record] = {}
    for is_wanted in (_has_asked_id, _is_resumed, _same_work):
        fitting = [record for record in found if is_wanted(record, wanted)]
        chosen.update((record.job, record) for record in fitting[:_EARLIER])
    return [_earlier_row(record, wanted["keep"]) for record in chosen.values()]


def _has_asked_id(record: Record, wanted: EarlierWanted) -> bool:
    """Check whether a job has the id that is asked for, or this id with a number after it, which is then not free."""
    asked = wanted["asked"]
    head, _, number = record.job.rpartition("-")
    return bool(asked) and (asked in (record.job, record.asked) or (head == asked and number.isdigit()))


def _is_resumed(record: Record, wanted: EarlierWanted) -> bool:
    """Check whether the job is the one that --resume names."""
    return bool(wanted["resume"]) and record.called(wanted["resume"])


def _same_work(record: Record, wanted: EarlierWanted) -> bool:
    """Check whether a job has the name of the new one, or the same owner and workspace."""
    header = record.header
    if wanted["name"] and wanted["name"] in (record.name, record.asked):
        return True
    place = header.get("owner"), header.get("workspace", "")
    return bool(wanted["workspace"]) and place == (wanted["owner"], wanted["workspace"])


def _earlier_row(record: Record, keep: Sequence[str]) -> Dict[str, object]:
    """Build the fields of an EarlierRow: the summary of a job, and what is there of its output and files. keep: of --keep."""
    summary = record.summary(known_part(record))
    return {
        **{name: summary[name] for name in EarlierRow._fields if name in summary},  # type: ignore[literal-required]
        "reason": "",
        "workspace": record.header.get("workspace", ""),
        "output": tree_copy.has_files(record.output),
        "kept": [path for path in keep if os.path.exists(record.paths.of(path))],
        "files": _own_files(record),
    }


def _own_files(record: Record) -> List[str]:
    """List up to 10 files that the job's programs have written into its directory: not in folders there, not hidden.

    The workspace was copied before the supervisor wrote its first event. A working directory that jobs share keeps its files.
    """
    began = record.header.get("t")
    found: List[str] = []
    if not isinstance(began, (int, float)) or record.header.get("work_dir", record.paths.dir) != record.paths.dir:
        return found
    with contextlib.suppress(OSError), os.scandir(record.paths.dir) as entries:
        for entry in entries:
            regular = entry.is_file(follow_symlinks=False) and not entry.name.startswith(".")
            if regular and entry.stat(follow_symlinks=False).st_ctime > began:
                found.append(entry.name)
    return sorted(found)[:_FILES]
