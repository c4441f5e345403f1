"""Each dialect states which pod is which node of a job: trainers are the first nodes, then pservers, then heter trainers."""

from __future__ import annotations

from typing import List, Mapping, NamedTuple, Optional, Tuple

from clustertool.model.kubernetes.api_objects import fields, text
from clustertool.model.quantities import whole

JOB, JOBSET, PADDLEJOB = DIALECTS = ("job", "jobset", "paddlejob")
WORKLOADS = {JOB: "Job", JOBSET: "JobSet", PADDLEJOB: "PaddleJob"}  # kinds
ROLES = ("trainer", "pserver", "heter")  # in the order of the nodes
PADDLE_ROLES = {"trainer": "worker", "pserver": "ps", "heter": "heter"}  # in a PaddleJob
FIRST_LABEL = "clustertool/first-node"  # of a pod: the number of the first node of its role
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # an annotation as well, in all versions
_MOST = 99999
Nodes = Tuple[Tuple[str, int], ...]  # how many pods each role has


class RolePods(NamedTuple):
    """The pods of a role.

    role: "" for pods that play all roles, or different ones. first: the number of its first node. size: how many they are.
    """

    role: str
    first: int
    size: int


def ordered(nodes: Nodes) -> Nodes:
    """Sort the roles in the order of their nodes: trainer, pserver, heter."""
    return tuple(sorted(nodes, key=lambda each: ROLES.index(each[0])))


def groups(dialect: str, nodes: Nodes) -> Tuple[RolePods, ...]:
    """List the groups of pods that a workload has a template for: one for each role; in an Indexed Job one for all roles."""
    if dialect == JOB:
        return (RolePods("", 0, sum(count for _, count in nodes)),)
    found: List[RolePods] = []
    first = 0
    for role, count in ordered(nodes):
        found.append(RolePods(role, first, count))
        first += count
    return tuple(found)


def node_roles(nodes: Nodes, split: bool) -> Tuple[str, ...]:
    """List the role of each node, for the join file; () if each node plays all roles. split: `nodes` names roles."""
    return tuple(role for role, count in ordered(nodes) for _ in range(count)) if split else ()


def pod_hosts(dialect: str, name: str, nodes: Nodes) -> Tuple[str, ...]:
    """List the host name of each node's pod; if a controller adds characters to the pod's name, its beginning."""
    found = groups(dialect, nodes)
    return tuple(_host(dialect, name, group.role, index) for group in found for index in range(group.size))


def coordinator_host(dialect: str, name: str, nodes: Nodes) -> str:
    """Return the DNS name of node 0; "" where only the operator knows it: its variables have it (pod_variables.py)."""
    return "" if dialect == PADDLEJOB else f"{pod_hosts(dialect, name, nodes)[0]}.{name}"


def node_of_pod(pod: Mapping[str, object]) -> Optional[int]:
    """Read the number of a pod's node from its object: the first node of its role, and the pod's index in the role.

    The first is a label; the index an annotation, else a label, else the end of the name. None if one of the two is missing.
    """
    metadata = fields(pod, "metadata")
    labels, notes = fields(metadata, "labels"), fields(metadata, "annotations")
    first = whole(labels.get(FIRST_LABEL), 0, _MOST)
    known = notes.get(INDEX_LABEL, labels.get(INDEX_LABEL))
    index = whole(text(metadata, "name").rpartition("-")[2] if known is None else known, 0, _MOST)
    return None if first is None or index is None else first + index


def _host(dialect: str, name: str, role: str, index: int) -> str:
    """Return the host name of the pod with this index in its role."""
    if dialect == JOB:
        return f"{name}-{index}"
    if dialect == JOBSET:
        return f"{name}-{role}-0-{index}"
    return f"{name}-{PADDLE_ROLES[role]}-{index}"
