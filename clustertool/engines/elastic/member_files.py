"""The join files of the nodes that an engine starts for an elastic job: the same job, and the settings of each host. Pure."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace

from clustertool import __version__
from clustertool.engines.job_request import RunRequest
from clustertool.fleet.joining import join_process
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.facts import ByNode, Facts, sharing
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings
from clustertool.model.paths import base
from clustertool.model.planning.plan import Plan, below_home


@dataclass(frozen=True)
class HostMember:
    """A host that may take part in an elastic job.

    base: the parent of its directories of jobs. resumes: the ended job whose output it copies, "" if none.
    """

    host: Host
    facts: Facts
    base: str
    resumes: str = ""


def members(cluster: Cluster, facts: ByNode, request: RunRequest) -> tuple[HostMember, ...]:
    """List all hosts of the cluster as members, by their numbers in the job."""
    shared, resumed = sharing(facts), request.resumed
    found = []
    for host in cluster.hosts:
        fact = facts[host.index]
        resumes = resumed.id if resumed is not None and host.index in resumed.with_output else ""
        found.append(HostMember(host, fact, base(fact.root, host.index, host.index in shared), resumes))
    return tuple(found)


def join_file(request: RunRequest, made: Plan, release: str, count: int) -> JoinFile:
    """Build what all nodes have in common.

    made: the first plan, whose first node is the coordinator. release: the name of the workspace as the nodes have it. count:
    of nodes that are started now.
    """
    spec = request.spec
    assert spec is not None
    elastic = spec.elastic
    listing = request.workspace.files if request.workspace is not None else made.nodes[0].facts.listing
    return JoinFile(
        version=__version__,
        code=join_process.digest(),
        identity=made.identity,
        cluster=replace(request.cluster, hosts=(), settings={}, first_path=""),
        job=replace(spec, container=made.job.container),
        nnodes=count,
        coordinator=MeetingPoint(*made.coordinator),
        join_timeout=elastic.timeout,
        listing=tuple(listing),
        release=release,
        passed=request.passed,
        secrets=tuple(request.secrets.items()),
    )


def of_member(common: JoinFile, cluster: Cluster, member: HostMember, index: int) -> JoinFile:
    """Build the join file of one node. index: its number in the job."""
    return replace(common, index=index, own=own_settings(common, cluster, member))


def own_settings(common: JoinFile, cluster: Cluster, member: HostMember) -> OwnSettings:
    """Build the settings of a host as conf.py has it."""
    host, workspace = member.host, common.job.job_workspace
    slots = host.on_slots(member.facts.devices) if host.slots is not None and host.devices is None else None
    return OwnSettings(
        root_dir=host.root_dir or cluster.root_dir,
        folder=posixpath.normpath(below_home(workspace, member.facts.home)) if workspace else "",
        nproc=host.nproc,
        devices=slots or host.devices,
        env=host.env,
        first_path=cluster.first_path,
        here=host.here,
        name=host.name,
        address=member.facts.address,
        base=member.base,
        entry=host.entry,
        twin=host.twin,
        prelude=host.prelude,
        interface=host.interface,
        roles=host.roles,
        resume=member.resumes,
    )
