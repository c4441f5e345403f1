"""Handler of the request to follow a job: the agent's loop sends what the follower reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustertool.node.jobs.follow import Follower
from clustertool.node.jobs.queries import record_of

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import FollowRequest
    from clustertool.node.agent.loop import Agent


def follow(agent: Agent, request: FollowRequest) -> Answer:
    record = record_of(agent, request["job"])
    if request.get("follow", True):
        record.require_here()
    agent.followers.append(Follower(record, request))
    return {}
