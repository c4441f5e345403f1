"""The preflight connects to, probes and pings all nodes, and checks the results. With one error nothing starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clustertool.engines.caller import Caller
from clustertool.errors import AuthError, ClustertoolError, InternalError, NoPython, PreflightError, raise_all
from clustertool.fleet.fleet import Fleet, devices_of
from clustertool.fleet.ping import ping_all
from clustertool.model.checks.device_counts import inventory, nodes_to_ask, shared_cards
from clustertool.model.checks.each_node import check, disk, errors, unreachable
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold, grouped
from clustertool.model.config.hosts import Host
from clustertool.model.container.container_settings import NO_CONTAINER, ContainerSettings
from clustertool.model.facts import ByNode, read_facts
from clustertool.model.finding import Finding, Seen, cells
from clustertool.model.mpi.launch_command import DAEMONS
from clustertool.model.planning.node_container import container_request
from clustertool.model.planning.plan import Plan
from clustertool.model.planning.requests import job_environment, probe_request
from clustertool.model.wire.agent_answers import ProbeAnswer
from clustertool.model.wire.agent_requests import JobEnvironment, ProbeWanted
from clustertool.model.wire.messages import PROBE, PROBE_CONTAINER, PROBE_FOR_CHECK, PROBE_FOR_RUN, Request
from clustertool.ssh.parallel import Gathered
from clustertool.ssh.settings import settings

Wanted = ProbeWanted | Callable[[Host], ProbeWanted]  # of all nodes, or of each


@dataclass(frozen=True)
class Examined:
    """The result of a preflight of a cluster: facts of the nodes that answered, findings of all, and errors."""

    cluster: Cluster
    facts: ByNode
    findings: tuple[Finding, ...]
    failed: Mapping[int, ClustertoolError]

    def add_findings(self, more: Iterable[Finding]) -> Examined:
        """Return a copy with further findings."""
        return replace(self, findings=(*self.findings, *more))

    def check_disk(self, need: Mapping[int, int]) -> Examined:
        """Return a copy in which new findings about the disk replace those of the nodes of `need`.

        need: {node: bytes of the job's data}; their facts must be known. Returns itself if the check "disk" is off.
        """
        if "disk" in self.cluster.checks_off:
            return self
        kept = tuple(finding for finding in self.findings if finding.column != "disk" or finding.node not in need)
        return replace(self, findings=kept).add_findings(disk(self.facts[node], size) for node, size in need.items())

    def check_devices(self, fleet: Fleet, made: Plan | None) -> Examined:
        """Ask the nodes with cards for the state of these, and return a copy with findings about them.

        A node that gives no answer gets an error in the column "health", and is added to `failed`. Returns itself if no node
        has cards. made: the plan, whose shared devices are no error; None: there is none.
        """
        nodes = nodes_to_ask(self.cluster, self.facts)
        if not nodes:
            return self
        gathered = devices_of(fleet, nodes)
        found = list(inventory(self.cluster, self.facts, gathered.ok, shared_cards(made)))
        failed = gathered.failed.items()
        found += [Finding(node, "health", "error", short_error(error), error.fix) for node, error in failed]
        return replace(self.add_findings(found), failed={**self.failed, **gathered.failed})

    def require(self) -> None:
        """Raise the errors of all nodes together, those of connections and those of findings; do nothing if no node has one."""
        raised: list[ClustertoolError] = list(self.failed.values())
        for finding in errors(self.findings):
            if finding.node not in self.failed:
                raised.append(PreflightError(finding.text, finding.fix, self.cluster.hosts[finding.node].name))
        raise_all(raised)

    def warn(self, caller: Caller) -> None:
        """Print each finding of the level "warn" once, with the folded names of all nodes that have it."""
        warnings = [finding for finding in self.findings if finding.level == "warn"]
        alike = grouped(((one.column, one.text, one.fix), one.node) for one in warnings)
        for (column, text, fix), nodes in alike.items():
            caller.warn(f"{name_folder(self.cluster)(nodes)}: {column}: {text} ({fix})")

    def leave_out_bad(self, caller: Caller, most: int = 0, least: int = 1, first: str = "") -> Examined:
        """Return a copy with the nodes without errors, numbered anew; print a warning for each other node, which is left out.

        most: keep at most so many, and raise if fewer are left; 0: all. first: name or address of the host that becomes node 0,
        "" for the first good one. If fewer than `least` or `most` are left, or `first` is not good: raises the errors of all
        nodes, if there are any, after a warning about that.
        """
        hosts, wrong = self.cluster.hosts, errors(self.findings)
        bad = set(self.failed) | {finding.node for finding in wrong}
        good = [host for host in hosts if host.index not in bad]
        chief = next((host for host in good if first in (host.name, host.host, host.address)), None) if first else None
        if len(good) < max(least, most) or (first and chief is None):
            if len(good) < max(most, least if least > 1 else 0):
                caller.warn(f"{len(good)} of {len(hosts)} nodes are ready, --nnodes needs {max(most, least)}")
            elif first and chief is None:
                caller.warn(f"{first} is not ready, and it is COORDINATOR")
            self.require()
        for node in sorted(bad):
            why = next((f for f in wrong if f.node == node), None)
            text = f"{why.column}: {why.text} ({why.fix})" if why else short_error(self.failed[node])
            caller.warn(f"{hosts[node].name} is left out: {text}")
        good = sorted(good, key=lambda host: host is not chief)[: most or None]
        new = {host.index: number for number, host in enumerate(good)}
        facts = {new[node]: replace(fact, node=new[node]) for node, fact in self.facts.items() if node in new}
        findings = tuple(replace(f, node=new[f.node]) for f in self.findings if f.node in new)
        kept = tuple(replace(host, index=new[host.index]) for host in good)
        return Examined(replace(self.cluster, hosts=kept), facts, findings, {})

    def rows(self) -> list[dict[str, Any]]:
        """Build a row of the check matrix for each node: {"node": its name, "findings": {column: {"level", "text", "fix"}}}.

        An error has the level "bad". A column has the worst findings of the node in it.
        """
        rows = []
        for host in self.cluster.hosts:
            found = {
                column: {"level": {"error": "bad"}.get(f.level, f.level), "text": f.text, "fix": f.fix}
                for column, f in cells(self.findings, host.index).items()
            }
            rows.append({"node": host.name, "findings": found})
        return rows

    def exit_code(self) -> int:
        """Return the exit code of a preflight that has found an error, which the caller has checked.

        70 if an error in `failed` is a bug of the tool, 77 if all of them are refused logins or host keys, else 69. Findings do
        not count.
        """
        if any(isinstance(error, InternalError) for error in self.failed.values()):
            return 70
        return 77 if self.failed and all(isinstance(error, AuthError) for error in self.failed.values()) else 69


def examine(
    fleet: Fleet, request: Wanted, ports: bool = True, ping: bool = True, container: ContainerSettings = NO_CONTAINER
) -> Examined:
    """Open the fleet, probe each node, and check the answers. Errors of single nodes are in the result, and not raised.

    request: what else to ask, of all nodes or by host. ports: also check the ports. ping: also run the command ping for each
    node, unless the check "ping" is off; it explains why a node does not answer, and is waited for up to 3 s only if one does
    not. container: of the job.
    """
    cluster = fleet.cluster
    pings: dict[int, bool | None] = {}
    pinger = threading.Thread(target=_ping_hosts, args=(cluster, pings), daemon=True)
    if ping and "ping" not in cluster.checks_off:
        pinger.start()
    gathered = probe(fleet.open(), request, container)
    failed = {**fleet.failed, **gathered.failed}
    facts = {node: read_facts(node, answer) for node, answer in sorted(gathered.ok.items())}
    if pinger.is_alive() and failed:  # a ping decides nothing for a node that answered by ssh
        pinger.join(3.0)
    when = {node: answer["asked"] for node, answer in gathered.ok.items() if "asked" in answer}
    findings = list(check(cluster, facts, Seen(dict(pings), when, fleet.phases), ports=ports, container=container))
    for node, error in failed.items():
        column = "python" if isinstance(error, NoPython) else "ssh"
        findings += unreachable(node, dict(pings), short_error(error), error.fix, column)
    return Examined(cluster, facts, tuple(findings), failed)


def short_error(error: ClustertoolError) -> str:
    """Return the text of an error for a cell of a table: of an InternalError without the traceback."""
    return error.short if isinstance(error, InternalError) else error.what


def for_check(cluster: Cluster, host: Host, passed: Mapping[str, str]) -> ProbeWanted:
    """Build what `check` asks a node in addition: the environment of a rank, and which packages to search for in it.

    {"job": {}} if the check "packages" is off.
    """
    job: JobEnvironment = {**job_environment(cluster, host, passed), "packages": list(cluster.check_packages)}
    return {"job": {} if "packages" in cluster.checks_off else job}


def for_mpi(cluster: Cluster, host: Host, passed: Mapping[str, str]) -> ProbeWanted:
    """Build what a probe asks a node in addition for the mode mpi: which MPI it has. passed: variables of the job."""
    return {"mpi": {**job_environment(cluster, host, passed), "packages": list(DAEMONS)}}


def probe(fleet: Fleet, request: Wanted, container: ContainerSettings = NO_CONTAINER) -> Gathered[ProbeAnswer]:
    """Send the probe to all hosts at once, and for a job in containers a second request for the runtime and the image.

    request: what else to ask, of all nodes or by host. Returns {node: answer}, in which the second answer is "container", and
    {node: error} of the nodes where one of the two requests has failed.
    """
    gathered = fleet.ask({host.index: _probe_request(fleet.cluster, host, request) for host in fleet.cluster.hosts})
    if not container:
        return gathered
    asked = {node: PROBE_CONTAINER(container_request(container, answer)) for node, answer in gathered.ok.items()}
    found = fleet.ask(asked)
    answers: dict[int, ProbeAnswer] = {node: {**gathered.ok[node], "container": own} for node, own in found.ok.items()}
    return Gathered(answers, {**gathered.failed, **found.failed})


def _probe_request(cluster: Cluster, host: Host, request: Wanted) -> Request[ProbeAnswer]:
    """Build the probe request for a host.

    It is that of `check` if `request` asks for "job", else that of `run` if it asks for "earlier", else the usual one.
    """
    wanted = request(host) if callable(request) else request
    kind = PROBE_FOR_CHECK if "job" in wanted else PROBE_FOR_RUN if "earlier" in wanted else PROBE
    return kind({**probe_request(cluster, host), **wanted})


def _ping_hosts(cluster: Cluster, into: dict[int, bool | None]) -> None:
    """Ping all hosts at once, within CONNECT_TIMEOUT, and put {node: whether it answers, None: not measured} into `into`.

    This machine is left out, and hosts behind a gateway or ProxyCommand, or whose SSH settings cannot be read.
    """
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


def name_folder(cluster: Cluster) -> Callable[[Iterable[int]], str]:
    """Create a function that folds the names of these nodes into a short text: node[1-3]."""
    return lambda nodes: fold(cluster.hosts[node].name for node in nodes)
