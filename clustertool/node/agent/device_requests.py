"""Handler of the request that `inv top` sends once a second: the agent keeps what the last one has read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustertool.node.jobs.live_sample import LiveSampler

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import GlanceAnswer
    from clustertool.model.wire.agent_requests import GlanceRequest
    from clustertool.node.agent.loop import Agent


def glance(agent: Agent, request: GlanceRequest) -> GlanceAnswer:
    if agent.glance is None:
        agent.glance = LiveSampler(agent.root, agent.entry, request["nvml"])
    return agent.glance.sample(request["job"])
