"""inv fetch copies a job's output to this machine, never outside the requested folder."""

from __future__ import annotations

import posixpath
from pathlib import Path

from clustertool.errors import NotFound, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer.receive import receive
from clustertool.model.paths import folder_of
from clustertool.model.quantities import human_bytes
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_answers import StatusAnswer
from clustertool.show.table import count
from clustertool.verbs import load_config, signals
from clustertool.verbs.jobs import attach_to, fleet_of
from clustertool.verbs.status import ask_status, read
from clustertool.verbs.verb import Call, role_of

_CLEANED = "nothing to do, if they were removed on purpose"


def fetch(call: Call) -> None:
    """Copy a job's results to this machine."""
    given = call.given
    if given.path.startswith("/") or ".." in given.path.split("/"):
        raise UsageError(f"--path {given.path!r}", "a folder inside the job's directory, such as output or log")
    if given.rank != "all" and not given.rank.isdecimal():
        raise UsageError(f"--rank {given.rank!r}", "a rank, or all")
    role = role_of(given.role)
    cluster = load_config.cluster(call, start_local=False)
    with fleet_of(cluster, whole=given.rank == "all") as fleet:
        job = attach_to(fleet, given.job)["id"]
        answers = ask_status(fleet, job)
        places = _places(fleet, job, answers, role, given.rank)
        to = Path(given.to or folder_of(job))
        folders = {rank: _folder(to, given.rank, role, rank) for rank in places}
        fetched = {rank: _pull(fleet, answers[node], node, given.path, folders[rank]) for rank, node in places.items()}
        for rank, (files, size) in fetched.items():
            process = f"rank {rank}" if role == "trainer" else f"{role} {rank}"
            call.terminal.line(f"{process}: {count(files, 'file')}, {human_bytes(size)} -> {folders[rank]}")
        if call.json:
            ranks = {str(rank): {"files": files, "bytes": size} for rank, (files, size) in fetched.items()}
            call.answer({"job": job, "to": str(to), "ranks": ranks})


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
        raise NotFound(
            f"job {job} has no {name} {asked}" + " on a node that has its records" * (wanted is not None), have
        )
    for node in set(planned.values()) - set(answers) - set(fleet.failed) if asked == "all" else ():
        fleet.failed[node] = NotFound(f"it has no records of job {job} any more", _CLEANED, fleet.name(node))
    return found


def _pull(fleet: Fleet, answer: StatusAnswer, node: int, path: str, to: Path) -> tuple[int, int]:
    """(files, bytes). The job's own directory first, then the workspace that lay on the node already."""
    header = next((event for event in answer["events"] if event["type"] == "job"), None)
    wanted = path or (header.get("output", "output") if header else "output")
    first = posixpath.join(answer["dir"], wanted)
    second = posixpath.join(header.get("work_dir", answer["dir"]) if header else answer["dir"], wanted)
    sent = None
    try:
        sent = receive(fleet, node, first, to, signals.check)
    except NotFound:
        if second == first:
            raise
    if second != first and (sent is None or not sent.files):
        sent = receive(fleet, node, second, to, signals.check)
    assert sent is not None
    return sent.files, sent.bytes
