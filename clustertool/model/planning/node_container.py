"""This module plans the container of a node's ranks from the job's settings and what the node knows of runtime and image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Mapping

from clustertool.errors import PreflightError, raise_all
from clustertool.model.config.cluster import Cluster
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.facts import ByNode, ContainerFacts

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import ContainerWanted
    from clustertool.model.wire.spec_types import ContainerSpec


def container_request(settings: ContainerSettings, probed: ProbeAnswer) -> ContainerWanted:
    """Build the request for what a node knows of runtime, image and volumes, for a job in containers.

    probed: what its probe has found.
    """
    gpu = probed.get("device_kind") == "gpu" and bool(probed.get("devices"))
    sources = (volume.partition(":")[0] for volume in settings.volumes)
    return {
        "image": settings.image,
        "runtime": settings.runtime,
        "options": bool(settings.options),
        "volumes": [source for source in sources if source.startswith("/")],
        "gpu": gpu,
    }


def containers(cluster: Cluster, settings: ContainerSettings, facts: ByNode) -> Dict[int, ContainerSpec]:
    """Describe the container of each node; {} for a job without containers.

    Raises the PreflightErrors of nodes without a runtime or, unless CHECKS_OFF has `container`, a source of a volume. Where a
    node was not asked, its runtime is that of the settings, for --dry.
    """
    if not settings:
        return {}
    known = {host.index: facts[host.index].container for host in cluster.hosts}
    wrong = {node: (one.problem, one.fix) for node, one in known.items() if one is not None and not one.runtime}
    if "container" not in cluster.checks_off:
        wrong.update({node: one.missing_source for node, one in known.items() if one is not None and one.missing})
    raise_all([PreflightError(what, fix, cluster.hosts[node].name) for node, (what, fix) in wrong.items()])
    asked = {node: one or ContainerFacts() for node, one in known.items()}
    return {node: _container(settings, asked, node) for node in asked}


def _container(settings: ContainerSettings, known: Mapping[int, ContainerFacts], node: int) -> ContainerSpec:
    """Describe the container of a node.

    The image is named by its id where the node has it, so that all ranks and restarts run the same one.
    """
    own = known[node]
    present = bool(own.image_id) and settings.pull != "always"
    return {
        "runtime": own.runtime or settings.runtime,
        "program": own.program,
        "rootless": own.rootless,
        "image": own.image_id if present else settings.image,
        "reference": settings.image,
        "digest": _digest(known, own) if present else "",
        "options": list(settings.options),
        "volumes": list(settings.volumes),
        "process_limit": own.process_limit,
        "uid": own.uid,
        "groups": list(own.groups),
    }


def _digest(known: Mapping[int, ContainerFacts], own: ContainerFacts) -> str:
    """Return the digest of a node's image if all nodes with the image state the same, or it is a file; else the image's id.

    A store that has loaded the image from a file states another digest than one that has pulled it.
    """
    same = len({one.digest for one in known.values() if one.image_id}) == 1
    return own.digest if same or own.image_id.startswith("/") else f"sha256:{own.image_id}"
