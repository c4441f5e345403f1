"""The seam between a plan and whatever runs it: requests per node, in phases that are barriers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from clustertool.plan.plan import Plan


@dataclass(frozen=True)
class Phase:
    """`requests`: node id -> fields of one request. Every node has answered before the next phase begins."""

    name: str
    requests: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Steps:
    """What starts a job, and what takes back each phase that was done when a later one fails (same order)."""

    phases: tuple[Phase, ...]
    undo: tuple[Phase, ...] = ()


class Engine(Protocol):
    """Turns a plan into steps. `releases`: node -> the name of what was dispatched to it, none if it lies there already."""

    def start(self, plan: Plan, releases: Mapping[int, str], secrets: Mapping[str, str]) -> Steps: ...

    def stop(self, nodes: int, job: str, how: Mapping[str, Any]) -> Phase: ...

    def status(self, nodes: int, job: str) -> Phase: ...

    def logs(self, nodes: int, job: str, wanted: Mapping[str, Any]) -> Phase: ...
