"""Fetching copies the output of a job to this machine, never outside the requested folder."""

from __future__ import annotations

import contextlib
import posixpath
from dataclasses import dataclass
from pathlib import Path

from clustertool.actions.read_status import read
from clustertool.errors import NotFound, UsageError, raise_all
from clustertool.fleet.fleet import Check, Fleet
from clustertool.fleet.transfer.receive import receive, receive_file
from clustertool.model.hints import PROGRAM
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_answers import StatusAnswer
from clustertool.model.wire.messages import STATUS

_CLEANED = "nothing to do, if they were removed on purpose"


@dataclass(frozen=True)
class Fetched:
    """What one rank's node has sent. place: the folder that has it now, or the file."""

    node: str
    place: Path
    files: int
    bytes: int


def is_inside(path: str) -> bool:
    """Whether it is a relative path that does not leave its folder."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def require_inside(path: str) -> None:
    """Raise UsageError for a path that leaves the job's directory."""
    if path and not is_inside(path):
        what = f"--path {path!r} is not inside the job's directory"
        raise UsageError(what, "the relative path of a folder or a file, such as log or output/model.pt")


def fetch_output(
    fleet: Fleet, check: Check, job: str, to: Path, rank: str = "0", role: str = "trainer", path: str = ""
) -> dict[int, Fetched]:
    """Copy `path` of the job (default: its output) of one rank into `to`, of all ranks into a folder each in it.

    rank: a number, or "all". Raises NotFound, DispatchError, Unreachable. With "all", fleet.failed has the nodes without
    an answer.
    """
    answers = fleet.ask_all(STATUS({"job": job}))
    places = _places(fleet, job, answers, role, rank)
    found = {}
    for number, node in places.items():
        folder = _folder(to, rank, role, number)
        found[number] = Fetched(fleet.name(node), *_pull(fleet, check, job, answers[node], node, path, folder))
    return found


def _folder(to: Path, asked: str, role: str, rank: int) -> Path:
    """DIR for one rank; of all trainers DIR/rank3, of another role DIR/pserver3."""
    return to / f"{'rank' if role == 'trainer' else role}{rank}" if asked == "all" else to


def _places(fleet: Fleet, job: str, answers: dict[int, StatusAnswer], role: str, asked: str) -> dict[int, int]:
    """Rank within the role -> the node that ran it, of nodes that answered. Raises what kept a node from it, or NotFound."""
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


def _pull(
    fleet: Fleet, check: Check, job: str, answer: StatusAnswer, node: int, path: str, to: Path
) -> tuple[Path, int, int]:
    """(what has been written, files, bytes). The job's own directory first, then the workspace that lay on the node already.

    In each of them `path` is a folder, else a file.
    """
    header = next((event for event in answer["events"] if event["type"] == "job"), None)
    recorded = header.get("output", "output") if header else "output"
    wanted = path.rstrip("/") or (recorded if is_inside(recorded) else "output")
    work_dir = header.get("work_dir", answer["dir"]) if header else answer["dir"]
    empty = False
    for place in dict.fromkeys((answer["dir"], work_dir)):
        with contextlib.suppress(NotFound):
            sent = receive(fleet, node, posixpath.join(place, wanted), to, check)
            if sent.files:
                return to, sent.files, sent.bytes
            empty = True
            continue
        if path:
            with contextlib.suppress(NotFound):
                sent = receive_file(fleet, node, place, wanted, to, check)
                return to / posixpath.basename(wanted), sent.files, sent.bytes
    if empty:
        return to, 0, 0
    fix = f"{PROGRAM} logs --job {job} --files lists log/; --path names a folder or a file of the job's directory"
    raise NotFound(f"there is no file or folder {wanted!r} of this job", fix, fleet.name(node))
