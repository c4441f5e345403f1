"""inv stop ends jobs and proves it per node. inv clean removes the directories of finished jobs, never of a running one."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from clustertool.actions import find_jobs
from clustertool.actions.stop_jobs import (
    LISTING,
    ByJob,
    Stopped,
    failures,
    only_engine_can_end,
    stop_how,
    stop_jobs,
    unfinished_jobs,
)
from clustertool.engines.base import Answers as EngineAnswers
from clustertool.engines.base import Description, Engine, EngineState
from clustertool.errors import ClustertoolError, PreflightError, Survivors, UsageError, as_one, raise_all
from clustertool.fleet import job_places
from clustertool.fleet.fleet import LAG, Fleet
from clustertool.model.config.folded_names import fold, gather
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state_names import JobState, StopState
from clustertool.model.job.stop_result import CLEAN as ENDED_CLEAN
from clustertool.model.job.stop_result import read_result
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.agent_answers import CleanAnswer, JobsAnswer
from clustertool.model.wire.agent_requests import CleanRequest, StopHow
from clustertool.model.wire.messages import CLEAN
from clustertool.show.error_text import exit_json
from clustertool.show.job_text import stop_text
from clustertool.show.program_name import commanded
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call, read_seconds, seconds_with_unit

_NOTHING = (StopState.ENDED_ALREADY, StopState.NEVER_STARTED)


def stop(call: Call) -> None:
    """Stop a job or all jobs, and print the result of each node; with --dry only which jobs.

    Nodes that are connected are stopped while others still log in. Without --job and --all it is the only job that runs. If no
    job is to be stopped, processes that may be left of LOST jobs are. Raises Survivors if processes are left, else the errors
    of nodes and of the engine; UsageError for options that exclude each other.
    """
    if call.given.all and call.given.job:
        raise UsageError("--all and --job cannot be given together", "give one of them")
    typed = read_seconds(call.given.grace, "--grace", 0.0)
    with engine_of(call, whole=not call.given.job, lag=LAG, newest=not call.given.all) as engine:
        fleet = engine.fleet
        grace = typed if call.given.grace else fleet.cluster.grace
        how = stop_how(f"{commanded()} stop", grace, call.given.force)
        shown: dict[tuple[str, str], str] = {}  # by job and node
        first = _stop_early(call, fleet, how, shown)
        fleet.wait_for_late()
        known = find_jobs.ask_jobs(fleet, call.given.job, LISTING)
        find_jobs.warn_of_orphans(engine, known)
        about = find_jobs.ask_engine(engine, known, call.given.job)
        wanted = list(first)
        if call.given.all or not first:
            wanted = list(dict.fromkeys([*first, *_jobs_to_stop(call, fleet, known, about)]))
        orphaned = _orphaned_jobs(engine, known, about) if call.given.all or not wanted else []
        if call.given.dry or not (wanted or orphaned):
            wanted += orphaned
            call.terminal.line(f"would stop: {', '.join(wanted)}" if wanted else _nothing_to_stop(fleet))
            done = exit_json(as_one(list(fleet.failed.values())), "tool")
            call.answer({"would_stop": wanted} if call.given.dry else {"jobs": {}, "exit": done})
            return
        of_engine = [job for job in wanted if job not in first and only_engine_can_end(engine, about, job)]
        ended, refused = _cancel_by_engine(engine, of_engine, how)
        cancelled = [job for job, found in ended.items() if not found]
        of_nodes = [job for job in [*wanted, *orphaned] if job not in of_engine]
        answers = stop_jobs(fleet, of_nodes, how, known, first, lambda found: _show_early(call, found, shown))
        answers = {job: nodes for job, nodes in answers.items() if job not in orphaned or _has_result(job, nodes)}
        answers.update((job, dict(found)) for job, found in ended.items() if found)
        if orphaned and not answers:
            call.terminal.line(_nothing_to_stop(fleet))
        listed = [] if call.given.job else find_jobs.merge_answers(known)
        lost = [job["id"] for job in listed if job["state"] is JobState.LOST]
        if call.given.only or call.given.skip:
            answers = _without_left_out(call, fleet, answers)
        _show_result(call, answers, fleet.silent if call.given.job else fleet.failed, lost, cancelled, refused, shown)


def _nothing_to_stop(fleet: Fleet) -> str:
    """Return the line "nothing to stop", with "on the nodes that answered" if some did not."""
    return "nothing to stop" + " on the nodes that answered" * bool(fleet.failed)


def _orphaned_jobs(engine: Engine, known: Mapping[int, JobsAnswer], about: find_jobs.Described) -> list[str]:
    """List the LOST jobs that agents can stop: their processes may live, if supervisor and guard were killed."""
    lost = [job["id"] for job in find_jobs.merge_answers(known, about) if job["state"] is JobState.LOST]
    return [job for job in lost if not only_engine_can_end(engine, about, job)]


def _has_result(job: str, nodes: Mapping[str, Stopped]) -> bool:
    """Check whether a stop has ended processes of the job on a node, or found survivors."""
    return any(read_result(answer, job).state in (StopState.CLEAN, StopState.SURVIVORS) for answer in nodes.values())


def _cancel_by_engine(
    engine: Engine, jobs: Collection[str], how: StopHow
) -> tuple[dict[str, EngineAnswers], list[ClustertoolError]]:
    """Cancel jobs by the engine: ({job: answers of its nodes} of those that it has ended, the errors of the others)."""
    found = engine.cancel_all(jobs, how)
    ended = {job: one for job, one in found.items() if not isinstance(one, ClustertoolError)}
    return ended, [one for one in found.values() if isinstance(one, ClustertoolError)]


def _show_early(call: Call, answers: ByJob, shown: dict[tuple[str, str], str]) -> None:
    """Print the nodes that are clean while others have not answered, and add their texts to `shown`."""
    for job, nodes in answers.items():
        results = {name: read_result(one, job) for name, one in nodes.items()}
        texts = {name: stop_text(one) for name, one in results.items() if one == ENDED_CLEAN}
        for names, text in gather({name: text for name, text in texts.items() if (job, name) not in shown}):
            call.terminal.line(f"job {job}: {names}: {text}")
        shown.update(((job, name), text) for name, text in texts.items())


def _without_left_out(call: Call, fleet: Fleet, answers: ByJob) -> ByJob:
    """Remove nodes that --only and --skip leave out from the answers, and print a note with their names."""
    ours = {host.name for host in fleet.cluster.hosts}
    for job, nodes in answers.items():
        left_out = [name for name in nodes if name not in ours]
        if left_out:
            call.terminal.note(f"job {job}: {fold(left_out)}: not asked (--only, --skip)")
    return {job: {name: one for name, one in nodes.items() if name in ours} for job, nodes in answers.items()}


def _stop_early(call: Call, fleet: Fleet, how: StopHow, shown: dict[tuple[str, str], str]) -> ByJob:
    """Stop jobs on the connected nodes while others still log in, and return {job: {node's name: its answer}}.

    {} if no node is late, if there is no job to stop, for --dry, and if the late ones may change which job is meant. shown:
    {(job, node's name): text} of what is on the screen; results that are printed here are added.
    """
    late = [fleet.name(node) for node in fleet.late]
    if not late or call.given.dry:
        return {}
    known = find_jobs.ask_jobs(fleet, call.given.job, LISTING)
    jobs = unfinished_jobs(known)
    if not call.given.all:  # as _jobs_to_stop() chooses: the one that --job names, or the only one that may run
        found = [job for job in find_jobs.merge_answers(known) if call.given.job or job["part"].may_run]
        found = [job for job in found if find_jobs.is_certain(job, call.given.job)] or found
        jobs = [job["id"] for job in found]
        if len(found) != 1 or not find_jobs.is_certain(found[0], call.given.job):
            nodes = find_jobs.summaries_by_job(known)[jobs[0]] if len(found) == 1 else {}
            names = find_jobs.locate_nodes(nodes, known, fleet.own_names())[1]
            jobs = jobs if set(late) <= set(names) else []
    if jobs:
        call.terminal.note(f"{fold(late)}: still logging in; stopping on the other nodes now")
    return stop_jobs(fleet, jobs, how, known, early=lambda found: _show_early(call, found, shown))


def _jobs_to_stop(call: Call, fleet: Fleet, known: Mapping[int, JobsAnswer], about: find_jobs.Described) -> list[str]:
    """List the ids of the jobs to stop: with --all the unfinished ones, with --job that one, else the only one that runs.

    Returns [] if there is none, except with --job. known: the nodes' answers about their jobs. about: what the engine knows of
    them. Raises the errors of choose_job().
    """
    if call.given.all:
        return unfinished_jobs(known, about)
    if call.given.job:
        return [find_jobs.choose_job(fleet, known, call.given.job, known=about)["id"]]
    if not any(map(find_jobs.may_start, find_jobs.merge_answers(known, about))):
        return []
    return [find_jobs.choose_job(fleet, known, "", running=True, known=about)["id"]]


def _show_result(
    call: Call,
    answers: Mapping[str, Mapping[str, Stopped]],
    failed: Mapping[int, ClustertoolError],
    lost: Collection[str],
    cancelled: Collection[str],
    refused: Collection[ClustertoolError],
    shown: Mapping[tuple[str, str], str],
) -> None:
    """Print the result by job and node, or answer with JSON. Raises Survivors, else errors of nodes and of the engine.

    failed: errors of nodes that did not list their jobs. lost: jobs that are not shown if they had ended on all nodes.
    cancelled: jobs that the engine has ended. refused: why it has not ended others. shown: texts that are on the screen.
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
    table.update((job, {"engine": "cancelled"}) for job in cancelled)
    call.answer({"jobs": table, "exit": exit_json(as_one(errors), "tool")})
    raise_all(errors)


# -- clean -------------------------------------------------------------------------------------------------------------


def clean(call: Call) -> None:
    """Remove the directories of finished jobs, of --job or older than --older-than, and print which; with --dry only print.

    If all nodes answered, the places stored on this machine are removed, too. Raises UsageError for a job that runs,
    PreflightError for one that cannot be removed, and the errors of nodes.
    """
    older_than = seconds_with_unit(call.given.older_than, "--older-than") if call.given.older_than else 0.0
    if not call.given.job and not call.given.older_than:
        raise UsageError("clean needs to know what to remove", "give --job J, or --older-than 7d")
    with engine_of(call) as engine:
        fleet = engine.fleet
        chosen = _choose_removable(engine, call.given.job)
        job, spared = chosen.job, chosen.spared
        answers: dict[int, CleanAnswer] = {}
        if not chosen.unseen or not job:
            request: CleanRequest = {"job": job, "exact": bool(job), "older_than": older_than, "dry": call.given.dry}
            request["spare"], request["ended"] = sorted(spared), sorted(chosen.ended)
            answers = fleet.ask_all(CLEAN(request), timeout=600)
        left = {name for name, since in chosen.unseen.items() if time.time() - since >= older_than}
        removed = sorted(left.union(*(answer["removed"] for answer in answers.values())))
        running = sorted({name for answer in answers.values() for name in answer["running"]})
        freed = sum(answer["freed"] for answer in answers.values())
        kept = {fleet.name(node): answer["kept"] for node, answer in answers.items() if answer["kept"]}
        if job and running:
            raise UsageError(f"job {job} runs", f"{PROGRAM} stop --job {job} first")
        verb_ = "would remove" if call.given.dry else "removed"
        call.terminal.line(f"{verb_} {count(len(removed), 'job')}{'' if call.given.dry else ', ' + human_bytes(freed)}")
        for name in removed:
            call.terminal.line(f"  {name}")
        for name, text in spared.items():
            call.terminal.line(f"kept: job {name}: {text}")
        if not call.given.dry and not fleet.failed:
            gone = set(removed) - {name for names in kept.values() for name in names}
            engine.forget(gone)
            job_places.forget(gone)
        more = {"not_ended": spared} if spared else {}
        call.answer({"removed": removed, "running": running, "freed": freed, "kept": kept, **more})
        each = [(node, name, *why) for node in kept for name, why in kept[node].items()]
        refused = [PreflightError(f"job {name}: {what}", fix, node) for node, name, what, fix in each]
        raise_all([*refused, *fleet.failed.values()])


class _Removable(NamedTuple):
    """The jobs that clean may remove.

    job: the id of the only one, "" for all. spared: {job that stays: reason}, since the engine does not prove its end. ended:
    jobs of which the engine proves the end. unseen: {one of these without a record on any node: when it ended}.
    """

    job: str = ""
    spared: Mapping[str, str] = {}
    ended: Collection[str] = ()
    unseen: Mapping[str, float] = {}


def _choose_removable(engine: Engine, prefix: str) -> _Removable:
    """Choose the jobs that clean may remove, by what the engine proves; all jobs, if agents prove the end for their own nodes.

    prefix: of --job. Raises UsageError if this job runs or is queued, PreflightError if its end is unknown.
    """
    if not prefix and engine.capabilities.live_channels and not engine.capabilities.queues:
        return _Removable()
    answers = find_jobs.ask_jobs(engine.fleet, prefix)
    known, listed = find_jobs.ask_engine(engine, answers, prefix), find_jobs.summaries_by_job(answers)
    ended = {name: one.since for name, one in known.items() if one.state is EngineState.ENDED}
    unseen = {name: since for name, since in ended.items() if name not in listed}
    if prefix:
        named = [name for name in unseen if prefix in (name, known[name].job_name)]
        if named and not any(prefix == name for name in listed):
            return _Removable(named[0], {}, ended, {named[0]: 0.0})
        job = find_jobs.choose_job(engine.fleet, answers, prefix, known=known)["id"]
        _require_ended(engine, job, known)
        return _Removable(job, {}, ended)
    may_start = {name for name, one in known.items() if one.state is EngineState.QUEUED}
    found = sorted({*listed, *may_start})
    spared = {name: _why_spared(known.get(name)) for name in found if not _may_be_removed(engine, known.get(name))}
    return _Removable("", spared, ended, unseen)


def _require_ended(engine: Engine, job: str, known: find_jobs.Described) -> None:
    """Raise UsageError for a job that runs or is queued, PreflightError if it may not be removed: see _may_be_removed()."""
    found = known.get(job)
    if found is not None and found.state is EngineState.RUNNING:
        raise UsageError(f"job {job} runs", f"{PROGRAM} stop --job {job} first")
    if found is not None and found.state is EngineState.QUEUED:
        raise UsageError(f"job {job} is {_why_spared(found)}", f"{PROGRAM} stop --job {job} first")
    if not _may_be_removed(engine, found):
        raise find_jobs.unknown_end(job, found.reason if found else "its engine does not answer")


def _may_be_removed(engine: Engine, found: Description | None) -> bool:
    """Check whether agents may remove a job: they run on its nodes, or the engine has it as ended. Not if it is queued."""
    if found is not None and found.state is EngineState.QUEUED:
        return False
    return engine.capabilities.live_channels or (found is not None and found.state is EngineState.ENDED)


def _why_spared(found: Description | None) -> str:
    """Describe as text why a job is not removed: the state in its engine."""
    return "unknown, the engine does not answer" if found is None else find_jobs.state_text(found)
