"""inv report writes one self-contained HTML page about a job, from the nodes' own records, during the job and after it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from clustertool.actions.build_report import build_report
from clustertool.actions.find_jobs import attach_to
from clustertool.errors import UsageError
from clustertool.model.paths import folder_of
from clustertool.model.quantities import human_bytes
from clustertool.show.report_html import page
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call


def report(call: Call) -> None:
    to = _target(call.given.to) if call.given.to else None
    with engine_of(call, newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, call.given.job)
        story = build_report(fleet, job, call)
        text = page(story, time.time())
        to = to or Path(f"{folder_of(job['id'])}.html")
        _write(to, text)
        size = len(text.encode())
        if call.json:
            behind = [[rank.role, rank.rank, rank.behind] for rank in story.ranks if rank.behind]
            about = {"job": story.job, "file": str(to), "bytes": size, "state": story.state, "stragglers": behind}
            call.answer({**about, "container": story.container.as_dict() if story.container else None})
        else:
            call.terminal.line(f"job {story.job}: {story.state} -> {to} ({human_bytes(size)})")
            if story.container:
                call.terminal.line(f"container: {story.container.text}")


def _target(name: str) -> Path:
    """Check the path of --to before any connection. Raises UsageError."""
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
