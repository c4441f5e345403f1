"""This module detects nodes that share a ROOT_DIR: nodes with equal probes create marks there and report the marks they see."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from clustertool.fleet.fleet import Fleet
from clustertool.model.facts import Facts
from clustertool.model.wire.agent_answers import SeenAnswer
from clustertool.model.wire.agent_requests import Step
from clustertool.model.wire.messages import MEET


def confirm(fleet: Fleet, facts: Mapping[int, Facts]) -> dict[int, Facts]:
    """The facts with a root_id that is equal exactly where ROOT_DIR is the same. Writes nothing where all look different."""
    doubtful = candidates(facts)
    if not doubtful:
        return dict(facts)
    token = secrets.token_hex(8)
    try:
        left = _all(fleet, doubtful, "leave", token)
        seen = _all(fleet, set(left), "look", token)
    finally:
        _all(fleet, doubtful, "forget", token)
    found = dict(facts)
    for node in doubtful:  # a node that could not leave its mark has a disk of its own, full or forbidden
        same = seen[node].get("seen", [node]) if node in seen else [node]
        found[node] = replace(facts[node], root_id=f"{token}/{min([node, *same])}")
    return found


def candidates(facts: Mapping[int, Facts]) -> set[int]:
    """Nodes that may see another one's ROOT_DIR. Two of one machine are known to, or not to, without a mark."""
    by_hint: dict[str, list[int]] = {}
    for node, fact in facts.items():
        by_hint.setdefault(fact.root_hint or f"node{node}", []).append(node)
    groups = (nodes for nodes in by_hint.values() if len({facts[node].boot_id for node in nodes}) > 1)
    return {node for nodes in groups for node in nodes}


def _all(fleet: Fleet, nodes: set[int], step: Step, token: str) -> dict[int, SeenAnswer]:
    requests = {node: MEET({"step": step, "token": token, "node": node}) for node in nodes}
    return fleet.ask(requests, patient=step == "forget").ok
