"""--log-dir and --fetch-logs of run and attach copy the logs of a job to a folder of this machine."""

from __future__ import annotations

from pathlib import Path

from clustertool.actions.follow_job import Inbox
from clustertool.actions.read_logs import rest_of_all
from clustertool.errors import ClustertoolError
from clustertool.fleet import this_user
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer import local_logs
from clustertool.fleet.transfer.local_logs import LocalLogs
from clustertool.model.hints import PROGRAM
from clustertool.model.paths import ENDPOINTS
from clustertool.model.quantities import count
from clustertool.verbs import signals
from clustertool.verbs.follow_session import FollowSession
from clustertool.verbs.verb import Call


def prepare(call: Call) -> None:
    """Prepare the folder of --log-dir, so that what it shows is of the job of this command. Raises DataError."""
    if call.given.log_dir:
        local_logs.prepare(_folder(call))


def of_job(call: Call, job: str) -> LocalLogs | None:
    """Create the copy of logs for the session that follows the job, None if no logs are wanted here."""
    if not (call.given.log_dir or call.given.fetch_logs):
        return None
    return LocalLogs(job, _folder(call) if call.given.log_dir else None)


def _folder(call: Call) -> Path:
    return this_user.expanded(call.given.log_dir)


def finish(call: Call, fleet: Fleet, inbox: Inbox, follow: FollowSession) -> None:
    """Copy all logs with --fetch-logs, after the job. What is missing is a warning, because the verdict is the job's.

    A new signal ends it, also SIGHUP.
    """
    if follow.copy is None:
        return
    job, before = follow.watch.status.job, signals.count.total
    signals.count.job = ""  # it is over
    later = f"{PROGRAM} fetch --job {job} --rank all --path log"

    def check() -> None:
        if signals.count.total > before:  # the signal that stopped the job does not end this
            signals.check()

    if call.given.fetch_logs:
        try:
            for piece in rest_of_all(fleet, inbox, job, follow.watch, check):
                follow.copy_piece(piece)
                if follow.copy.failure:  # which is reported
                    break
        except ClustertoolError as error:
            call.terminal.warn(f"not all logs were copied: {error.what}; later: {later}")
    more = "" if call.given.fetch_logs else f" (--fetch-logs writes those of all ranks there; now: {later})"
    logs = follow.copy.written - {ENDPOINTS}
    call.terminal.note(f"logs on this machine: {count(len(logs), 'file')} in {follow.copy.folder}{more}")
