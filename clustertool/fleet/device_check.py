"""This module reads the devices of nodes. A node that needs the NVML module reports this, receives it, and is asked again."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from clustertool.fleet import node_bundle
from clustertool.fleet.fleet import Fleet
from clustertool.model.wire.agent_answers import Answer, DevicesAnswer
from clustertool.model.wire.messages import DEVICES, NVML_MODULE, Request
from clustertool.ssh.parallel import Gathered


def devices_of(fleet: Fleet, nodes: Iterable[int] | None = None) -> Gathered[DevicesAnswer]:
    """The cards of every node, or of some, and what they do now."""
    request = DEVICES({"nvml": node_bundle.nvml()[0]})
    gathered = fleet.ask(dict.fromkeys(fleet.agents if nodes is None else nodes, request))
    needy = [node for node, answer in gathered.ok.items() if "need" in answer]
    if not needy:
        return gathered
    sent = fleet.ask(dict.fromkeys(needy, module_request()))
    again = fleet.ask(dict.fromkeys(sent.ok, request))
    ok = {node: answer for node, answer in gathered.ok.items() if node not in needy}
    return Gathered({**ok, **again.ok}, {**gathered.failed, **sent.failed, **again.failed})


def module_request() -> Request[Answer]:
    """The request that brings the NVML module to a node which needs it."""
    digest, data = node_bundle.nvml()
    return NVML_MODULE({"nvml": digest, "data": base64.b64encode(data).decode()})
