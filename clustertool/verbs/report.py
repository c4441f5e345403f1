"""inv report writes one self-contained HTML page about a job, from the nodes' own records, during the job and after it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from clustertool.errors import NotFound, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.paths import folder_of
from clustertool.model.quantities import human_bytes
from clustertool.model.wire.agent_answers import ReportAnswer
from clustertool.model.wire.messages import REPORT
from clustertool.show.report_html import page
from clustertool.verbs import load_config
from clustertool.verbs.jobs import ListedJob, attach_to, doubt, fleet_of
from clustertool.verbs.status import read
from clustertool.verbs.verb import Call
from clustertool.watch.report_model import tell
from clustertool.watch.sanitize import mask

_POINTS = 40_000  # values of one kind in the whole page
_MOST, _LEAST = 240, 40  # of one curve


def report(call: Call) -> None:
    """Write one HTML page about a job."""
    to = _target(call.given.to) if call.given.to else None
    cluster = load_config.cluster(call, start_local=False)
    with fleet_of(cluster) as fleet:
        job = attach_to(fleet, call.given.job)
        points = max(_LEAST, min(_MOST, _POINTS // max(1, _processes(job))))
        answers = fleet.ask_all(REPORT({"job": job["id"], "points": points}))
        doubt(fleet, job["id"], answers)
        if not any(answer["events"] for answer in answers.values()):
            raise_all(list(fleet.failed.values()))
            raise NotFound(f"job {job['id']} has not started on any node that answered", "inv jobs lists the jobs")
        secrets = load_config.known_secrets(fleet.cluster)
        notes = [*_silent(fleet, answers), *_unmasked(call, cluster.secrets, secrets)]
        story = tell(read(answers), answers, mask(secrets.values()), notes)
        text = page(story, time.time())
        to = to or Path(f"{folder_of(job['id'])}.html")
        _write(to, text)
        size = len(text.encode())
        if call.json:
            behind = [[rank.role, rank.rank, rank.behind] for rank in story.ranks if rank.behind]
            call.answer({"job": story.job, "file": str(to), "bytes": size, "state": story.state, "stragglers": behind})
        else:
            call.terminal.line(f"job {story.job}: {story.state} -> {to} ({human_bytes(size)})")


def _processes(job: ListedJob) -> int:
    """Before the nodes' records are read only their number is known: eight on each."""
    return 8 * int(job["total"])


def _target(name: str) -> Path:
    """Checked before any connection. Raises UsageError."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"--to {name} is a folder", "name a file, such as report.html")
    if not path.parent.is_dir():
        raise UsageError(f"--to {name}: there is no folder {path.parent}", "make it first")
    return path


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a page that is open in a browser is replaced, never half written.

    The new file has a random name and is made here: in a folder as /tmp another user could have put a link in its place.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another file with --to") from None


def _silent(fleet: Fleet, answers: Mapping[int, ReportAnswer]) -> list[str]:
    """Nodes whose own records are missing; records of others about them are on the page."""
    notes = []
    for host in fleet.cluster.hosts:
        error = fleet.failed.get(host.index)
        if host.index in answers and error:
            notes.append(f"{host.name}: {error.what}")
        elif error:
            notes.append(f"{host.name} did not answer, its records are missing here: {error.what}")
        elif host.index not in answers:
            notes.append(f"{host.name} has no records of this job (any more)")
    return notes


def _unmasked(call: Call, names: Iterable[str], known: Container[str]) -> list[str]:
    """SECRETS whose values are unknown here may be in the lines of a log."""
    missing = [name for name in names if name not in known]
    if not missing:
        return []
    text = f"SECRETS names {', '.join(missing)}, not set where this page was made: what programs printed of it is not masked"
    call.terminal.warn(text)
    return [text]
