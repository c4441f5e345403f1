"""This module plans a job whose machines joined: hosts from what they offered, facts from their probes, then as any job."""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Sequence, Tuple, cast

from clustertool.errors import PreflightError, raise_all
from clustertool.model.checks.each_node import check, errors
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec
from clustertool.model.container.container_runtimes import MISSING, REGISTRY
from clustertool.model.facts import ByNode, Facts, nodes_that_may_share_root, read_facts
from clustertool.model.finding import Finding, Seen
from clustertool.model.job.formats import FORMAT
from clustertool.model.job.outcome import some
from clustertool.model.joining.join_file import JoinFile, OwnSettings
from clustertool.model.masking import HIDDEN
from clustertool.model.mpi.launch_command import DAEMONS
from clustertool.model.paths import JobPaths
from clustertool.model.planning import requests
from clustertool.model.planning.environment import endpoint, mark
from clustertool.model.planning.plan import Plan, PlannedNode, plan
from clustertool.model.planning.requests import job_environment, probe_request

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import ProbeRequest
    from clustertool.model.wire.spec_types import ElasticSpec, Spec

_NO_SSH = ("ping", "ssh", "rsync")  # checks of the way that a laptop takes
_OF_OTHERS = ("load",)  # an engine places other jobs on the same nodes


@dataclass(frozen=True)
class Arrival:
    """A machine that has joined; its position in a sequence is its node id.

    address: its training address. member: its number in an elastic job.
    """

    hostname: str
    address: str
    own: OwnSettings
    member: Optional[int] = None


def cluster_of(join: JoinFile, arrivals: Sequence[Arrival], port: int) -> Cluster:
    """Build the coordinator's cluster with these machines as hosts, without the checks of ssh; images come from the registry.

    port: the one at which the machines join. A display name is the host name; with the address, or the number in the job,
    where two are alike.
    """
    roles = join.of_engine.roles
    alike = Counter(arrival.hostname for arrival in arrivals)
    same = Counter((arrival.hostname, arrival.address) for arrival in arrivals)

    def name(node: int, one: Arrival) -> str:
        if alike[one.hostname] == 1:
            return one.hostname
        if same[one.hostname, one.address] == 1:
            return f"{one.hostname}({one.address})"
        return f"{one.hostname}#{node if one.member is None else one.member}"

    hosts = tuple(
        Host(
            index=node,
            host=one.hostname,
            address=one.address,
            devices=one.own.devices,
            nproc=one.own.nproc,
            roles=((roles[node], None),) if roles else one.own.roles,
            env=one.own.env,
            root_dir=one.own.root_dir,
            prelude=one.own.prelude,
            interface=one.own.interface,
            name=name(node, one),
            here=one.own.here,
            member=one.member,
            base=one.own.base,
            conf_entry=one.own.entry,
            twin=one.own.twin,
        )
        for node, one in enumerate(arrivals)
    )
    off = (*join.cluster.checks_off, *_NO_SSH, *(_OF_OTHERS if join.engine else ()))
    return replace(join.cluster, hosts=hosts, lead_port=port, checks_off=off, image_from=REGISTRY)


def probe_of(join: JoinFile, own: OwnSettings, address: str) -> ProbeRequest:
    """Build the request with which this machine probes itself for the plan: ROOT_DIR, address, PATH, mpirun, and its folder."""
    host = Host(0, address, address=address, root_dir=own.root_dir, prelude=own.prelude, interface=own.interface)
    request = probe_request(join.cluster, host)
    request["engine"] = join.engine
    if "job_path" in request and own.first_path:
        request["job_path"].insert(0, own.first_path)
    if join.job.by_mpirun:
        asked = job_environment(join.cluster, host, {**dict(join.passed), **dict(own.env), **dict(join.job.env)})
        asked["first_path"], asked["here"] = own.first_path or asked["first_path"], own.here
        asked["engine"], asked["packages"] = join.engine, list(DAEMONS)
        request["mpi"] = asked
    if own.folder:
        request["job_workspace"], request["listing"] = own.folder, bool(join.job.shards)
    return request


