"""These requests are about the jobs that are here: their records, their logs, their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from clustertool.model.wire.frames import Header
from clustertool.node.jobs.follow import Follower
from clustertool.node.jobs.queries import Jobs

if TYPE_CHECKING:
    from clustertool.node.agent.loop import Agent


def follow(agent: Agent, header: Header) -> Dict[str, Any]:
    record = Jobs(agent.root, agent.entry).record(header)
    if header.get("follow", True):
        record.require_here()
    agent.followers.append(Follower(record, header))
    return {}


def query(agent: Agent, header: Header) -> Dict[str, Any]:
    """A question about jobs, or a request to end or to remove them."""
    return Jobs(agent.root, agent.entry).answer(header)
