"""Fetching copies the output of a job to this machine, never outside the requested folder."""

from __future__ import annotations

import contextlib
import posixpath
from dataclasses import dataclass
from pathlib import Path

from clustertool.actions.read_status import read
from clustertool.errors import NotFound, UsageError, raise_all
from clustertool.fleet.fleet import Check, Fleet
from clustertool.fleet.transfer.receive import NodeFolder
from clustertool.fleet.transfer.rsync_session import Copied
from clustertool.model.hints import PROGRAM
from clustertool.model.job.file_origin import FileOrigin, SharedFile, WriteSpan, origin_of
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_answers import StatusAnswer
from clustertool.model.wire.messages import SPANS, STATUS

_CLEANED = "nothing to do, if they were removed on purpose"


@dataclass(frozen=True)
class Fetched:
    """What was copied from the node of one rank. place: the folder or file on this machine that has it now.

    shared: files that are not surely of the job: another job could write to their folder, or they are older than the job.
    """

    node: str
    place: Path
    files: int
    bytes: int
    shared: tuple[SharedFile, ...] = ()


def is_inside(path: str) -> bool:
    """Check that a path is relative, not empty, and has no ".." and no NUL, so that it does not leave its folder."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def require_inside(path: str) -> None:
    """Raise UsageError for a --path that leaves the job's directory. "" is valid: the output."""
    if path and not is_inside(path):
        what = f"--path {path!r} is not inside the job's directory"
        raise UsageError(what, "the relative path of a folder or a file, such as log or output/model.pt")


def fetch_output(
    fleet: Fleet, check: Check, job: str, to: Path, rank: str = "0", role: str = "trainer", path: str = ""
) -> dict[int, Fetched]:
    """Copy `path` of a job (default: its output) from the nodes to this machine, and return {rank: what was copied}.

    rank: a number, whose files go into `to`, or "all": those of each rank of the role go into a folder of its own in `to`.
    With "all", fleet.failed gets the errors of nodes without an answer, or without records. Raises NotFound for a rank or path
    that the job does not have, Unreachable for a node that does not answer, and DispatchError for a copy that has failed.
    """
    answers = fleet.ask_all(STATUS({"job": job}))
    places = _nodes_of_ranks(fleet, job, answers, role, rank)
    found = {}
    for number, node in places.items():
        folder = _folder_of_rank(to, rank, role, number)
        found[number] = _copy_from_node(fleet, check, job, answers[node], node, path, folder)
    return found


def _folder_of_rank(to: Path, asked: str, role: str, rank: int) -> Path:
    """Return the folder for the files of a rank: `to`; with "all" to/rank3 for a trainer, to/pserver3 for another role."""
    return to / f"{'rank' if role == 'trainer' else role}{rank}" if asked == "all" else to


def _nodes_of_ranks(fleet: Fleet, job: str, answers: dict[int, StatusAnswer], role: str, asked: str) -> dict[int, int]:
    """Map the requested ranks of a role ("all" or a number) to the nodes that ran them, of nodes that have answered.

    With "all", fleet.failed gets NotFound for each node that has no records. Raises the nodes' errors if no such rank is left,
    else NotFound.
    """
    planned = {process.rank: process.node for process in read(answers).of(role)}
    found = {rank: node for rank, node in planned.items() if node in answers and (asked == "all" or rank == int(asked))}
    if not found:
        wanted = planned.get(int(asked)) if asked != "all" else None
        raise_all([error for node, error in fleet.failed.items() if wanted in (None, node)])
        name = role_name(role)
        have = f"it has {name}s {min(planned)} to {max(planned)}" if planned else f"it has no {name}s"
        where = "" if wanted is None else " on a node that has its records"
        raise NotFound(f"job {job} has no {name} {asked}{where}", have)
    for node in set(planned.values()) - set(answers) - set(fleet.failed) if asked == "all" else ():
        fleet.failed[node] = NotFound(f"it has no records of job {job} any more", _CLEANED, fleet.name(node))
    return found


