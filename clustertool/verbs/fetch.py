"""inv fetch copies a job's output to this machine, inv report writes a page about a job, inv metrics what its ranks print.

Nothing is written outside the requested folder. The page is one self-contained HTML file, made from the nodes' own records,
during the job and after it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from pathlib import Path

from clustertool.actions.build_report import build_report
from clustertool.actions.fetch_output import fetch_output, require_inside
from clustertool.actions.find_jobs import attach_to
from clustertool.actions.read_status import read
from clustertool.errors import NotFound, UsageError, raise_all
from clustertool.fleet import this_user
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.flight_dumps import compare_dumps, gather_dumps
from clustertool.model.hints import PROGRAM
from clustertool.model.job.progress import prometheus_text
from clustertool.model.paths import FLIGHT, LOGS_MARK, folder_of
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.messages import REPORT
from clustertool.show.job_text import shared_files
from clustertool.show.metrics_view import csv_text, metrics_table
from clustertool.show.report_html import page
from clustertool.verbs import signals
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call, role_of
from clustertool.watch.rank_metrics import newest_rows, read_rows

_ROWS = 200_000  # of all ranks of a job in the answer of metrics


def fetch(call: Call) -> None:
    """Copy the output of a job to this machine, and print what was copied for each rank, with warnings for files left out.

    A node that holds the output is released after that, unless --path names something else. Raises UsageError for options that
    are not valid, NotFound if the files are gone, and the errors of nodes. See actions/fetch_output.py.
    """
    given = call.given
    require_inside(given.path)
    if given.rank != "all" and not given.rank.isdecimal():
        raise UsageError(f"--rank {given.rank!r} is not valid", "a rank, or all")
    role = role_of(given.role)
    with engine_of(call, whole=given.rank == "all", newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, given.job)["id"]
        to = this_user.expand_home(given.to or folder_of(job))
        if given.path.rstrip("/") == FLIGHT:
            _fetch_dumps(call, fleet, job, to)
            return
        try:
            found = fetch_output(fleet, signals.check, job, to, given.rank, role, given.path)
        except NotFound as error:
            raise engine.without_files(job, error) from None
        for rank, done in found.items():
            process = f"rank {rank}" if role == "trainer" else f"{role} {rank}"
            for text in shared_files(done.shared):
                call.terminal.warn(f"{process}: {text}")
            if done.files:
                size = human_bytes(done.bytes)
                call.terminal.line(f"{process}: {count(done.files, 'file')}, {size} -> {done.place}")
                continue
            if done.place.is_dir() and any(done.place.iterdir()):
                call.terminal.line(f"{process}: nothing new to copy -> {done.place}")
                continue
            with contextlib.suppress(OSError):
                done.place.rmdir()
            of_job = " of this job" if done.shared else ""
            what = f"nothing to copy: there are no files{of_job} in {given.path or 'output'} on {done.node}"
            call.terminal.warn(f"{process}: {what} ({PROGRAM} logs --job {job} --files lists log/)")
        if given.path in ("", "output") and engine.holds_output(job):
            engine.release(job)
        if not given.to and to.is_dir():
            with contextlib.suppress(OSError):
                (to / LOGS_MARK).touch()  # its name alone may not show that it is no part of a workspace: --job-id
        ranks = {
            str(rank): {
                "files": done.files,
                "bytes": done.bytes,
                "to": str(done.place),
                "left_out": [[file.path, file.origin.job] for file in done.shared if not file.taken],
            }
            for rank, done in found.items()
        }
        call.answer({"job": job, "to": str(to), "ranks": ranks})


def _fetch_dumps(call: Call, fleet: Fleet, job: str, to: Path) -> None:
    """Copy the dumps of torch's flight recorder of all ranks to this machine, and print what torchfrtrace finds in them."""
    if not call.given.to:
        to /= "flight"
    dumps = gather_dumps(fleet, signals.check, job, to)
    compared = compare_dumps(dumps)
    call.answer({"job": job, "to": str(to), "dumps": [path.name for path in dumps], "torchfrtrace": compared})
    call.terminal.line(f"job {job}: {count(len(dumps), 'dump')} -> {to}")
    if compared and not call.json:
        call.terminal.block(compared)
    raise_all(list(fleet.failed.values()))


# -- report ------------------------------------------------------------------------------------------------------------


def report(call: Call) -> None:
    """Build the report of a job, write it to --to or JOB<id>.html, and print its place, or answer with JSON."""
    to = page_path(call.given.to) if call.given.to else None
    with engine_of(call, newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, call.given.job)
        story = build_report(fleet, job, call)
        text = page(story, time.time())
        to = to or Path(f"{folder_of(job['id'])}.html")
        write_page(to, text)
        size = len(text.encode())
        if call.json:
            behind = [[rank.role, rank.rank, rank.behind] for rank in story.ranks if rank.behind]
            about = {"job": story.job, "file": str(to), "bytes": size, "state": story.state, "stragglers": behind}
            call.answer({**about, "container": story.container.as_dict() if story.container else None})
        else:
            call.terminal.line(f"job {story.job}: {story.state} -> {to} ({human_bytes(size)})")
            if story.container:
                call.terminal.line(f"container: {story.container.text}")


def metrics(call: Call) -> None:
    """Print the newest numbers of each rank as a table, or all as CSV or JSON, or as Prometheus has them; or write a file.

    Numbers of a time that no record has are "" in CSV, null in JSON.
    """
    given = call.given
    if given.csv + given.prometheus + call.json > 1:
        raise UsageError("--csv, --json and --prometheus are three forms of one answer", "give one of them")
    to = page_path(given.to) if given.to else None
    with engine_of(call, newest=True) as engine:
        about = attach_to(engine, given.job)
        job, points = about["id"], _ROWS // (8 * max(1, about["total"]))  # of a rank, with 8 ranks on a node
        answers = engine.fleet.ask_all(REPORT({"job": job, "points": points}))
        status = read(answers)
        rows = sorted(read_rows(status, answers), key=lambda row: (row.t, row.key))
        newest = {key: its[-1].numbers for key, its in newest_rows(status, rows).items()}
        plain = [row.as_dict() for row in rows]
        answer = {"job": job, "rows": plain}
        if call.json and to is None:
            call.answer(answer)
        elif given.csv or given.prometheus or to is not None:
            text = json.dumps(answer) if call.json else csv_text(plain)
            if given.prometheus:
                text = prometheus_text(job, newest)
            if to is None:
                call.terminal.block(text.rstrip("\n"))
                return
            write_page(to, text)
            call.answer({"job": job, "file": str(to), "bytes": len(text.encode())})
            call.terminal.line(f"job {job}: {count(len(rows), 'row')} -> {to}")
        else:
            metrics_table(newest, call.terminal)


def page_path(name: str) -> Path:
    """Return the path of --to. Raises UsageError if it is a folder, or if its folder does not exist."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"--to {name} is a folder", "name a file, such as report.html")
    if not path.parent.is_dir():
        raise UsageError(f"--to {name}: there is no folder {path.parent}", "make it first")
    return path


def write_page(path: Path, text: str) -> None:
    """Write a new file and rename it to `path`, so that a browser never reads half of a page.

    Raises UsageError if that fails; then the new file is removed. The new file has a random name and must not exist: in a
    folder as /tmp another user could have put a link in its place.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another file with --to") from None
