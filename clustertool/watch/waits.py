"""This module derives from a job's status what the job waits for: connections to the coordinator, and ports of pservers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertool.model.job.node_status import NodeStatus
from clustertool.model.job.outcome import LEAD, coordinator, some
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import NodeState

_LISTEN_AFTER = 10.0  # seconds without a listening port after which a pserver is reported


@dataclass(frozen=True)
class Wait:
    """One thing that the job waits for. `kind`: connect or listen; `seconds`: for how long."""

    kind: str
    text: str
    seconds: float


def waits(status: JobStatus, now: float) -> list[Wait]:
    """All of them. `now`: seconds since the epoch. Empty once the job has a verdict."""
    if status.outcome is not None:
        return []
    return [*_connections(status, now), *_pservers(status, now)]


def due(wait: Wait) -> int:
    """How many reports of this wait are due by now: connect after 4, 10, 20 s, ...; listen after 10, 30, 60, 120 s, ..."""
    if wait.kind == "connect":
        return 0 if wait.seconds < 4 else 1 + int(wait.seconds // 10)
    return (wait.seconds >= 10) + (wait.seconds >= 30) + int(wait.seconds // 60)


def blocked(status: JobStatus) -> list[str]:
    """Describe the nodes that cannot connect to the coordinator: one sentence for each reason."""
    return [sentence for sentence, _ in _by_reason(status)]


def advice(status: JobStatus) -> str:
    """What may block these connections, and what to do; "" if no node reports a blocked one.

    If no other node has a connection, the coordinator's node is the suspect. Else each blocked node may be at fault as well.
    """
    nodes = [node for node in _without_connection(status) if not node.unconnected["again"]]
    if not nodes or coordinator_lost(status):
        return ""
    names, what = [_name(status, LEAD)], "incoming connections"
    if len(nodes) < len(status.nodes) - 1:
        names, what = [*names, *(_name(status, node.index) for node in nodes)], "the connections between them"
    return f"a firewall on {some(names, 'or')} may block {what}; run `clustertool check`"


def coordinator_lost(status: JobStatus) -> str:
    """Why the coordinator's own supervisor ended, if its node has recorded that; else ""."""
    lead = status.nodes.get(LEAD)
    return f"{_name(status, LEAD)}: {lead.why}" if lead is not None and lead.state is NodeState.LOST else ""


def _connections(status: JobStatus, now: float) -> list[Wait]:
    found = []
    for sentence, nodes in _by_reason(status):
        seconds = max(_age(now, float(node.unconnected["since"]) - node.skew) for node in nodes)
        found.append(Wait("connect", f"{sentence}; tried for {seconds:.0f} s", seconds))
    return found


def _by_reason(status: JobStatus) -> list[tuple[str, Sequence[NodeStatus]]]:
    groups: dict[str, list[NodeStatus]] = {}
    for node in _without_connection(status):
        groups.setdefault(_reason(status, node.unconnected), []).append(node)
    return [(f"{some([_name(status, node.index) for node in nodes])} {why}", nodes) for why, nodes in groups.items()]


def _reason(status: JobStatus, event: Mapping[str, Any]) -> str:
    errno = f" ({event['errno']})" if event["errno"] else ""
    what = "cannot connect again" if event["again"] else "cannot connect"
    return f"{what} to {coordinator(_name(status, LEAD), event['endpoint'])}: {event['why']}{errno}"


def _without_connection(status: JobStatus) -> list[NodeStatus]:
    return [node for _, node in sorted(status.nodes.items()) if node.unconnected]


def _age(now: float, since: float) -> float:
    """Seconds, within bounds: the time comes from a node."""
    return max(0.0, min(now - since, 1e6))


def _pservers(status: JobStatus, now: float) -> list[Wait]:
    if status.phase != "pserver":
        return []
    waiting = [p for p in status.of("pserver") if p.state.alive and not p.life.listening]
    late = [p for p in waiting if _age(now, p.since) >= _LISTEN_AFTER]
    if not late:
        return []
    seconds = max(_age(now, p.since) for p in late)
    what = some([_where(status, p) for p in late])
    fix = 'a pserver that opens no port needs [pserver] ready = "started" in job.toml'
    return [Wait("listen", f"the trainers wait until a port is open: {what}; {seconds:.0f} s so far ({fix})", seconds)]


def _where(status: JobStatus, process: ProcessStatus) -> str:
    return f"pserver {process.rank} on {_name(status, process.node)} at {process.endpoint}"


def _name(status: JobStatus, index: int) -> str:
    known = status.nodes.get(index)
    return known.name if known is not None and known.name else f"node {index}"
