"""inv stop ends a job on every node, from any laptop, and verifies that none of its processes is alive."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from clustertool.actions.find_jobs import (
    Described,
    ask_jobs,
    choose,
    described,
    is_certain,
    listings,
    may_start,
    merged,
    warn_of_orphans,
    where,
)
from clustertool.actions.stop_jobs import (
    LISTING,
    ByJob,
    Stopped,
    by_engine,
    failures,
    stop_how,
    stop_jobs,
    unfinished,
)
from clustertool.engines.base import Answers as EngineAnswers
from clustertool.engines.base import Engine
from clustertool.errors import ClustertoolError, Survivors, UsageError, as_one, raise_all
from clustertool.fleet.fleet import LAG, Fleet
from clustertool.model.config.folded_names import fold, gather
from clustertool.model.job.state_names import JobState, StopState
from clustertool.model.job.stop_result import CLEAN, read_result
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.show.errors import exit_json
from clustertool.show.job_text import stop_text
from clustertool.show.program_name import commanded
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call, seconds

_NOTHING = (StopState.ENDED_ALREADY, StopState.NEVER_STARTED)


def stop(call: Call) -> None:
    if call.given.all and call.given.job:
        raise UsageError("--all and --job cannot be given together", "give one of them")
    typed = seconds(call.given.grace, "--grace", 0.0)
    with engine_of(call, whole=not call.given.job, lag=LAG, newest=not call.given.all) as engine:
        fleet = engine.fleet
        grace = typed if call.given.grace else fleet.cluster.grace
        how = stop_how(f"{commanded()} stop", grace, call.given.force)
        shown: dict[tuple[str, str], str] = {}  # by job and node
        first = _at_once(call, fleet, how, shown)
        fleet.rest()
        known = ask_jobs(fleet, call.given.job, LISTING)
        warn_of_orphans(engine, known)
        about = described(engine, known, call.given.job)
        wanted = list(first)
        if call.given.all or not first:
            wanted = list(dict.fromkeys([*first, *_wanted(call, fleet, known, about)]))
        orphaned = [] if wanted else _orphaned(engine, known, about)
        if call.given.dry or not (wanted or orphaned):
            wanted += orphaned
            call.terminal.line(f"would stop: {', '.join(wanted)}" if wanted else _nothing(fleet))
            if call.json:
                done = exit_json(as_one(list(fleet.failed.values())), "tool")
                call.answer({"would_stop": wanted} if call.given.dry else {"jobs": {}, "exit": done})
            return
        of_engine = [job for job in wanted if job not in first and by_engine(engine, about, job)]
        ended, refused = _cancelled(engine, of_engine, how)
        cancelled = [job for job, found in ended.items() if not found]
        of_nodes = [job for job in [*wanted, *orphaned] if job not in of_engine]
        answers = stop_jobs(fleet, of_nodes, how, known, first, lambda found: _show_early(call, found, shown))
        answers = {job: nodes for job, nodes in answers.items() if job not in orphaned or _found(job, nodes)}
        answers.update((job, dict(found)) for job, found in ended.items() if found)
        if orphaned and not answers:
            call.terminal.line(_nothing(fleet))
        lost = () if call.given.job else [job["id"] for job in merged(known) if job["state"] is JobState.LOST]
        if call.given.only or call.given.skip:
            answers = _asked(call, fleet, answers)
        _tell(call, answers, fleet.silent if call.given.job else fleet.failed, lost, cancelled, refused, shown)


def _nothing(fleet: Fleet) -> str:
    return "nothing to stop" + " on the nodes that answered" * bool(fleet.failed)


def _orphaned(engine: Engine, known: Mapping[int, JobsAnswer], about: Described) -> list[str]:
    """List jobs that no supervisor controls any more, where none runs. Their processes may live: the caretakers were killed."""
    lost = [job["id"] for job in merged(known, about) if job["state"] is JobState.LOST]
    return [job for job in lost if not by_engine(engine, about, job)]


def _found(job: str, nodes: Mapping[str, Stopped]) -> bool:
    """Check whether a stop has found something of a job."""
    return any(read_result(answer, job).state in (StopState.CLEAN, StopState.SURVIVORS) for answer in nodes.values())


def _cancelled(
    engine: Engine, jobs: Collection[str], how: StopHow
) -> tuple[dict[str, EngineAnswers], list[ClustertoolError]]:
    """Cancel jobs by the engine: the answers of the nodes of those that it has ended, and why it has not ended others."""
    found = engine.cancel_all(jobs, how)
    ended = {job: one for job, one in found.items() if not isinstance(one, ClustertoolError)}
    return ended, [one for one in found.values() if isinstance(one, ClustertoolError)]


def _show_early(call: Call, answers: ByJob, shown: dict[tuple[str, str], str]) -> None:
    """Show the nodes that are clean while others have not answered. `shown` gets them."""
    for job, nodes in answers.items():
        texts = {name: stop_text(result) for name, one in nodes.items() if (result := read_result(one, job)) == CLEAN}
        for names, text in gather({name: text for name, text in texts.items() if (job, name) not in shown}):
            call.terminal.line(f"job {job}: {names}: {text}")
        shown.update(((job, name), text) for name, text in texts.items())


def _asked(call: Call, fleet: Fleet, answers: ByJob) -> ByJob:
    """Remove the nodes that --only and --skip leave out from the answers, and name them in a note."""
    ours = {host.name for host in fleet.cluster.hosts}
    for job, nodes in answers.items():
        left_out = [name for name in nodes if name not in ours]
        if left_out:
            call.terminal.note(f"job {job}: {fold(left_out)}: not asked (--only, --skip)")
    return {job: {name: one for name, one in nodes.items() if name in ours} for job, nodes in answers.items()}


def _at_once(call: Call, fleet: Fleet, how: StopHow, shown: dict[tuple[str, str], str]) -> ByJob:
    """Stop on the nodes that are there while others still log in: {job: its nodes' answers}.

    {} where the others may decide which job is meant, for --dry, and if no node is late.
    """
    late = [fleet.name(node) for node in fleet.late]
    if not late or call.given.dry:
        return {}
    known = ask_jobs(fleet, call.given.job, LISTING)
    jobs = unfinished(known)
    if not call.given.all:  # as _wanted() chooses: the one that --job names, or the only one that may run
        found = [job for job in merged(known) if call.given.job or job["part"].may_run]
        found = [job for job in found if is_certain(job, call.given.job)] or found
        jobs = [job["id"] for job in found]
        if len(found) != 1 or not is_certain(found[0], call.given.job):
            names = where(listings(known)[jobs[0]], known, fleet.own_names())[1] if len(found) == 1 else []
            jobs = jobs if set(late) <= set(names) else []
    if jobs:
        call.terminal.note(f"{fold(late)}: still logging in; stopping on the other nodes now")
    return stop_jobs(fleet, jobs, how, known, early=lambda found: _show_early(call, found, shown))


def _wanted(call: Call, fleet: Fleet, known: Mapping[int, JobsAnswer], about: Described) -> list[str]:
    """`known`: the nodes' answers about their jobs. about: what the engine knows of them."""
    if call.given.all:
        return unfinished(known, about)
    if call.given.job:
        return [choose(fleet, known, call.given.job, known=about)["id"]]
    if not any(map(may_start, merged(known, about))):
        return []
    return [choose(fleet, known, "", running=True, known=about)["id"]]


def _tell(
    call: Call,
    answers: Mapping[str, Mapping[str, Stopped]],
    failed: Mapping[int, ClustertoolError],
    lost: Collection[str],
    cancelled: Collection[str],
    refused: Collection[ClustertoolError],
    shown: Mapping[tuple[str, str], str],
) -> None:
    """Print the result per node and job. Raises 76 for survivors, 69 for nodes that did not answer or cannot know.

    failed: nodes that did not list their jobs. lost: jobs that are not shown if they had ended on all nodes. cancelled:
    jobs that the engine has ended. refused: why it has not ended others. shown: the texts that are on the screen.
    """
    results = {job: {name: read_result(one, job) for name, one in nodes.items()} for job, nodes in answers.items()}
    table = {job: {name: stop_text(one) for name, one in nodes.items()} for job, nodes in results.items()}
    over = {job for job in lost if job in results and all(one.state in _NOTHING for one in results[job].values())}
    if over and over >= table.keys():
        call.terminal.line("nothing to stop")
    for job, nodes in table.items():
        left = {name: text for name, text in nodes.items() if shown.get((job, name)) != text}
        for names, text in gather(left) if job not in over else ():
            call.terminal.line(f"job {job}: {names}: {text}")
    for job in cancelled:
        call.terminal.line(f"job {job}: cancelled")
    errors = [*failures(answers, failed), *refused]
    errors = [error for error in errors if isinstance(error, Survivors)] or errors
    if call.json:
        table.update((job, {"engine": "cancelled"}) for job in cancelled)
        call.answer({"jobs": table, "exit": exit_json(as_one(errors), "tool")})
    raise_all(errors)
