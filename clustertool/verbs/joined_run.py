"""clusterrun typed on every machine: this command shows the part of one machine, from the meeting to the end of the job.

A child process joins the job and runs the ranks (node/join/). This command starts it, shows its reports until the job has
started, and then follows the records of this machine.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from clustertool import errors
from clustertool.actions import join_job, load_config
from clustertool.actions.follow_job import Inbox
from clustertool.engines.job_request import RunRequest, Shown, check_ranks
from clustertool.errors import AuthError, ClustertoolError, InternalError, NotFound, as_one
from clustertool.fleet.fleet import Fleet, stop_everywhere
from clustertool.fleet.joining import typed_machine
from clustertool.fleet.joining.join_process import JoinChild, Report
from clustertool.model.config.folded_names import grouped, ranges
from clustertool.model.job.state_names import StopState
from clustertool.model.joining.join_errors import read_error
from clustertool.model.joining.typed_meeting import TypedMeeting
from clustertool.model.planning.plan import Plan, as_dict
from clustertool.model.quantities import count
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_answers import StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import LEAVE
from clustertool.show.plan_view import plan_tables
from clustertool.show.terminal import RankLines
from clustertool.verbs import signals
from clustertool.verbs.follow_session import Ending, FollowSession, copy_of_logs, logs_to_show, prepare_log_folder
from clustertool.verbs.run import follow_to_end, wait_until_all_run
from clustertool.verbs.verb import Call, User

_LEAVE = 20.0  # seconds that the process may take to leave the meeting, beyond the grace of the job
Ended = Callable[[str, str, list[str]], None]  # the job's id, its directory here, and its logs here


def perform(call: Call, request: RunRequest, meeting: TypedMeeting, folder: Path, ended: Ended) -> None:
    """Join the job on this machine and follow it to its end, or with --dry print the plan. `ended`: is called at the end.

    A lock prevents the same command for the same meeting and machine. Raises the job's error.
    """
    request, made = join_job.plan_before_meeting(request, meeting, folder)
    check_ranks(request, made)
    advice = request.advise(made)
    if advice:
        call.warn(advice)
    secret = join_job.find_secret(meeting, make=not request.wish.dry)
    call.show_remarks()
    if request.wish.dry:
        _show_plan(call, made, meeting, secret.source)
        return
    prepare_log_folder(call)
    what = f"the command for the job at {meeting.endpoint}"
    lock = typed_machine.take_lock(what, meeting.endpoint, meeting.run_id, str(meeting.index))
    with contextlib.closing(lock) if lock else contextlib.nullcontext():
        child = JoinChild(join_job.join_file(request, meeting, folder, secret), folder, lock)
        planned = _wait_for_start(call, child, made.job.policy.grace + _LEAVE)
        _follow_here(call, request, planned, ended, made.job.elastic.present)


def _show_plan(call: Call, made: Plan, meeting: TypedMeeting, source: str) -> None:
    """Print or answer with, for --dry, where the machines meet, and the plan with placeholders for what is not known before.

    source: where the secret was found.
    """
    own = "has no number" if meeting.index is None else f"is number {meeting.index}"
    about = {"coordinator": meeting.endpoint, "nodes": meeting.nodes, "index": meeting.index, "secret": source}
    if call.json:
        call.answer({**as_dict(made), "join": about})
        return
    machines = f"{count(meeting.nodes, 'machine')} meet at {meeting.endpoint}"
    call.terminal.line(f"{machines}; this one {own}; secret: {source}")
    later = "Addresses, devices and ports of the machines are known when all are there"
    call.terminal.line(f"{later}; these stand for them:")
    plan_tables(as_dict(made), call.terminal)


# -- the meeting ------------------------------------------------------------------------------------------------------


def _wait_for_start(call: Call, child: JoinChild, patience: float) -> Report:
    """Show the reports of the joining process until the job has started, and return the report of its plan.

    If that raises, also for a signal, the process is ended. Raises what the process reported.
    """
    try:
        return _show_meeting(call, child, patience)
    except BaseException as error:
        # Also where the output is closed: this command must not wait for other machines then.
        interrupted = isinstance(error, signals.STOPS) and error.code == 130
        _end_process(child, signal.SIGINT if interrupted else signal.SIGTERM, patience)
        raise


def _show_meeting(call: Call, child: JoinChild, patience: float) -> Report:
    """Wait for the plan and the start of the job, show other reports, and return the report of the plan.

    Raises what the process reported, as one error with the exit code of the process if it is not 0; InternalError if it ended
    without a report, and what a signal causes.
    """
    planned: Report = {}
    first = True  # this machine is the one where the others join
    failed: list[ClustertoolError] = []
    while True:
        report = child.next(0.1)
        signals.check()
        if report is None:
            continue
        kind = report["type"]
        if kind == "planned":
            planned = report
            node = f"node {report['node']} of {len(report['nodes'])}"
            call.note(f"job {report['job']}: {_own_ranks_text(report)} here, on {node}")
        elif kind == "started":
            call.starting(planned["job"])
            return planned
        elif kind == "error":
            failed.append(_reported_error(report))
        elif kind == "closed":
            code = child.wait(patience)
            found = as_one(failed)
            if found is not None:
                found.code = code or found.code
                raise found
            what = f"the joining process ended with {code}: {child.errors or 'without a reason'}"
            raise InternalError(what, errors.REPORT)
        else:
            first = first and kind not in ("joined", "retry")
            _note_report(call, report, first)


def _own_ranks_text(planned: Report) -> str:
    """List the ranks of this machine as text: `trainers 0-1`, `no process`."""
    own = grouped((role_name(role), rank) for role, rank in planned["ranks"])
    texts = [f"{name}{'s' if len(ranks_) > 1 else ''} {ranges(ranks_)}" for name, ranks_ in own.items()]
    return ", ".join(texts) or "no process"


def _note_report(call: Call, report: Report, first: bool) -> None:
    """Print a report about the meeting in one line: "waiting", "retry", "joined" or "warning"; ignore others.

    first: the other machines join this one.
    """
    kind = report["type"]
    if kind == "waiting":
        here, nodes, missing = report["present"], report["nnodes"], report["missing"]
        which = f" (missing: {ranges(missing)})" if missing else ""
        waits = f"{here} of {nodes} machines {'are' if here > 1 else 'is'} here{which}; the job starts when all are"
        if first:
            waits += f"; they join this machine, at {report['coordinator']}"
        call.note(waits if here < nodes else f"all {nodes} machines are here")
    elif kind == "retry":
        call.note(f"no connection to {report['coordinator']} yet: {report['why']}; trying again")
    elif kind == "joined":
        call.note(f"connected to {report['coordinator']}")
    elif kind == "warning":
        call.warn(report["what"])


def _end_process(child: JoinChild, number: int, patience: float) -> None:
    """Signal the joining process and wait for its end; after `patience` seconds, or at a further Ctrl+C, kill it.

    The process ends the meeting, or the start of the job on all machines.
    """
    child.signal(number)
    before, end = signals.count.ints, time.monotonic() + patience
    while child.wait(0.05) is None:
        if signals.count.ints > before or time.monotonic() > end:
            child.signal(signal.SIGKILL)


def _reported_error(report: Report) -> ClustertoolError:
    """Convert a report to its error, with its class and its exit code; an AuthError gets a longer fix."""
    found = read_error(report)
    found.code = report["code"]
    if isinstance(found, AuthError):
        found.fix += "; --rdzv-id and HOST:PORT must be typed alike on all of them"
    return found


# -- the job ----------------------------------------------------------------------------------------------------------


def _follow_here(call: Call, request: RunRequest, planned: Report, ended: Ended, elastic: bool) -> None:
    """Follow the job in the records of this machine until its end, or with --detach until its ranks run.

    ended: called at the end of the job. elastic: the job can go on without this machine, so a stop ends only its part. Raises
    the job's error.
    """
    job, node, own = planned["job"], int(planned["node"]), [(role, rank) for role, rank in planned["ranks"]]
    hide, inbox, copy = load_config.mask_known_secrets(request.cluster), Inbox(), copy_of_logs(call, job)
    here = replace(request.cluster.hosts[0], name=planned["name"])

    def over() -> None:
        ended(job, planned["job_dir"], [log for _, _, log in planned["logs"]])

    with Fleet(replace(request.cluster, hosts=(here,)), None, inbox.put, User()) as fleet:
        fleet.open()
        errors.raise_all(list(fleet.failed.values()))
        fleet.reduce_to_job({node: 0}, planned["nodes"])
        why = "its records are on that machine"
        fleet.failed = {other: NotFound(why, "", fleet.name(other)) for other in fleet.failed}
        ends = Ending(functools.partial(stop_everywhere, fleet))
        if elastic:
            ends = Ending(functools.partial(_leave_job, fleet), where="this node, or on all if it coordinates the job")
        follow = FollowSession(call, fleet, inbox, job, RankLines(call.terminal, hide=hide), ends, copy=copy)
        grace = request.spec.policy.grace if request.spec else 0.0
        follow.start({"logs": _logs_to_follow(call, own), "tail": None}, grace)
        if not (call.given.detach and wait_until_all_run(follow, job, len(own))):
            follow_to_end(follow, hide, over)


def _leave_job(fleet: Fleet, job: str, how: StopHow) -> Mapping[str, StopAnswer | ClustertoolError]:
    """Remove this machine from an elastic job, which goes on without it, and return the answer as of a stop.

    If that is not possible, or how["force"] is set, stop the job on all nodes.
    """
    seconds = how["grace"] + _LEAVE
    request = LEAVE({"job": job, "by": how["by"], "code": how["code"], "seconds": seconds})
    with contextlib.suppress(ClustertoolError):  # it coordinates the job, or the job ends now
        for node in [] if how["force"] else list(fleet.agents):
            if fleet.ask_one(node, request, seconds + _LEAVE)["left"]:
                return {fleet.name(node): {"jobs": {job: {"state": StopState.CLEAN, "survivors": []}}}}
    return stop_everywhere(fleet, job, how)


def _logs_to_follow(call: Call, own: list[tuple[str, int]]) -> Shown:
    """Choose the logs to show on this machine: those of --rank that run here, by default of its first trainer or other rank.

    "all" and "trainer" stay as they are.
    """
    asked = logs_to_show(call)
    if isinstance(asked, str):
        return asked
    if not call.given.rank:
        first = next((rank for rank in own if rank[0] == "trainer"), own[0] if own else None)
        return [first] if first else []
    return [rank for rank in asked if rank in own]
