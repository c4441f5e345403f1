"""The preflight connects to, probes and pings all nodes, and checks the results. With one error nothing starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clustertool.errors import REPORT, AuthError, ClustertoolError, InternalError, PreflightError, raise_all
from clustertool.fleet.device_check import devices_of
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.ping import ping_all
from clustertool.model.checks.device_counts import inventory, shared, to_ask
from clustertool.model.checks.each_node import Finding, Seen, cells, check, disk, errors, unreachable
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.facts import Facts, read_facts
from clustertool.model.planning.plan import Plan
from clustertool.model.wire.agent_answers import ProbeAnswer
from clustertool.model.wire.agent_requests import JobEnvironment, ProbeRequest, ProbeWanted
from clustertool.model.wire.messages import PROBE, Request
from clustertool.show.table import fold
from clustertool.ssh.parallel import Gathered
from clustertool.ssh.settings import settings
from clustertool.verbs.verb import Call

Wanted = ProbeWanted | Callable[[Host], ProbeWanted]  # of all nodes, or of each


@dataclass(frozen=True)
class Examined:
    """What a preflight saw: facts of the nodes that answered, findings of all."""

    facts: Mapping[int, Facts]
    findings: tuple[Finding, ...]
    failed: Mapping[int, ClustertoolError]


def examine(
    cluster: Cluster,
    fleet: Fleet,
    request: Wanted,
    ports: bool = True,
    ping: bool = True,
) -> Examined:
    """Open the fleet, if it is not, and probe each node as soon as it is there. Raises nothing for a single node.

    `ping`: also run the command ping for each node, whose result only a table shows.
    """
    pings: dict[int, bool | None] = {}
    pinger = threading.Thread(target=_ping, args=(cluster, pings), daemon=True)
    if ping and "ping" not in cluster.checks_off:
        pinger.start()
    answers: dict[int, ProbeAnswer] = {}
    refused: dict[int, ClustertoolError] = {}

    def ask(node: int) -> None:
        try:
            answers[node] = probe_one(cluster, fleet, request, node)
        except ClustertoolError as error:
            refused[node] = error

    if not fleet.opened:
        fleet.open(opened=ask)
    had = {*answers, *refused}
    gathered = fleet.ask(
        {host.index: _question(cluster, host, request) for host in cluster.hosts if host.index not in had}
    )
    answers.update(gathered.ok)
    failed = {**fleet.failed, **gathered.failed, **refused}
    facts = _read(cluster, answers, failed)
    if pinger.is_alive() and failed:  # a ping decides nothing for a node that answered by ssh
        pinger.join(3.0)
    when = {node: answer["asked"] for node, answer in answers.items() if "asked" in answer}
    findings = list(check(cluster, facts, Seen(dict(pings), when, fleet.phases), ports=ports))
    for node, error in failed.items():
        findings += unreachable(node, dict(pings), short(error), error.fix)
    return Examined(facts, tuple(findings), failed)


def _read(
    cluster: Cluster, answers: Mapping[int, ProbeAnswer], failed: dict[int, ClustertoolError]
) -> dict[int, Facts]:
    """The facts of the nodes' answers. A node with an invalid answer is added to `failed`."""
    facts = {}
    for node, answer in sorted(answers.items()):
        try:
            facts[node] = read_facts(node, answer)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            what = f"its answer to the probe has a wrong form: {error!r}"
            failed[node] = InternalError(what, REPORT, cluster.hosts[node].name)
    return facts


def short(error: ClustertoolError) -> str:
    """The error for a cell of a table; without the traceback of a bug."""
    return error.short if isinstance(error, InternalError) else error.what


def for_check(cluster: Cluster, host: Host, passed: Mapping[str, str]) -> ProbeWanted:
    """Additional requests of `check` to a node: the environment of a rank, and what to search for in it."""
    job: JobEnvironment = {
        "prelude": cluster.prelude,
        "first_path": cluster.first_path,
        "ld_library_path": cluster.ld_library_path,
        "here": host.here,
        "env": {**dict(cluster.env), **dict(host.env), **passed},
        "packages": list(cluster.check_packages),
    }
    return {"long": True, "job": {} if "packages" in cluster.checks_off else job}


def probe(cluster: Cluster, fleet: Fleet, request: Wanted) -> Gathered[ProbeAnswer]:
    """One round trip to every node. `request` is what the caller wants to know besides."""
    return fleet.ask({host.index: _question(cluster, host, request) for host in cluster.hosts})


def probe_one(cluster: Cluster, fleet: Fleet, request: Wanted, node: int) -> ProbeAnswer:
    """The same of one node, in the caller's thread. Raises what the node raised, or Unreachable."""
    return fleet.ask_one(node, _question(cluster, cluster.hosts[node], request))


def _question(cluster: Cluster, host: Host, request: Wanted) -> Request[ProbeAnswer]:
    fields: ProbeRequest = {
        "root_dir": host.root_dir or cluster.root_dir,
        "nic": cluster.nic,
        "address": host.address,
        "explicit_address": host.address if host.address != host.host else "",
        "ports": wanted_ports(cluster),
        **(request(host) if callable(request) else request),
    }
    return PROBE(fields)


