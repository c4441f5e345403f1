"""An engine turns a plan into requests for the nodes, in phases that are barriers.

The ssh engine: an agent on every node places the job, then launches its supervisor. The first node leads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Protocol, Tuple, Type

from clustertool.model.job.formats import FORMAT, KEY
from clustertool.model.job.rank_places import pack
from clustertool.model.planning.environment import endpoint, mark
from clustertool.model.planning.plan import HIDDEN, Node, Plan, Process

Spec = Dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """`requests`: node id -> fields of one request. Every node has answered before the next phase begins."""

    name: str
    requests: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Steps:
    """What starts a job, and what takes back each phase that was done when a later one fails (same order)."""

    phases: Tuple[Phase, ...]
    undo: Tuple[Phase, ...] = ()


class Engine(Protocol):
    """Turn a plan into steps. `releases`: node -> the name of the dispatched release, none if the node has the
    workspace already."""

    def start(self, plan: Plan, releases: Mapping[int, str], secrets: Mapping[str, str]) -> Steps: ...

    def stop(self, nodes: int, job: str, how: Mapping[str, Any]) -> Phase: ...

    def status(self, nodes: int, job: str) -> Phase: ...

    def logs(self, nodes: int, job: str, wanted: Mapping[str, Any]) -> Phase: ...


class SshEngine:
    """Requests to agents, one per node. Specs are JSON; secrets travel only in the launch, never to a disk."""

    def start(self, plan: Plan, releases: Mapping[int, str], secrets: Mapping[str, str]) -> Steps:
        nodes = plan.nodes
        trainers = [process for process in plan.processes if process.role == "trainer"]
        endpoints = [process.endpoint for process in sorted(trainers, key=lambda process: process.rank)]
        places = pack((process.role, process.rank, process.node) for process in plan.processes)
        place = {
            node.index: {
                "q": "place",
                "release": releases.get(node.index, ""),
                "spec": spec(plan, node, endpoints, places),
            }
            for node in nodes
        }
        launch = {
            node.index: {
                "q": "start",
                "job_dir": node.job_dir,
                "secrets": dict(secrets),
                "certificate": plan.identity.certificate,
                "key": plan.identity.key,
            }
            for node in nodes
        }
        unplace = {
            node.index: {"q": "unplace", "job_dir": node.job_dir, "token": plan.identity.token} for node in nodes
        }
        stop = self.stop(len(nodes), plan.job_id, {"by": "the start failed", "code": 69, "grace": 1.0, "force": True})
        return Steps((Phase("place", place), Phase("launch", launch)), (Phase("unplace", unplace), stop))

    def stop(self, nodes: int, job: str, how: Mapping[str, Any]) -> Phase:
        return _all("stop", nodes, {"job": job, "exact": bool(job), **how})

    def status(self, nodes: int, job: str) -> Phase:
        return _all("status", nodes, {"job": job})

    def logs(self, nodes: int, job: str, wanted: Mapping[str, Any]) -> Phase:
        return _all("follow", nodes, {"job": job, **wanted})


def _all(name: str, nodes: int, fields: Mapping[str, Any]) -> Phase:
    return Phase(name, {node: {"q": name, **fields} for node in range(nodes)})


def spec(plan: Plan, node: Node, endpoints: list[str], places: list[list[Any]]) -> Spec:
    """One node's part of the plan as its supervisor reads it (and its disk keeps it): SECRETS are masked."""
    common = _common(node.processes)
    lead_node = plan.nodes[0]
    made: Spec = {
        KEY: FORMAT,
        "job": plan.job_id,
        "node": node.index,
        "name": node.name,
        "root": node.root,
        "job_dir": node.job_dir,
        "work_dir": node.work_dir,
        "output": plan.output,
        "log_dir": plan.log_dir,
        "here": node.here,
        "mark": mark(plan.job_id, node.index, plan.identity.token),
        "token": plan.identity.token,
        "lead": {
            "node": lead_node.index,
            "name": lead_node.name,
            "host": plan.lead[0],
            "port": plan.lead[1],
            "endpoint": endpoint(*plan.lead),
        },
        "policy": dict(vars(plan.policy)),
        "prelude": plan.prelude,
        "ld_library_path": plan.ld_library_path,
        "first_path": plan.first_path,
        "common": {name: HIDDEN if name in plan.secrets else value for name, value in common.items()},
        "device_kind": node.device_kind,
        "processes": [_process(process, common, plan.secrets) for process in node.processes],
        "extra_ports": [port for at, port in plan.extra_ports if at == node.index],
        "endpoints": endpoints,
        "header": {**_header(plan, node), "places": places},
    }
    if node.index == lead_node.index:
        made["shape"] = {
            "names": [other.name for other in plan.nodes],
            "place": [[process.role, process.rank, process.node] for process in plan.processes],
        }
    return made


def _common(processes: Tuple[Process, ...]) -> dict[str, str]:
    """Variables that are the same in all processes of a node: long endpoint lists travel once."""
    if not processes:
        return {}
    shared = set(processes[0].env)
    for process in processes[1:]:
        shared &= set(process.env)
    return dict(sorted(shared))


def _process(process: Process, common: Mapping[str, str], secrets: Tuple[str, ...]) -> Spec:
    own = {name: HIDDEN if name in secrets else value for name, value in process.env if name not in common}
    return {
        "role": process.role,
        "rank": process.rank,
        "local_rank": process.local_rank,
        "argv": list(process.argv),
        "env": own,
        "log": process.log,
        "endpoint": process.endpoint,
        "ports": list(process.ports),
        "ready": list(process.ready),
        "devices": list(process.devices),
        "shards": list(process.shards),
    }


def _header(plan: Plan, node: Node) -> Spec:
    """The first event of a node's events file: enough for any later command from any laptop."""
    trainer = next((process for process in plan.processes if process.role == "trainer"), None)
    return {
        KEY: FORMAT,
        "id": plan.job_id,
        "node": node.index,
        "name": node.name,
        "entry": node.entry,
        "hostname": node.hostname,
        "nodes": [other.name for other in plan.nodes],
        "created": plan.identity.created,
        "owner": plan.identity.owner,
        "mode": plan.mode,
        "command": " ".join(trainer.argv)[:200] if trainer else "",
        "output": plan.output,
        "work_dir": node.work_dir,
        "processes": [
            {"role": p.role, "rank": p.rank, "local_rank": p.local_rank, "endpoint": p.endpoint, "log": p.log}
            for p in node.processes
        ],
    }


ENGINES: Dict[str, Type[Engine]] = {"ssh": SshEngine}
