"""Checks turn the probes of all nodes into findings. A finding names the node, the fault and the fix. This module is pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from clustertool.model.checks.across_nodes import drift
from clustertool.model.checks.condition import FEW_INODES, condition, phases
from clustertool.model.config.cluster import Cluster
from clustertool.model.facts import Facts
from clustertool.model.finding import COLUMNS as COLUMNS  # the callers' name for all of it is here
from clustertool.model.finding import Finding as Finding
from clustertool.model.finding import Seen as Seen
from clustertool.model.finding import cells as cells
from clustertool.model.quantities import human_bytes

_LITTLE = 256 << 20  # bytes free under which a node is warned of


def check(
    cluster: Cluster, facts: Mapping[int, Facts], seen: Seen, need: int = 0, ports: bool = True
) -> Tuple[Finding, ...]:
    """Findings of all nodes that answered.

    `need`: bytes that the workspace takes on each node (release and job's copy). `ports`: check the ports that conf.py names;
    for a job its plan does this, which knows the ports that the job will use.
    """
    found: List[Finding] = []
    alike = _by_machine(facts)
    for node, fact in sorted(alike.items()):
        found.append(phases(node, fact.user, seen.phases.get(node, {})))
        found += _node(cluster, fact, need, ports)
        found += condition(cluster, fact)
        if node in seen.pings:
            found.append(_ping(node, seen.pings[node], answered=True))
    found += drift(dict(sorted(alike.items())), seen.asked)
    return tuple(finding for finding in found if finding.column not in cluster.checks_off)


def _by_machine(facts: Mapping[int, Facts]) -> Dict[int, Facts]:
    """Values that all nodes of one machine share are reported once, by its first node, since they were read at
    different times."""
    first: Dict[str, Facts] = {}
    for node in sorted(facts):
        first.setdefault(facts[node].machine, facts[node])
    return {
        node: replace(
            fact, load=first[fact.machine].load, memory=first[fact.machine].memory, shm=first[fact.machine].shm
        )
        for node, fact in facts.items()
    }


def unreachable(node: int, pings: Mapping[int, Optional[bool]], what: str, fix: str) -> Tuple[Finding, ...]:
    """What is known of a node that ssh did not reach: no ping either is then an error."""
    found = [Finding(node, "ssh", "error", what, fix)]
    if node in pings:
        found.append(_ping(node, pings[node], answered=False))
    return tuple(found)


def _ping(node: int, answer: Optional[bool], answered: bool) -> Finding:
    """`answered`: the node answered by ssh."""
    if answer is None:
        return Finding(node, "ping", "skip", "not measured")
    if answer:
        return Finding(node, "ping", "ok", "ok")
    level = "warn" if answered else "error"
    return Finding(
        node, "ping", level, "no answer", "is the machine up, is its address right? (a firewall may eat pings)"
    )


def _node(cluster: Cluster, fact: Facts, need: int, ports: bool) -> List[Finding]:
    n = fact.node
    found = [Finding(n, "python", "ok", fact.python)]
    if fact.rsync:
        found.append(Finding(n, "rsync", "ok", "yes"))
    elif cluster.dispatch == "rsync":
        found.append(Finding(n, "rsync", "error", "no rsync", "install the package rsync on the node"))
    else:
        found.append(Finding(n, "rsync", "ok", "no"))
    found.append(disk(fact, need))
    if ports:
        found.append(_ports(cluster, n, fact))
    reported = {column for column, _, _, _ in fact.problems}
    found += [Finding(n, column, level, what, fix) for column, level, what, fix in fact.problems]
    if "root" not in reported:
        found.append(Finding(n, "root", "ok", "ok"))
    if "tmp" not in reported:
        found.append(Finding(n, "tmp", "ok", "ok"))
    if "nic" not in reported:
        found.append(Finding(n, "nic", "ok", fact.nic or "ok"))
    return found


def disk(fact: Facts, need: int) -> Finding:
    node, free = fact.node, fact.disk_free
    text = f"{human_bytes(free)} free"
    if free < need or free < 1 << 20:
        fix = "make room, or choose another ROOT_DIR; inv clean --older-than 7d removes old jobs"
        return Finding(
            node, "disk", "error", f"{text}, {human_bytes(max(need, 1 << 20))} needed below {fact.root}", fix
        )
    if 0 <= fact.inodes < FEW_INODES:
        level = "warn" if fact.inodes else "error"
        return Finding(
            node, "disk", level, f"{fact.inodes} inodes free", "remove small files: inv clean --older-than 7d"
        )
    if free < need + _LITTLE:
        return Finding(node, "disk", "warn", text, "make room: inv clean --older-than 7d removes old jobs")
    return Finding(node, "disk", "ok", "ok")


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
    taken = [f"{port} ({key}) is in use by {fact.holder(port)}" for key, port in wanted if port in fact.busy]
    if taken:
        return Finding(node, "ports", "error", "; ".join(taken), "end that program, or choose another port in conf.py")
    return Finding(node, "ports", "ok", "free")


def errors(findings: Sequence[Finding]) -> Tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.level == "error")