def _copy_from_node(
    fleet: Fleet, check: Check, job: str, answer: StatusAnswer, node: int, path: str, to: Path
) -> Fetched:
    """Copy `path` of one node into `to`: from the job's directory or, if no files are there, from the one where the job worked.

    In each of them `path` is tried as a folder, then as a file; "" is the recorded output, only as a folder. Returns a Fetched
    without files if all that was found is an empty folder. Raises NotFound if nothing was found.
    """
    header = next((event for event in answer["events"] if event["type"] == "job"), None)
    recorded = header.get("output", "output") if header else "output"
    wanted = path.rstrip("/") or (recorded if is_inside(recorded) else "output")
    work_dir = header.get("work_dir", answer["dir"]) if header else answer["dir"]
    name, empty = fleet.name(node), None
    for place in dict.fromkeys((answer["dir"], work_dir)):
        with contextlib.suppress(NotFound):
            sent, shared = _copy_folder(fleet, check, job, node, place, wanted, to)
            if sent.files or shared:
                return Fetched(name, to, sent.files, sent.bytes, shared)
            empty = Fetched(name, to, 0, 0)
            continue
        if path:
            with contextlib.suppress(NotFound):
                folder = NodeFolder(fleet, node, place)
                entry = folder.find(wanted)
                sent = folder.receive_file(wanted, entry, to, check)
                spans = _ask_write_spans(NodeFolder(fleet, node, posixpath.join(place, wanted)), job, wanted)
                origin = origin_of(entry.changed, *spans) if spans else FileOrigin(True)
                shared = () if origin == FileOrigin(True) else (SharedFile(wanted, origin, True),)
                return Fetched(name, to / posixpath.basename(wanted), sent.files, sent.bytes, shared)
    if empty:
        return empty
    fix = f"{PROGRAM} logs --job {job} --files lists log/; --path names a folder or a file of the job's directory"
    raise NotFound(f"there is no file or folder {wanted!r} of this job", fix, name)


def _copy_folder(
    fleet: Fleet, check: Check, job: str, node: int, place: str, wanted: str, to: Path
) -> tuple[Copied, tuple[SharedFile, ...]]:
    """Copy a folder of a node into `to`; return (what was copied, the files in it that are not surely the job's own).

    Of a folder outside the job's directory, only the files that are of this job by their times are copied; the second list
    has those that were left out, too. place: the job's directory on the node. wanted: the path of the folder in it. Raises
    NotFound if there is no such folder.
    """
    folder = NodeFolder(fleet, node, posixpath.join(place, wanted))
    spans = _ask_write_spans(folder, job, wanted)
    if spans is None:
        return folder.receive(to, check), ()
    entries = [(entry, origin_of(entry.changed, *spans)) for entry in folder.entries()]
    only = [entry for entry, origin in entries if origin.own]
    sent = folder.receive(to, check, only) if only else Copied(0, 0)
    unsure = [(entry, origin) for entry, origin in entries if entry.kind == "file" and origin != FileOrigin(True)]
    return sent, tuple(SharedFile(posixpath.join(wanted, entry.path), origin, origin.own) for entry, origin in unsure)


def _ask_write_spans(at: NodeFolder, job: str, path: str) -> tuple[WriteSpan, list[WriteSpan]] | None:
    """Ask a node when this job could write to a place there, and when other jobs could: (span, spans of the others).

    None for a place in the job's own directory, or in its folder on a volume of pods, where no other job works. In another
    working directory the list is empty if no other job has worked there; files may be older than the job. at: the place, a
    folder or a file. path: the same place, relative to the directory or working directory of a job. Raises the node's errors.
    """
    answer = at.fleet.ask_one(at.node, SPANS({"job": job, "dir": at.path, "path": path}))
    spans = [WriteSpan(*row) for row in answer["spans"]]
    own = next((span for span in spans if span.job == job), None)
    return None if own is None else (own, [span for span in spans if span.job != job])
