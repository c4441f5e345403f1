"""This module derives from a job's status what the job waits for: connections to the coordinator, and ports of pservers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clustertool.model.job.node_status import NodeStatus
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState, NodeState

_LISTEN_AFTER = 10.0  # seconds without a listening port after which a pserver is reported


@dataclass(frozen=True)
class ConnectWait:
    """Nodes, by name, that cannot connect to the coordinator, all for the same cause. `again`: they had a connection before."""

    nodes: Sequence[str]
    coordinator: str
    endpoint: str
    why: str
    errno: str
    again: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class ListenWait:
    """Pservers (rank, node, endpoint) that the trainers wait for, because they have not opened their ports."""

    pservers: Sequence[tuple[int, str, str]]
    seconds: float


@dataclass(frozen=True)
class Firewall:
    """Nodes of which one may have a firewall that blocks connections to `address`. `incoming`: to it, else between them."""

    nodes: Sequence[str]
    incoming: bool
    address: str


Wait = ConnectWait | ListenWait


def find_waits(status: JobStatus, now: float) -> list[Wait]:
    """List what a job waits for: connections to the coordinator, ports of pservers; [] once it has an outcome.

    now: seconds since the epoch.
    """
    return [*find_blocked(status, now), *_late_pservers(status, now)] if status.outcome is None else []


def count_due_reports(wait: Wait) -> int:
    """Count the reports of a wait that are due: of connections after 4, 10, 20 s, ...; of ports after 10, 30, 60, 120 s, ..."""
    if isinstance(wait, ConnectWait):
        return 0 if wait.seconds < 4 else 1 + int(wait.seconds // 10)
    return (wait.seconds >= 10) + (wait.seconds >= 30) + int(wait.seconds // 60)


def find_blocked(status: JobStatus, now: float = 0.0) -> list[ConnectWait]:
    """Group the nodes that report that they cannot connect to the coordinator by cause, each group with its longest time.

    now: seconds since the epoch; with 0.0 all times are 0.
    """
    groups: dict[tuple[str, str, str, bool], list[NodeStatus]] = {}
    for node in _without_connection(status):
        event = node.unconnected
        groups.setdefault((event["endpoint"], event["why"], event["errno"], event["again"]), []).append(node)
    found = []
    for cause, nodes in groups.items():
        names = [status.name(node.index) for node in nodes]
        seconds = max(_seconds_since(now, float(node.unconnected["since"]) - node.skew) for node in nodes)
        found.append(ConnectWait(names, status.name(status.coordinator), *cause, seconds))
    return found


def find_firewall(status: JobStatus) -> Firewall | None:
    """Return the nodes of which one may have a firewall that blocks connections to the coordinator; else None.

    If all other nodes are blocked, this is the coordinator's node alone; if some are, it and these. A node counts as blocked if
    it reports that it cannot connect and had no connection before. None without any, and if the coordinator's node is lost.
    """
    nodes = [node for node in _without_connection(status) if not node.unconnected["again"]]
    if not nodes or lost_coordinator(status):
        return None
    incoming = len(nodes) >= len(status.nodes) - 1
    suspected = [status.coordinator, *(node.index for node in nodes if not incoming)]
    address = nodes[0].unconnected["endpoint"].rpartition(":")[0].strip("[]")
    return Firewall([status.name(node) for node in suspected], incoming, address)


def lost_coordinator(status: JobStatus) -> NodeStatus | None:
    """Return the coordinator's node if its state is LOST, else None."""
    coordinator = status.nodes.get(status.coordinator)
    return coordinator if coordinator is not None and coordinator.state is NodeState.LOST else None


def away_coordinator(status: JobStatus) -> NodeStatus | None:
    """Return the coordinator's node if the outcome of an elastic job is LOST and this node has not ended; else None."""
    coordinator = status.nodes.get(status.coordinator)
    lost = status.outcome is not None and status.outcome.state is JobState.LOST and status.elastic
    return coordinator if lost and coordinator is not None and coordinator.state is not NodeState.ENDED else None


def _without_connection(status: JobStatus) -> list[NodeStatus]:
    """List the nodes that report that they cannot connect to the coordinator, sorted by number."""
    return [node for _, node in sorted(status.nodes.items()) if node.unconnected]


def _seconds_since(now: float, since: float) -> float:
    """Return the seconds from `since` to `now`, from 0 to 1e6, since the time comes from a node."""
    return max(0.0, min(now - since, 1e6))


def _late_pservers(status: JobStatus, now: float) -> list[ListenWait]:
    """Return [a wait for the pservers that have lived for 10 s without opening their port]; [] if there are none.

    Also [] in another phase than the pservers' start.
    """
    if status.phase != "pserver":
        return []
    waiting = [p for p in status.of("pserver") if p.state.alive and not p.listening]
    late = [p for p in waiting if _seconds_since(now, p.since) >= _LISTEN_AFTER]
    if not late:
        return []
    seconds = max(_seconds_since(now, p.since) for p in late)
    return [ListenWait([(p.rank, status.name(p.node), p.endpoint) for p in late], seconds)]
