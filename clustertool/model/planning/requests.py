"""This module has the requests that a job needs: the probe of a node before there is a plan, and those that start a plan.

A plan starts in phases that are barriers. An agent on every node places the job, then launches its supervisor. The first
node's supervisor is the coordinator.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Dict, List, Mapping, Tuple, cast

from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.container import container_command
from clustertool.model.container.container_command import Surroundings
from clustertool.model.job.formats import FORMAT
from clustertool.model.job.rank_places import Place, pack
from clustertool.model.paths import rank_home
from clustertool.model.planning.environment import endpoint, mark
from clustertool.model.planning.plan import Plan, PlannedNode, PlannedProcess, masked
from clustertool.model.roles import MPIRUN
from clustertool.model.wire.messages import LAUNCH, PLACE, UNPLACE, Request, stop_request

if TYPE_CHECKING:
    from clustertool.model.field_types import RankPlaces
    from clustertool.model.job.earlier_jobs import EarlierJob
    from clustertool.model.wire.agent_requests import JobEnvironment, ProbeRequest, StopHow
    from clustertool.model.wire.event_types import JobHeader
    from clustertool.model.wire.spec_types import Spec, SpecPolicy, SpecProcess

# -- facts for a plan --------------------------------------------------------------------------------------------------


def probe_request(cluster: Cluster, host: Host) -> ProbeRequest:
    """Build the request to probe one node. `ports`: those of conf.py; the probe finds the users of these only.

    They are those of 8 pservers from PADDLE_PORT on, 64 from START_PORT on, and LEAD_PORT. `job_path` is there only without
    PRELUDE and image.
    """
    pservers = 8 * (cluster.ports_num + cluster.ports_num_for_sparse)
    named = range(cluster.start_port, cluster.start_port + 64) if cluster.start_port else ()
    request: ProbeRequest = {
        "root_dir": host.root_dir or cluster.root_dir,
        "nic": host.interface or cluster.nic,
        "address": host.address,
        "explicit_address": host.address if host.address != host.host else "",
        "ports": [*range(cluster.pserver_port, cluster.pserver_port + pservers), *named, cluster.lead_port],
    }
    if not (cluster.prelude_of(host) or cluster.container.image):
        path = {**dict(cluster.env), **dict(host.env)}.get("PATH", "")
        request["job_path"] = [*filter(None, (cluster.first_path,)), path]
    return request


def job_environment(cluster: Cluster, host: Host, variables: Mapping[str, str]) -> JobEnvironment:
    """Build the description of what a program of the job finds on a node: PRELUDE, paths, and variables.

    variables: of the job, and of the laptop (PASS_ENV). `packages` is left empty.
    """
    return {
        "prelude": cluster.prelude_of(host),
        "first_path": cluster.first_path,
        "ld_library_path": cluster.ld_library_path,
        "here": host.here,
        "env": {**dict(cluster.env), **dict(host.env), **variables},
        "packages": [],
    }


# -- the start of a plan -----------------------------------------------------------------------------------------------


_FAILED_START: StopHow = {"by": "the start failed", "code": 69, "grace": 1.0, "force": True}


@dataclass(frozen=True)
class Phase:
    """`requests`: one for each node. Every node has answered before the next phase begins."""

    name: str
    requests: Mapping[int, Request[Mapping[str, object]]]


@dataclass(frozen=True)
class Steps:
    """What starts a job, and what takes back each phase that was done when a later one fails (same order)."""

    phases: Tuple[Phase, ...]
    undo: Tuple[Phase, ...] = ()


def start(
    plan: Plan, releases: Mapping[int, str], secrets: Mapping[str, str], resumed: "EarlierJob | None" = None
) -> Steps:
    """Build the requests that start a plan in phases, and those that take each phase back.

    releases: node -> name of the workspace there, none where it lies on the node already. resumed: the earlier job whose output
    the nodes that have it copy. Specs are JSON and are kept on disks; secrets travel only in the launch.
    """
    trainers = [process for process in plan.processes if process.role == "trainer"]
    endpoints = [process.endpoint for process in sorted(trainers, key=lambda process: process.rank)]
    places = pack(_list_places(plan))
    certificate, key = plan.identity.certificate, plan.identity.key
    place, launch, unplace = {}, {}, {}
    for node in plan.nodes:
        own = spec(plan, node, endpoints, places)
        at, job_dir = node.host.index, node.job_dir
        resume = resumed.id if resumed is not None and at in resumed.nodes else ""
        keep = resumed.kept_on(at) if resumed is not None else ()
        place[at] = PLACE({"release": releases.get(at, ""), "spec": own, "resume": resume, "keep": keep})
        notify = list(plan.cluster.notify)  # each node masks it in the errors of its ranks
        launch[at] = LAUNCH(
            {"job_dir": job_dir, "secrets": dict(secrets), "notify": notify, "certificate": certificate, "key": key}
        )
        unplace[at] = UNPLACE({"job_dir": job_dir, "token": plan.identity.token})
    ended = dict.fromkeys(place, stop_request(plan.job_id, _FAILED_START))
    return Steps((Phase("place", place), Phase("launch", launch)), (Phase("unplace", unplace), Phase("stop", ended)))


def spec(plan: Plan, node: PlannedNode, endpoints: list[str], places: List[RankPlaces]) -> Spec:
    """Build the spec of one node, its part of the plan, which its supervisor reads and its disk keeps: SECRETS are masked."""
    common = _common(node.processes)
    cluster, job, host = plan.cluster, plan.job, node.host
    first, (ip, port), where = plan.nodes[0].host, plan.coordinator, endpoint(*plan.coordinator)
    made: Spec = {
        "format": FORMAT,
        "job": plan.job_id,
        "node": host.node_id,
        "name": host.name,
        "root": node.facts.root,
        "job_dir": node.job_dir,
        "work_dir": node.work_dir,
        "output": job.output,
        "log_dir": job.log_dir,
        "here": host.here,
        "mark": mark(plan.job_id, host.node_id, plan.identity.token),
        "token": plan.identity.token,
        "lead": {"node": first.node_id, "name": first.name, "host": ip, "port": port, "endpoint": where},
        "policy": cast("SpecPolicy", asdict(job.policy)),
        "prelude": cluster.prelude_of(host),
        "ld_library_path": cluster.ld_library_path,
        "first_path": cluster.first_path,
        "common": masked(common.items(), cluster.secrets),
        "device_kind": node.device_kind,
        "processes": [_process(process, common, cluster.secrets) for process in node.processes],
        "extra_ports": [extra for at, extra in plan.extra_ports if at == host.index],
        "endpoints": endpoints,
        "header": _header(plan, node, places),
    }
    if node.container:
        made["container"] = node.container
    if cluster.metrics_file:
        made["metrics_file"] = cluster.metrics_file.replace("{job}", plan.job_id)
    if job.by_mpirun:
        made["launcher"] = MPIRUN
    if host is first and job.by_mpirun:
        made["hostfile"] = plan.hostfile
    if host is first:
        made["shape"] = {"names": _node_names(plan), "place": _list_places(plan)}
        if plan.job.elastic.present:
            made["shape"]["nodes"] = sorted(other.host.node_id for other in plan.nodes)
    return made


def _list_places(plan: Plan) -> List[Place]:
    """List role, rank and node id of all processes of a plan."""
    nodes = [node.host.node_id for node in plan.nodes]
    return [(process.role, process.rank, nodes[process.node]) for process in plan.processes]


def _node_names(plan: Plan) -> List[str]:
    """List the nodes' names by node id; "" for a node of an elastic job that does not take part."""
    found = {node.host.node_id: node.host.name for node in plan.nodes}
    return [found.get(node, "") for node in range(max(found) + 1)]


