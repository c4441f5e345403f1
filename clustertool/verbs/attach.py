"""inv attach follows a running job as run does, Ctrl+C included."""

from __future__ import annotations

from clustertool.fleet.fleet import Fleet
from clustertool.show.prefix import RankLines
from clustertool.verbs import load_config, report_outcome, signals
from clustertool.verbs.follow_session import FollowSession, Inbox
from clustertool.verbs.jobs import attach_to, require_known
from clustertool.verbs.run import finish
from clustertool.verbs.run_request import wanted
from clustertool.verbs.verb import Call, User, whole
from clustertool.watch.sanitize import mask


def attach(call: Call) -> None:
    """Follow a running job to its end; Ctrl+C stops it on all nodes."""
    logs, tail = wanted(call), whole(call.given.tail, "--tail")
    cluster = load_config.cluster(call, start_local=False)
    inbox = Inbox()
    with Fleet(cluster, signals.check, inbox.put, User()) as fleet:
        fleet.open()
        job = attach_to(fleet, call.given.job)
        require_known(job)
        hide = mask(list(load_config.known_secrets(cluster).values()))
        follow = FollowSession(call, fleet, inbox, job["id"], RankLines(call.terminal, hide=hide))
        call.terminal.note(f"job {job['id']}: {job['state']}")
        follow.start({"logs": logs, "tail": tail}, cluster.grace)
        follow.run()
        if follow.detached:
            return
        finish(call, report_outcome.tell(call, fleet, follow, hide), follow)
