"""This module waits until a queued job has started: until a node has a record of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from clustertool.actions.find_jobs import ask_jobs, summaries_by_job
from clustertool.engines.base import Description, Engine, EngineState
from clustertool.errors import ClustertoolError, PreflightError
from clustertool.fleet.fleet import Check
from clustertool.model.hints import PROGRAM
from clustertool.model.job.node_status import read_part
from clustertool.model.job.state_names import OUTCOMES, StartReason
from clustertool.model.wire.agent_answers import JobSummary

_POLL = 1.0  # seconds between two questions to the engine
_MORE, _LONGEST = 1.5, 10.0  # while nothing changes in a queue, they become longer: a scheduler has many users
_TURN = 0.05  # and between two calls of the check
_EARLIER = 30.0  # seconds in which a job that runs again replaces the records of its earlier run


class EndedBefore(PreflightError):
    """A job that has ended before a node had a record of it."""


class CannotStart(PreflightError):
    """A job that was stuck for too long."""


def until_started(engine: Engine, job: str, check: Check, limit: float = 0.0) -> Iterator[Description]:
    """Poll the engine until all supervisors of a job have started, and yield its description of the job at each change.

    It ends, too, if the job has ended and a node has a record of it. For 30 s, records of an earlier run do not count if the
    engine runs jobs again. The pause grows from 1 s to 10 s while the job stays queued. check: called several times a second,
    and raises what ends the iteration. limit: seconds that the job may be stuck, 0.0 for ever. Raises EndedBefore if it ends
    without a record, CannotStart if it is stuck too long.
    """
    before: Description | None = None
    stuck_at = 0.0
    poll = _POLL
    running_at = 0.0  # when it was first known to run
    while True:
        found = _ask_engine(engine, job)
        runs = found.state is EngineState.RUNNING and not found.ending  # what ends now is an earlier run
        running_at = (running_at or time.monotonic()) if runs else 0.0
        if runs or found.state is EngineState.ENDED:
            parts = summaries_by_job(ask_jobs(engine.open(job=job), job)).get(job, {})
            requeues = engine.capabilities.requeues and bool(running_at)
            earlier = requeues and time.monotonic() - running_at < _EARLIER and _earlier_run_ended(parts)
            if parts and not earlier and _supervisors_started(parts, whole=found.state is not EngineState.ENDED):
                return
            if found.state is EngineState.ENDED:
                raise _ended_before(job, found, engine.cause(job) or found.cause)
        stuck_at = (stuck_at or time.monotonic()) if found.stuck else 0.0
        if limit and stuck_at and time.monotonic() - stuck_at > limit:
            what = f"job {job} has not started for {limit:g} s: {found.stuck}"
            raise CannotStart(what, "correct what is named there; JOIN_TIMEOUT in conf.py is the limit")
        if before is None or replace(found, since=before.since) != before:
            yield found
        unchanged = before is not None and before.state is found.state is EngineState.QUEUED
        poll = min(poll * _MORE, _LONGEST) if unchanged else _POLL
        before = found
        end = time.monotonic() + poll
        while time.monotonic() < end:
            check()
            time.sleep(_TURN)


def _ended_before(job: str, found: Description, cause: tuple[str, int] | None) -> EndedBefore:
    """Build the error for a job that ended before a node had a record of it, with the exit code of `cause`, if known."""
    reasons = dict.fromkeys(filter(None, (cause[0] if cause is not None else "", found.reason)))
    what = f"job {job} has ended before a node had a record of it"
    fix = f"{PROGRAM} check --deep tests the nodes; {PROGRAM} run starts the job again"
    error = EndedBefore(": ".join([what, "; ".join(reasons)]) if reasons else what, fix)
    if cause is not None:
        error.brief, error.code = cause[0], cause[1] or error.code
    return error


def _earlier_run_ended(parts: Mapping[int, JobSummary]) -> bool:
    """Check whether a node has an outcome of the job. If the job runs, this is one of an earlier run: it was requeued.

    A node that was lost in that run has recorded none.
    """
    return any(read_part(part).state in OUTCOMES for part in parts.values())


def _supervisors_started(parts: Mapping[int, JobSummary], whole: bool) -> bool:
    """Check that no node has only placed the job, without a supervisor. whole: and that all nodes of the job have a record."""
    there = not whole or all(len(part["nodes"] or ()) <= len(parts) for part in parts.values())
    return there and all(part.get("start") != StartReason.PLACED for part in parts.values())


def _ask_engine(engine: Engine, job: str) -> Description:
    """Return the engine's description of a job: ENDED if it does not have the job, UNKNOWN if it does not answer."""
    try:
        known = engine.describe({})
    except ClustertoolError as error:
        return Description(EngineState.UNKNOWN, error.what)
    return known.get(job) or Description(EngineState.ENDED, "the queue does not have it any more")