def facts_of(node: int, answer: object, port: int) -> Facts:
    """Read a machine's answer to its probe. On node 0 the port of the joining is not busy. Raises ValueError.

    port: the one at which the machines join now, which is free for the coordinator of the job then.
    """
    facts = read_facts(node, answer)
    return replace(facts, busy=facts.busy - {port}) if node == 0 else facts


def plan_of(join: JoinFile, cluster: Cluster, arrivals: Sequence[Arrival], facts: ByNode, seen: Seen) -> Plan:
    """Check the facts and plan the job, with the warnings of the checks.

    Raises the errors of the checks of all nodes together, also about SECRETS; without such, the errors of the plan.
    """
    facts = _with_shared_roots(facts)
    findings = check(cluster, facts, seen, ports=False, container=join.job.container)
    names = [host.name for host in cluster.hosts]
    wrong = [PreflightError(one.text, one.fix, names[one.node]) for one in errors(findings)]
    raise_all([*wrong, *_without_secrets(cluster, arrivals, names)])
    listing = join.listing or sorted({path for fact in facts.values() for path in fact.listing})
    made = plan(cluster, _with_pulled(join.job), facts, join.identity, listing, join.passed + _masked_secrets(join))
    nodes = tuple(_with_own_folder(node, arrivals[node.host.index].own) for node in made.nodes)
    warnings = (
        *made.warnings,
        *_warnings(findings, names),
        *_warn_of_workspaces(arrivals, names),
        *_warn_of_commands(arrivals, names),
    )
    return replace(made, nodes=nodes, warnings=warnings)


def _with_pulled(job: JobSpec) -> JobSpec:
    """Return the job with `pull` = "missing": each machine has pulled its image, and the plan names the one that is there."""
    return replace(job, container=replace(job.container, pull=MISSING)) if job.container else job


def _with_shared_roots(facts: ByNode) -> ByNode:
    """Give nodes that may share ROOT_DIR the same root id, so that each has its own folder there.

    A laptop finds this out by marks in ROOT_DIR. Here a wrong guess costs a folder name, and no round of messages.
    """
    doubtful = nodes_that_may_share_root(facts)
    return {n: replace(fact, root_id=f"hint/{fact.root_hint}") if n in doubtful else fact for n, fact in facts.items()}


def specs(
    made: Plan, arrivals: Sequence[Arrival], engine: str, elastic: "ElasticSpec | None" = None
) -> Dict[int, Spec]:
    """Build each node's spec from the plan, with the settings of its machine.

    engine: what has started the nodes, "" for users. elastic: of the epoch.
    """
    found: Dict[int, Spec] = {}
    for node, request in requests.start(made, {}, {}).phases[0].requests.items():
        spec: Spec = request.fields["spec"]  # type: ignore[assignment]
        spec["first_path"] = arrivals[node].own.first_path or spec["first_path"]
        if arrivals[node].own.folder:
            spec["log_dir"] = arrivals[node].own.log_dir
        spec["engine"] = engine
        spec["allocated"] = list(made.nodes[node].facts.allocated or ())
        if elastic is not None:
            spec["elastic"], spec["attempt"] = elastic, elastic["epoch"]
            spec["header"]["epoch"], spec["header"]["lead"] = elastic["epoch"], spec["lead"]["node"]
            limits = made.job.elastic
            spec["header"]["minimum"], spec["header"]["maximum"] = limits.minimum, limits.maximum
        found[node] = spec
    return found


