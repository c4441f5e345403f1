"""This module detects nodes that share a ROOT_DIR: nodes with equal probes create marks there and report the marks they see."""

from __future__ import annotations

import secrets
from dataclasses import replace

from clustertool.fleet.fleet import Fleet
from clustertool.model.facts import ByNode, Facts, nodes_that_may_share_root
from clustertool.model.wire.agent_answers import SeenAnswer
from clustertool.model.wire.agent_requests import Step
from clustertool.model.wire.messages import MEET


def confirm_root_ids(fleet: Fleet, facts: ByNode) -> dict[int, Facts]:
    """Return the facts with a root_id that is equal exactly where ROOT_DIR is the same.

    Nodes with equal probes write a mark into their ROOT_DIR, list the marks that they see, and remove them. Where all probes
    differ, nothing is written.
    """
    doubtful = set(nodes_that_may_share_root(facts))
    if not doubtful:
        return dict(facts)
    token = secrets.token_hex(8)
    try:
        left = _ask_step(fleet, doubtful, "leave", token)
        seen = _ask_step(fleet, set(left), "find", token)
    finally:
        _ask_step(fleet, doubtful, "forget", token)
    found = dict(facts)
    for node in doubtful:  # a node that could not leave its mark has a disk of its own, full or forbidden
        same = seen[node].get("seen", [node]) if node in seen else [node]
        found[node] = replace(facts[node], root_id=f"{token}/{min([node, *same])}")
    return found


def _ask_step(fleet: Fleet, nodes: set[int], step: Step, token: str) -> dict[int, SeenAnswer]:
    """Send nodes the request to write, list or remove their marks ("leave", "find", "forget"), and return the answers.

    Nodes that fail are left out. No Ctrl+C ends "forget".
    """
    requests = {node: MEET({"step": step, "token": token, "node": node}) for node in nodes}
    return fleet.ask(requests, patient=step == "forget").ok
