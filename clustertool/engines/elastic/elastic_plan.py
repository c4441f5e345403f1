"""What the first plan of an elastic job covers, and which options do not fit a plan that is made again at each epoch. Pure."""

from __future__ import annotations

from dataclasses import replace

from clustertool.engines.job_request import RunRequest
from clustertool.errors import UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.elastic_keys import ElasticSettings
from clustertool.model.config.folded_names import fold
from clustertool.model.planning.plan import Plan
from clustertool.model.quantities import count


def refuse_unfit(request: RunRequest) -> None:
    """Raise UsageError for what refuse_fixed() refuses, and if the cluster has fewer hosts than the job's minimum."""
    refuse_fixed(request)
    assert request.spec is not None
    elastic, there = request.spec.elastic, len(request.cluster.hosts)
    if elastic.minimum > there:
        what = f"an elastic job of {elastic.text} nodes: there {'is' if there == 1 else 'are'} {count(there, 'node')}"
        fix = f"name more hosts in {request.cluster.where or 'conf.py'}, or start with fewer: --nnodes"
        raise UsageError(what, fix)


def refuse_fixed(request: RunRequest) -> None:
    """Raise UsageError for the first option that does not fit a plan made again at each epoch.

    These are --wait, --keep, --devices auto, --only-where-read, and a list of endpoints of trainers or pservers.
    """
    spec, wish = request.spec, request.wish
    assert spec is not None
    elastic = spec.elastic
    listed = spec.trainer.endpoints or spec.pserver.endpoints
    not_there = (
        (wish.wait, "--wait", "the nodes wait for each other, and not for devices"),
        (bool(wish.keep), "--keep", "write the file into output/, which --resume copies"),
        (spec.auto_devices, "--devices auto", "name the devices, or leave it out"),
        (spec.only_where_read, "--only-where-read", "the shards are split again at each epoch, so each node gets all"),
        (bool(listed), "a list of endpoints", "give numbers: --server-num, --worker-num"),
    )
    for given, option, fix in not_there:
        if given:
            raise UsageError(f"{option} is not possible in an elastic job ({elastic.text} nodes)", fix)


def first_hosts(cluster: Cluster, elastic: ElasticSettings) -> Cluster:
    """Return the cluster with the hosts of the first epoch, at most `maximum`, numbered anew.

    They are the first ones in the order of HOSTS, with COORDINATOR (a name or address) before all others, if it is one of them.
    """
    hosts = cluster.hosts
    chief = next((host for host in hosts if elastic.coordinator in (host.name, host.host, host.address)), None)
    first = sorted(hosts, key=lambda host: host is not chief) if elastic.coordinator else list(hosts)
    kept = enumerate(first[: elastic.maximum])
    return replace(cluster, hosts=tuple(replace(host, index=number) for number, host in kept))


def describe_plan(made: Plan, cluster: Cluster) -> str:
    """Return the text for --dry: for how many nodes the plan is, and which hosts are on standby, if any.

    cluster: with all hosts; without hosts if an engine chooses the nodes.
    """
    elastic = made.job.elastic
    shown = {node.host.name for node in made.nodes}
    standby = [host.name for host in cluster.hosts if host.name not in shown]
    text = f"elastic job: this is the plan for {count(len(made.nodes), 'node')}. It is made again at each epoch, "
    text += f"for the {elastic.minimum} to {elastic.maximum} nodes that are there"
    return text + f"; on standby: {fold(standby)}" * bool(standby)
