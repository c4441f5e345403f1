"""An engine node is a node that an engine may give to a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class EngineNode:
    """A node as an engine knows it that chooses the nodes of jobs.

    memory: MB. gpus: (type, number, used). reason: why it takes no jobs.
    """

    name: str
    state: str
    cpus: int
    used_cpus: int
    memory: int
    gpus: Tuple[Tuple[str, int, int], ...] = ()
    partitions: Tuple[str, ...] = ()
    reason: str = ""
