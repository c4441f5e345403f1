"""These requests are about releases of workspaces: a dispatch, and the check of what dispatches have left here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from clustertool.model.wire.frames import Header
from clustertool.node.dispatch.relay_process import RelayProcess
from clustertool.node.storage import patch as release_patch
from clustertool.node.storage import verify_store

if TYPE_CHECKING:
    from clustertool.node.agent.loop import Agent


def patch(agent: Agent, header: Header) -> Dict[str, Any]:
    """Make a release that is little more than one that is here."""
    return release_patch.patch(agent.root, header)


def verify(agent: Agent, header: Header) -> Dict[str, Any]:
    """Hash again what dispatches have left here."""
    return verify_store.verify(agent.root, bool(header["remove"]))


def relay(agent: Agent, header: Header) -> Dict[str, Any]:
    """Take part in a dispatch. The relay's messages come as frames of their own."""
    unrelay(agent, header)
    agent.relay = RelayProcess(header, agent.root)
    return {}


def unrelay(agent: Agent, header: Header) -> Dict[str, Any]:
    """Once this is answered the relay has ended, and its port is free."""
    if agent.relay is not None:
        agent.relay.end()
        agent.relay = None
    return {}
