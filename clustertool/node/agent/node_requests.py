"""These requests are about the node itself: its state, and its links to other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from clustertool.model.wire.frames import Header
from clustertool.node.probe import link_test, shared_root
from clustertool.node.probe import probe as node_probe

if TYPE_CHECKING:
    from clustertool.node.agent.loop import Agent


def probe(agent: Agent, header: Header) -> Dict[str, Any]:
    return node_probe.probe(header)


def meet(agent: Agent, header: Header) -> Dict[str, Any]:
    return shared_root.meet(agent.root, str(header["step"]), str(header["token"]), int(header["node"]))


def mesh(agent: Agent, header: Header) -> Dict[str, Any]:
    return link_test.mesh(header)