def unplanned_spec(join: JoinFile, root: str, hostname: str) -> Spec:
    """Build the spec of a member of an elastic job before its first plan: enough for its record.

    root: ROOT_DIR of this machine. It has no processes, and the coordinator is the one of the start.
    """
    number, own, identity = join.index or 0, join.own, join.identity
    name = own.name or hostname
    paths = JobPaths(own.base, identity.job_id)
    meets = join.coordinator
    where = endpoint(meets.host, meets.port)
    spec = {
        "job": identity.job_id,
        "node": number,
        "name": name,
        "root": root,
        "job_dir": paths.dir,
        "mark": mark(identity.job_id, number, identity.token),
        "token": identity.token,
        "lead": {"node": 0, "name": "", "host": meets.host, "port": meets.port, "endpoint": where},
        "header": {
            "format": FORMAT,
            "id": identity.job_id,
            "node": number,
            "name": name,
            "entry": own.entry,
            "hostname": hostname,
            "nodes": [name if node == number else "" for node in range(number + 1)],
            "created": identity.created,
            "owner": identity.owner,
            "asked": identity.asked,
            "job_name": identity.name,
            "workspace": identity.workspace,
            "mode": join.job.mode,
            "command": " ".join(join.job.trainer.command or ())[:200],
            "output": join.job.output,
            "work_dir": paths.dir,
            "processes": [],
            "places": [],
            "lead": meets.member,
            "minimum": join.job.elastic.minimum,
            "maximum": join.job.elastic.maximum,
        },
    }
    return cast("Spec", spec)


def _masked_secrets(join: JoinFile) -> Tuple[Tuple[str, str], ...]:
    """List the names of SECRETS for ranks, with a mask for each value: each machine has the values itself."""
    return tuple((name, HIDDEN) for name in join.job.elastic.server.of_ranks(join.cluster.secrets))


def _without_secrets(cluster: Cluster, arrivals: Sequence[Arrival], names: Sequence[str]) -> List[PreflightError]:
    """List an error for each machine that has not all values of SECRETS: its ranks would get the mask in their place."""
    found = []
    for arrival, name in zip(arrivals, names):
        lacking = ", ".join(one for one in cluster.secrets if one not in arrival.own.secrets)
        if lacking:
            fix = "give each machine a conf.py with these SECRETS, and their values"
            found.append(PreflightError(f"SECRETS of {names[0]} are not here: {lacking}", fix, name))
    return found


def _with_own_folder(node: PlannedNode, own: OwnSettings) -> PlannedNode:
    """Set the working directory of a machine with a `folder`, to which the workspace is not sent; return others unchanged."""
    return replace(node, work_dir=posixpath.normpath(own.folder)) if own.folder else node


def _warnings(findings: Sequence[Finding], names: Sequence[str]) -> List[str]:
    """Build the text of each warning once, with the names of all nodes that it is about."""
    nodes: Dict[str, List[str]] = {}
    for one in findings:
        if one.level == "warn":
            nodes.setdefault(f"{one.column}: {one.text} ({one.fix})", []).append(names[one.node])
    return [f"{some(named)}: {text}" for text, named in nodes.items()]


def _warn_of_workspaces(arrivals: Sequence[Arrival], names: Sequence[str]) -> List[str]:
    """Build a warning about machines whose files are not those of the coordinator, [] without one.

    A digest "": not computed.
    """
    digests: Mapping[int, str] = {node: one.own.workspace_digest for node, one in enumerate(arrivals)}
    other = [names[node] for node, digest in digests.items() if digest and digests[0] and digest != digests[0]]
    if not other:
        return []
    return [f"the files in the folder of {', '.join(other)} differ from those on {names[0]}: is one of them outdated?"]


def _warn_of_commands(arrivals: Sequence[Arrival], names: Sequence[str]) -> List[str]:
    """Build a warning about machines with another typed command than the coordinator's, which runs; [] without one.

    A command "": not known.
    """
    first = arrivals[0].own.command
    other = {names[node]: one.own.command for node, one in enumerate(arrivals) if one.own.command not in ("", first)}
    if not (first and other):
        return []
    name, command = next(iter(other.items()))
    return [
        f"{', '.join(other)}: another command was typed than on {names[0]}, which runs everywhere: {command!r}, not {first!r}"
    ]
