"""The plan of a job before Slurm has chosen its nodes, for --dry: what holds for any nodes, and placeholders."""

from __future__ import annotations

import re
from dataclasses import replace

from clustertool.engines.job_request import RunRequest, make_plan
from clustertool.model.config.hosts import Host
from clustertool.model.facts import Facts, Identity
from clustertool.model.planning.plan import Plan, given_facts
from clustertool.model.slurm.slurm_settings import SlurmSettings

STANDS = (
    "names, addresses and ports of nodes are known when Slurm has started the job; node0, node1, ... stand for them"
)


def expected_plan(request: RunRequest, settings: SlurmSettings, login: Facts, identity: Identity) -> Plan:
    """login: facts of the login host, whose ROOT_DIR the nodes share. Each node has the processors and GPUs that the settings
    ask for. Raises UsageError, DataError."""
    assert request.spec is not None
    names = [f"node{number}" for number in range(settings.node_count)]
    hosts = tuple(Host(number, name, address=name, name=name) for number, name in enumerate(names))
    cluster = replace(request.cluster, hosts=hosts)
    gpus = tuple(range(_gpus(settings.gpus_per_node)))
    facts = {
        node: replace(
            fact,
            boot_id=names[node],
            root=login.root,
            root_id=login.root,
            home=login.home,
            listing=login.listing,
            cpus=settings.cpus_per_node or 1,
            devices=gpus,
            device_kind="gpu" if gpus else "cpu",
        )
        for node, fact in given_facts(cluster).items()
    }
    counted = request.spec.nproc_of == "gpu" and not gpus  # their number is that of the node
    spec = replace(request.spec, nproc_of="") if counted else request.spec
    return make_plan(replace(request, cluster=cluster, spec=spec), facts, identity)


def _gpus(text: str) -> int:
    """The number of GPUs of a node: "4", "a100:4", "a100:2,v100:1"."""
    return sum(map(int, re.findall(r"(?:^|[:,])([0-9]+)(?=,|$)", text)))
