"""inv attach follows a running job as run does, Ctrl+C included."""

from __future__ import annotations

from clustertool.actions import load_config
from clustertool.actions.find_jobs import attach_to, is_waiting, recorded, require_known
from clustertool.actions.follow_job import Inbox
from clustertool.errors import UsageError
from clustertool.model.masking import mask
from clustertool.verbs import log_copy
from clustertool.verbs.jobs import join_log, opened, show_join_log
from clustertool.verbs.run import follow_starts, wait_for_start
from clustertool.verbs.run_request import wanted
from clustertool.verbs.verb import Call, whole


def attach(call: Call) -> None:
    logs, tail = wanted(call), whole(call.given.tail, "--tail")
    if tail is not None and (call.given.log_dir or call.given.fetch_logs):
        raise UsageError(
            "--tail begins in the middle of a log, and --log-dir writes whole logs", "leave one of them out"
        )
    inbox = Inbox()
    with opened(call, inbox.put, newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, call.given.job, queued=True)
        if is_waiting(engine, job):
            if not wait_for_start(call, engine, job["id"], fleet.cluster.grace):
                return
            fleet, job = engine.fleet, attach_to(engine, job["id"], exact=True)
        if not recorded(job):
            show_join_log(call, join_log(engine, job["id"]))
        require_known(job)
        log_copy.prepare(call)
        hide = mask(load_config.known_secrets(fleet.cluster).values())
        call.terminal.note(f"job {job['id']}: {job['state']}")
        follow_starts(call, engine, inbox, job["id"], hide, {"logs": logs, "tail": tail}, fleet.cluster.grace)
