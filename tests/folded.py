"""The state of a job from the events of its nodes."""

from __future__ import annotations

from collections.abc import Iterable

from clustertool.model.job.caretakers import Event
from clustertool.model.job.state import JobStatus


def fold(events: Iterable[tuple[int, Event]]) -> JobStatus:
    """(node, event) pairs, in order per node -> status."""
    status = JobStatus()
    for node, event in events:
        status.apply(node, event)
    return status
