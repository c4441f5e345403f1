"""inv clean removes the directories of finished jobs, and never those of a running job."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from clustertool.actions.find_jobs import Described, ask_jobs, choose, described, listings, state_text, unknown
from clustertool.engines.base import Description, Engine, EngineState
from clustertool.errors import PreflightError, UsageError, raise_all
from clustertool.fleet import stored_hosts
from clustertool.model.hints import PROGRAM
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.agent_answers import CleanAnswer
from clustertool.model.wire.agent_requests import CleanRequest
from clustertool.model.wire.messages import CLEAN
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call, age


def clean(call: Call) -> None:
    older_than = age(call.given.older_than, "--older-than") if call.given.older_than else 0.0
    if not call.given.job and not call.given.older_than:
        raise UsageError("clean needs to know what to remove", "give --job J, or --older-than 7d")
    with engine_of(call) as engine:
        fleet = engine.fleet
        chosen = _chosen(engine, call.given.job)
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
            stored_hosts.forget(gone)
        if call.json:
            more = {"not_ended": spared} if spared else {}
            call.answer({"removed": removed, "running": running, "freed": freed, "kept": kept, **more})
        each = [(node, name, *why) for node in kept for name, why in kept[node].items()]
        refused = [PreflightError(f"job {name}: {what}", fix, node) for node, name, what, fix in each]
        raise_all([*refused, *fleet.failed.values()])


class _Chosen(NamedTuple):
    """What is to be removed.

    job: its id, "" for all. spared: jobs that stay, with the reason: the engine does not prove that they have ended. ended:
    those of which it does. unseen: those of them of which no node has a record; when they ended.
    """

    job: str = ""
    spared: Mapping[str, str] = {}
    ended: Collection[str] = ()
    unseen: Mapping[str, float] = {}


def _chosen(engine: Engine, prefix: str) -> _Chosen:
    """Choose the jobs that clean may remove by what the engine proves. Raises UsageError, PreflightError for one job.

    Agents that run on the nodes of a job prove its end each for its node.
    """
    if not prefix and engine.capabilities.live_channels and not engine.capabilities.queues:
        return _Chosen()
    answers = ask_jobs(engine.fleet, prefix)
    known, listed = described(engine, answers, prefix), listings(answers)
    ended = {name: one.since for name, one in known.items() if one.state is EngineState.ENDED}
    unseen = {name: since for name, since in ended.items() if name not in listed}
    if prefix:
        named = [name for name in unseen if prefix in (name, known[name].job_name)]
        if named and not any(prefix == name for name in listed):
            return _Chosen(named[0], {}, ended, {named[0]: 0.0})
        job = choose(engine.fleet, answers, prefix, known=known)["id"]
        _require_ended(engine, job, known)
        return _Chosen(job, {}, ended)
    may_start = {name for name, one in known.items() if one.state is EngineState.QUEUED}
    found = sorted({*listed, *may_start})
    spared = {name: _text(known.get(name)) for name in found if not _may_go(engine, known.get(name))}
    return _Chosen("", spared, ended, unseen)


def _require_ended(engine: Engine, job: str, known: Described) -> None:
    found = known.get(job)
    if found is not None and found.state is EngineState.RUNNING:
        raise UsageError(f"job {job} runs", f"{PROGRAM} stop --job {job} first")
    if found is not None and found.state is EngineState.QUEUED:
        raise UsageError(f"job {job} is {_text(found)}", f"{PROGRAM} stop --job {job} first")
    if not _may_go(engine, found):
        raise unknown(job, found.reason if found else "its engine does not answer")


def _may_go(engine: Engine, found: Description | None) -> bool:
    """Check whether agents are asked to remove a job."""
    if found is not None and found.state is EngineState.QUEUED:
        return False
    return engine.capabilities.live_channels or (found is not None and found.state is EngineState.ENDED)


def _text(found: Description | None) -> str:
    return "unknown, the engine does not answer" if found is None else state_text(found)