def room(examined: Examined, cluster: Cluster, need: Mapping[int, int]) -> Examined:
    """The same with a check of the disk for the data of each node, which is known only when all have answered."""
    if "disk" in cluster.checks_off:
        return examined
    kept = tuple(finding for finding in examined.findings if finding.column != "disk" or finding.node not in need)
    return replace(examined, findings=kept + tuple(disk(examined.facts[node], size) for node, size in need.items()))


def with_devices(examined: Examined, cluster: Cluster, fleet: Fleet, made: Plan | None) -> Examined:
    """The same with a check of the cards of the nodes that have some; other nodes are not asked and get no NVML module."""
    nodes = to_ask(cluster, examined.facts)
    if not nodes:
        return examined
    gathered = devices_of(fleet, nodes)
    found = inventory(cluster, examined.facts, gathered.ok, shared(made))
    silent = tuple(Finding(node, "health", "error", short(error), error.fix) for node, error in gathered.failed.items())
    return replace(examined, findings=examined.findings + found + silent, failed={**examined.failed, **gathered.failed})


def wanted_ports(cluster: Cluster) -> list[int]:
    """Ports of conf.py: only their users are searched."""
    width = cluster.ports_num + cluster.ports_num_for_sparse
    named = [cluster.start_port + i for i in range(64)] if cluster.start_port else []
    return [*range(cluster.pserver_port, cluster.pserver_port + 8 * width), *named, cluster.lead_port]


def _ping(cluster: Cluster, into: dict[int, bool | None]) -> None:
    targets = {}
    for host in cluster.hosts:
        if host.here:
            continue
        try:
            resolved = settings(host, cluster)
        except ClustertoolError:  # the login reports it
            continue
        if not resolved.gateways and not resolved.proxy_command:  # behind a gateway a ping from here has no meaning
            targets[host.index] = resolved.hostname
    into.update(ping_all(targets, cluster.connect_timeout))


def require(examined: Examined, cluster: Cluster) -> None:
    """Raise all errors of all nodes at once, or nothing."""
    names = {host.index: host.name for host in cluster.hosts}
    found: list[ClustertoolError] = list(examined.failed.values())
    for finding in errors(examined.findings):
        if finding.node not in examined.failed:
            found.append(PreflightError(finding.text, finding.fix, names[finding.node]))
    raise_all(found)


def warn(examined: Examined, cluster: Cluster, call: Call) -> None:
    """Each warning once, with all nodes that it is about."""
    names = {host.index: host.name for host in cluster.hosts}
    about: dict[tuple[str, str, str], list[str]] = {}
    for finding in examined.findings:
        if finding.level == "warn":
            about.setdefault((finding.column, finding.text, finding.fix), []).append(names[finding.node])
    for (column, text, fix), nodes in about.items():
        call.terminal.warn(f"{fold(nodes)}: {column}: {text} ({fix})")


def good_only(examined: Examined, cluster: Cluster, call: Call, most: int = 0) -> tuple[Cluster, Examined]:
    """--skip-bad: cluster and facts without the nodes that failed, numbered anew; with --nnodes the first `most` of them.

    Raises what is wrong if none is left, or fewer than `most`.
    """
    wrong = errors(examined.findings)
    bad = set(examined.failed) | {finding.node for finding in wrong}
    good = [host for host in cluster.hosts if host.index not in bad]
    if len(good) < max(1, most):
        if most:
            fit = f"{len(good)} of {len(cluster.hosts)} nodes are fit"
            call.terminal.warn(f"{fit}, --nnodes wants {most}")
        require(examined, cluster)
    good = good[:most] if most else good
    for host in cluster.hosts:
        if host.index in bad:
            why = next((f for f in wrong if f.node == host.index), None)
            text = f"{why.column}: {why.text} ({why.fix})" if why else short(examined.failed[host.index])
            call.terminal.warn(f"{host.name} is left out: {text}")
    number = {host.index: new for new, host in enumerate(good)}
    facts = {number[node]: replace(fact, node=number[node]) for node, fact in examined.facts.items() if node in number}
    findings = tuple(replace(f, node=number[f.node]) for f in examined.findings if f.node in number)
    hosts = tuple(replace(host, index=number[host.index]) for host in good)
    return replace(cluster, hosts=hosts), Examined(facts, findings, {})


def matrix(examined: Examined, cluster: Cluster) -> list[dict[str, Any]]:
    """Rows of the check matrix, for show and for JSON."""
    return [
        {
            "node": host.name,
            "findings": {
                column: {"level": {"error": "bad"}.get(f.level, f.level), "text": f.text, "fix": f.fix}
                for column, f in cells(examined.findings, host.index).items()
            },
        }
        for host in cluster.hosts
    ]


def worst(failures: Sequence[ClustertoolError]) -> int:
    """70 for a bug on a node, 77 when all that failed were refused, else 69."""
    if any(isinstance(error, InternalError) for error in failures):
        return 70
    return 77 if failures and all(isinstance(error, AuthError) for error in failures) else 69