def _common(processes: Tuple[PlannedProcess, ...]) -> dict[str, str]:
    """Collect the variables that have the same value in all ranks of a node; {} without ranks. Long lists then travel once."""
    shared = [set(process.env) for process in processes if not process.launches]
    return dict(sorted(set.intersection(*shared))) if shared else {}


def _process(process: PlannedProcess, common: Mapping[str, str], secrets: Tuple[str, ...]) -> SpecProcess:
    """Build the spec of a process, without the variables that all have in common. A launcher has all of its own."""
    if process.launches:
        common = {}
    made: SpecProcess = {
        "role": process.role,
        "rank": process.rank,
        "local_rank": process.local_rank,
        "argv": list(process.argv),
        "env": masked((pair for pair in process.env if pair[0] not in common), secrets),
        "log": process.log,
        "endpoint": process.endpoint,
        "ports": list(process.ports),
        "ready": list(process.ready),
        "devices": list(process.devices),
        "shards": list(process.shards),
    }
    if process.launches:
        made["apart"] = True
    return made


def _header(plan: Plan, node: PlannedNode, places: List[RankPlaces]) -> JobHeader:
    """Build the first event of a node's events file: enough for any later command from any laptop."""
    trainer = next((process for process in plan.processes if process.role == "trainer"), None)
    header: JobHeader = {
        "format": FORMAT,
        "id": plan.job_id,
        "node": node.host.node_id,
        "name": node.host.name,
        "entry": node.host.entry,
        "hostname": node.facts.hostname,
        "nodes": _node_names(plan),
        "created": plan.identity.created,
        "owner": plan.identity.owner,
        "asked": plan.identity.asked,
        "job_name": plan.identity.name,
        "workspace": plan.identity.workspace,
        "mode": plan.job.mode,
        "command": " ".join(trainer.argv)[:200] if trainer else "",
        "output": plan.job.output,
        "work_dir": node.work_dir,
        "processes": [
            {"role": p.role, "rank": p.rank, "local_rank": p.local_rank, "endpoint": p.endpoint, "log": p.log}
            for p in node.processes
        ],
        "places": places,
    }
    if plan.identity.starter:
        header["starter"], header["same_command"] = plan.identity.starter, plan.identity.same_command
    if node.container:
        header["image"], header["digest"] = node.container["reference"], node.container["digest"]
        header["runtime"] = node.container["runtime"]
    return header


# -- for --dry ---------------------------------------------------------------------------------------------------------


def container_lines(plan: Plan) -> Dict[int, List[str]]:
    """Map each node with containers to the command line of its first process, for --dry. No value of a variable is in it.

    A node adds its limits, its device files and an entry for the user when it starts the process.
    """
    found: Dict[int, List[str]] = {}
    for node in plan.nodes:
        if node.container is None or not node.processes:
            continue
        of_node = spec(plan, node, [], [])
        process, around = of_node["processes"][0], Surroundings(home=rank_home(of_node["root"]))
        variables = {**dict(node.processes[0].env), "CLUSTERTOOL_ATTEMPT": "0"}
        names = container_command.passed_variables(node.container["runtime"], of_node, process, variables, around).names
        found[node.host.index] = container_command.command(node.container, of_node, process, names, around)
    return found
