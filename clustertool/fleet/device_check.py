"""Asking nodes for their devices; a node that needs the NVML module says so, gets it, and is asked once more."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from clustertool.fleet import node_bundle
from clustertool.fleet.fleet import Fleet
from clustertool.model.wire.frames import Header
from clustertool.ssh.parallel import Gathered


def devices_of(fleet: Fleet, nodes: Iterable[int] | None = None) -> Gathered[Header]:
    """The cards of every node, or of some, and what they do now."""
    return ask(fleet, dict.fromkeys(fleet.agents if nodes is None else nodes, {"q": "devices"}))


def ask(fleet: Fleet, requests: Mapping[int, Mapping[str, Any]], timeout: float = 60.0) -> Gathered[Header]:
    """{node: request} whose answer may be that the NVML module is needed first."""
    digest = node_bundle.nvml()[0]
    wanted = {node: {**request, "nvml": digest} for node, request in requests.items()}
    gathered = fleet.ask(wanted, timeout)
    needy = [node for node, answer in gathered.ok.items() if "need" in answer]
    if not needy:
        return gathered
    sent = send_module(fleet, needy, timeout)
    again = fleet.ask({node: wanted[node] for node in sent.ok}, timeout)
    ok = {node: answer for node, answer in gathered.ok.items() if node not in needy}
    return Gathered({**ok, **again.ok}, {**gathered.failed, **sent.failed, **again.failed})


def send_module(fleet: Fleet, nodes: Iterable[int], timeout: float = 60.0) -> Gathered[Header]:
    digest, data = node_bundle.nvml()
    return fleet.ask(
        dict.fromkeys(nodes, {"q": "module", "nvml": digest, "data": base64.b64encode(data).decode()}), timeout
    )
