"""These handlers answer the requests for a relay: it is a child of the agent, which passes its messages on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustertool.node.dispatch.relay_process import RelayProcess

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import NoFields, RelayRequest
    from clustertool.node.agent.loop import Agent


def relay(agent: Agent, request: RelayRequest) -> Answer:
    """Take part in a dispatch. The relay's messages come as frames of their own."""
    unrelay(agent, {})
    agent.relay = RelayProcess(request, agent.root)
    return {}


def unrelay(agent: Agent, request: NoFields) -> Answer:
    """End the relay. Once this is answered it has ended, and its port is free."""
    if agent.relay is not None:
        agent.relay.end()
        agent.relay = None
    return {}
