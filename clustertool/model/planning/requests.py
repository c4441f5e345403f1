"""Turns a plan into the requests that start its job, in phases that are barriers, and into those that stop it.

An agent on every node places the job, then launches its supervisor. The first node's supervisor is the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Mapping, Tuple

from clustertool.model.job.formats import FORMAT
from clustertool.model.job.rank_places import pack
from clustertool.model.planning.environment import endpoint, mark
from clustertool.model.planning.plan import HIDDEN, Plan, PlannedNode, PlannedProcess
from clustertool.model.wire.messages import LAUNCH, PLACE, STOP, UNPLACE, Request

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import StopAnswer
    from clustertool.model.wire.agent_requests import StopHow
    from clustertool.model.wire.event_types import JobHeader, RankPlaces
    from clustertool.model.wire.spec_types import Spec, SpecProcess

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


def start(plan: Plan, releases: Mapping[int, str], secrets: Mapping[str, str]) -> Steps:
    """`releases`: node -> name of the workspace there, none where it lies on the node already.

    Specs are JSON and are kept on disks; secrets travel only in the launch.
    """
    trainers = [process for process in plan.processes if process.role == "trainer"]
    endpoints = [process.endpoint for process in sorted(trainers, key=lambda process: process.rank)]
    places = pack((process.role, process.rank, process.node) for process in plan.processes)
    identity = plan.identity
    place, launch, unplace = {}, {}, {}
    for node in plan.nodes:
        own = spec(plan, node, endpoints, places)
        place[node.index] = PLACE({"release": releases.get(node.index, ""), "spec": own})
        launch[node.index] = LAUNCH(
            {
                "job_dir": node.job_dir,
                "secrets": dict(secrets),
                "certificate": identity.certificate,
                "key": identity.key,
            }
        )
        unplace[node.index] = UNPLACE({"job_dir": node.job_dir, "token": identity.token})
    ended = dict.fromkeys(place, stop(plan.job_id, _FAILED_START))
    return Steps((Phase("place", place), Phase("launch", launch)), (Phase("unplace", unplace), Phase("stop", ended)))


def stop(job: str, how: StopHow) -> Request[StopAnswer]:
    """The request to end a job, "" for all."""
    return STOP({"job": job, "exact": bool(job), **how})


def spec(plan: Plan, node: PlannedNode, endpoints: list[str], places: List[RankPlaces]) -> Spec:
    """One node's part of the plan as its supervisor reads it (and its disk keeps it): SECRETS are masked."""
    common = _common(node.processes)
    lead_node, policy = plan.nodes[0], plan.policy
    made: Spec = {
        "format": FORMAT,
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
        "policy": {
            "timeout": policy.timeout,
            "grace": policy.grace,
            "on_failure": policy.on_failure,
            "max_restarts": policy.max_restarts,
            "lease": policy.lease,
            "loss_timeout": policy.loss_timeout,
        },
        "prelude": plan.prelude,
        "ld_library_path": plan.ld_library_path,
        "first_path": plan.first_path,
        "common": {name: HIDDEN if name in plan.secrets else value for name, value in common.items()},
        "device_kind": node.device_kind,
        "processes": [_process(process, common, plan.secrets) for process in node.processes],
        "extra_ports": [port for at, port in plan.extra_ports if at == node.index],
        "endpoints": endpoints,
        "header": _header(plan, node, places),
    }
    if node.index == lead_node.index:
        made["shape"] = {
            "names": [other.name for other in plan.nodes],
            "place": [(process.role, process.rank, process.node) for process in plan.processes],
        }
    return made


def _common(processes: Tuple[PlannedProcess, ...]) -> dict[str, str]:
    """Variables that are the same in all processes of a node: long endpoint lists travel once."""
    if not processes:
        return {}
    shared = set(processes[0].env)
    for process in processes[1:]:
        shared &= set(process.env)
    return dict(sorted(shared))


def _process(process: PlannedProcess, common: Mapping[str, str], secrets: Tuple[str, ...]) -> SpecProcess:
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


def _header(plan: Plan, node: PlannedNode, places: List[RankPlaces]) -> JobHeader:
    """The first event of a node's events file: enough for any later command from any laptop."""
    trainer = next((process for process in plan.processes if process.role == "trainer"), None)
    return {
        "format": FORMAT,
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
        "places": places,
    }
