"""The state of a job follows from its records and its engine: an agent that only reads records cannot know what runs."""

from __future__ import annotations

from collections.abc import Mapping

from clustertool.engines.base import Description, EngineState
from clustertool.model.job.node_status import NodePart, read_part
from clustertool.model.job.state import decide
from clustertool.model.job.state_names import OUTCOMES, JobState
from clustertool.model.wire.agent_answers import JobsAnswer, JobSummary

UNRECORDED = {  # the state of a job of which no node has a record
    EngineState.QUEUED: JobState.QUEUED,
    EngineState.RUNNING: JobState.STARTING,
    EngineState.ENDED: JobState.LOST,
    EngineState.UNKNOWN: JobState.UNKNOWN,
}


def by_records(known: Mapping[int, JobsAnswer]) -> dict[str, NodePart]:
    """Fold the nodes' summaries of each job: a job runs if it runs on one node."""
    parts: dict[str, list[JobSummary]] = {}
    for answer in known.values():
        for summary in answer["jobs"]:
            parts.setdefault(summary["id"], []).append(summary)
    return {job: decide(map(read_part, of_job)) for job, of_job in parts.items()}


def corrected(recorded: JobState, known: Description | None, over: bool = False) -> JobState:
    """Correct the recorded state of a job, or of its part on one node, by what the engine knows. A recorded end stands.

    over: a node has recorded the end of the job. Then a node that has not is lost, if the engine waits for it or has queued
    the job again.
    """
    if known is None or recorded in OUTCOMES:
        return recorded
    unknown = recorded is JobState.UNKNOWN
    queued = known.state is EngineState.QUEUED
    if known.gone(over) or (queued and (unknown or over)):
        return JobState.LOST
    return JobState.RUNNING if known.state is EngineState.RUNNING and unknown else recorded
