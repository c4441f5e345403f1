"""These requests are about the node's devices, and about what jobs use now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from clustertool.model.wire.frames import Header
from clustertool.node.devices import nvml, read
from clustertool.node.jobs.live_sample import Glance

if TYPE_CHECKING:
    from clustertool.node.agent.loop import Agent


def devices(agent: Agent, header: Header) -> Dict[str, Any]:
    """The node's cards now, or {"need": digest}: the NVML module is sent to nodes that have a use for it."""
    return read.look(str(header["nvml"]))


def module(agent: Agent, header: Header) -> Dict[str, Any]:
    """Keep the NVML module, which `devices` asked for: zlib in base64."""
    nvml.keep(str(header["nvml"]), str(header["data"]))
    return {}


def glance(agent: Agent, header: Header) -> Dict[str, Any]:
    """For `inv top`, once a second."""
    if agent.glance is None:
        agent.glance = Glance(agent.root, agent.entry, str(header["nvml"]))
    return agent.glance.look(str(header["job"]))
