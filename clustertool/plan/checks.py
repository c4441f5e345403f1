"""Checks are pure: all nodes' probes in, findings out; a finding names the node, what is wrong and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from clustertool.plan.cluster import Cluster
from clustertool.plan.facts import Facts

COLUMNS = ("ping", "ssh", "python", "rsync", "root", "disk", "nic", "ports", "clock", "workspace")
_LITTLE = 256 << 20  # bytes free under which a node is warned of
_SKEW = 5.0  # seconds between a node's clock and the laptop's


@dataclass(frozen=True)
class Finding:
    """One cell of the matrix. level: ok, warn, error, skip."""

    node: int
    column: str
    level: str
    text: str
    fix: str = ""


def check(
    cluster: Cluster, facts: Mapping[int, Facts], pings: Mapping[int, Optional[float]], now: float, need: int = 0,
    ports: bool = True,
) -> Tuple[Finding, ...]:
    """Findings of all nodes that answered. `pings`: seconds, None for no answer, absent where none was sent.

    `need`: bytes that the workspace takes on each node (release and job's copy). `ports`: look at the ports that conf.py names;
    for a job this is its plan's work, which knows the ports that the job will use.
    """
    found: List[Finding] = []
    for node, fact in sorted(facts.items()):
        found += _node(cluster, fact, need, ports)
        found.append(_clock(node, fact, now))
        if node in pings:
            found.append(_ping(node, pings[node], answered=True))
    return tuple(f for f in found if f.column not in cluster.checks_off)


def unreachable(node: int, pings: Mapping[int, Optional[float]], what: str, fix: str) -> Tuple[Finding, ...]:
    """What is known of a node that ssh did not reach: no ping either is then an error."""
    found = [Finding(node, "ssh", "error", what, fix)]
    if node in pings:
        found.append(_ping(node, pings[node], answered=False))
    return tuple(found)


def _ping(node: int, seconds: Optional[float], answered: bool) -> Finding:
    if seconds is not None:
        return Finding(node, "ping", "ok", "ok")
    level = "warn" if answered else "error"
    return Finding(node, "ping", level, "no answer", "is the machine up, is its address right? (a firewall may eat pings)")


def _node(cluster: Cluster, fact: Facts, need: int, ports: bool) -> List[Finding]:
    n = fact.node
    found = [Finding(n, "ssh", "ok", fact.user), Finding(n, "python", "ok", fact.python)]
    if fact.rsync:
        found.append(Finding(n, "rsync", "ok", "yes"))
    else:
        found.append(Finding(n, "rsync", "error", "no rsync", "install the package rsync on the node"))
    found.append(disk(fact, need))
    if ports:
        found.append(_ports(cluster, n, fact))
    reported = {column for column, _, _, _ in fact.problems}
    found += [Finding(n, column, level, what, fix) for column, level, what, fix in fact.problems]
    if "root" not in reported:
        found.append(Finding(n, "root", "ok", "ok"))
    if "nic" not in reported:
        found.append(Finding(n, "nic", "ok", fact.nic or "ok"))
    return found


def disk(fact: Facts, need: int) -> Finding:
    node, free = fact.node, fact.disk_free
    text = f"{_size(free)} free"
    if free < need or free < 1 << 20:
        fix = "make room, or choose another ROOT_DIR; inv clean --older-than 7d removes old jobs"
        return Finding(node, "disk", "error", f"{text}, {_size(max(need, 1 << 20))} needed below {fact.root}", fix)
    if free < need + _LITTLE:
        return Finding(node, "disk", "warn", text, "make room: inv clean --older-than 7d removes old jobs")
    return Finding(node, "disk", "ok", "ok")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _ports(cluster: Cluster, node: int, fact: Facts) -> Finding:
    """Ports that conf.py demands. A default port that is taken is only avoided, so it is no finding."""
    wanted: List[Tuple[str, int]] = []
    if cluster.pserver_port_given:
        width = cluster.ports_num + cluster.ports_num_for_sparse
        wanted += [("PADDLE_PORT", cluster.pserver_port + i) for i in range(width)]
    if cluster.start_port:
        wanted.append(("START_PORT", cluster.start_port))
    if cluster.lead_port and node == 0:
        wanted.append(("LEAD_PORT", cluster.lead_port))
    taken = [f"{port} ({key}) is held by {fact.holder(port)}" for key, port in wanted if port in fact.busy]
    if taken:
        return Finding(node, "ports", "error", "; ".join(taken), "end that program, or choose another port in conf.py")
    return Finding(node, "ports", "ok", "free")


def _clock(node: int, fact: Facts, now: float) -> Finding:
    skew = fact.time - now
    if abs(skew) > _SKEW:
        fix = "run a time service (chrony) on the node: logs are merged by time"
        return Finding(node, "clock", "warn", f"{skew:+.0f} s", fix)
    return Finding(node, "clock", "ok", "right")


def errors(findings: Sequence[Finding]) -> Tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.level == "error")
