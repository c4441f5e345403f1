"""The request for a node's facts that a plan needs, of the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import JobEnvironment, ProbeRequest


def probe_request(cluster: Cluster, host: Host) -> ProbeRequest:
    """Build the probe of one node. `ports`: those of conf.py, of which only the users are searched."""
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
    """Build what a program of the job would find on a node. variables: of the job, and of the laptop (PASS_ENV)."""
    return {
        "prelude": cluster.prelude_of(host),
        "first_path": cluster.first_path,
        "ld_library_path": cluster.ld_library_path,
        "here": host.here,
        "env": {**dict(cluster.env), **dict(host.env), **variables},
        "packages": [],
    }
