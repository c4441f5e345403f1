"""A thousand finished jobs slow no command down."""

from __future__ import annotations

import re
import shutil
import time

from tests.cli import HELLO, Site

JOBS = 1000


def remember(site: Site, node: int, job: str, count: int) -> None:
    """Copies of a finished job's records under other ids, as many runs would have left them."""
    (source,) = [place for place in site.jobs(node) if place.name == f"JOB{job}"]
    events = (source / ".clustertool/events.jsonl").read_text()
    for number in range(count):
        name = f"2020{number:04d}-000000-aaaa"
        ours = site.root(node) / f"JOB{name}" / ".clustertool"
        ours.mkdir(parents=True, mode=0o700)
        (ours / "marker").touch()
        (ours / "events.jsonl").write_text(
            re.sub(r'"created":[0-9.]+', f'"created":{number}', events.replace(job, name))
        )
        shutil.copy(source / ".clustertool/spec.json", ours)


def test_jobs_and_status_of_a_long_history(site) -> None:
    one = site(1)
    job = one.clustertool("run", "-w", HELLO).ends(0).job
    started = time.monotonic()
    one.clustertool("jobs").ends(0)
    few = time.monotonic() - started
    remember(one, 0, job, JOBS)
    listed = one.clustertool("jobs", "--json").ends(0)
    assert len(listed.json["jobs"]) == JOBS + 1
    assert listed.json["jobs"][0]["id"] == job
    status = one.clustertool("status", "--json").ends(0)
    assert status.json["job"] == job
    for done in (listed, status):
        assert done.seconds < few + 10.0  # a second, with room for other work on this machine
