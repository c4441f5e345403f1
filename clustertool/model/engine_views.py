"""This module has what an engine knows: a node that it may give to a job, and a pod in which a node of a job runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Dict, Optional, Tuple


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


@dataclass(frozen=True)
class JobPod:
    """A pod in which a node of a job runs. node: its number in the job; None if the pod does not state one.

    host: the node of the cluster, "" before one is chosen. reason: why the pod waits or has ended, "" if there is nothing to
    say. restarts: of its container. sidecars: the containers that run besides that of the job, and keep the pod's resources
    when it has ended; "" for none.
    """

    pod: str
    node: Optional[int]
    host: str
    phase: str
    reason: str = ""
    restarts: int = 0
    sidecars: str = ""

    def as_dict(self) -> Dict[str, object]:
        """Return the fields as a dict, for `status --json`."""
        return asdict(self)
