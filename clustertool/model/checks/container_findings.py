"""These checks judge the container runtime of each node and a job's image there: usable, present, equal, and room for it."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence

from clustertool.model.config.cluster import Cluster
from clustertool.model.container.container_command import CHOSEN
from clustertool.model.container.container_runtimes import APPTAINER, CDI, DOCKER, HOOK, PODMAN, REGISTRY
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.facts import ByNode, ContainerFacts, Facts
from clustertool.model.finding import Finding
from clustertool.model.job.outcome import some
from clustertool.model.planning.devices import choose_device_kind
from clustertool.model.quantities import human_bytes

COLUMN = "container"
_LITTLE = 2 << 30  # bytes free under which a pull of an image of unknown size is doubtful
# Options that cgroups carry out begin with these.
_LIMITED = ("--memory", "-m", "--cpus", "--pids-limit", "--memory-swap", "--cpu-")
_SHOWN = 19  # characters of a digest: "sha256:" and twelve more
_CDI_FIX = "install nvidia-container-toolkit there; as root: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
_HOOK_FIX = (
    "install nvidia-container-toolkit there; as root: nvidia-ctk runtime configure --runtime=docker, restart docker"
)


class Verdict(NamedTuple):
    """A finding about a node's containers, without its node and column."""

    level: str
    text: str
    fix: str = ""


def container_findings(cluster: Cluster, settings: ContainerSettings, facts: ByNode) -> List[Finding]:
    """Collect the findings about the runtime and the image of each node, and about GPUs in containers if ranks get some.

    Different images are found only if nodes neither pull the image anew nor get it sent. settings: of the job. facts: of all
    nodes; those that were not asked for their runtime are left out.
    """
    known = {node: fact.container for node, fact in sorted(facts.items()) if fact.container is not None}
    sent = cluster.image_from != REGISTRY
    found: List[Finding] = []
    sizes = [one.size for one in known.values() if one.image_id and one.size > 0]
    for node, one in known.items():
        verdicts = _judge_node(settings, one, max(sizes, default=-1), sent)
        if one.runtime and _wants_gpus(cluster, settings, facts[node]):
            verdicts += _judge_gpus(one)
        found += [Finding(node, COLUMN, *verdict) for verdict in verdicts]
    if settings.pull != "always" and not sent:
        names = {host.index: host.name for host in cluster.hosts}
        here = {node: one for node, one in known.items() if one.image_id}
        found += [Finding(node, COLUMN, *verdict) for node, verdict in different_images(here, names).items()]
    return found


def _judge_node(settings: ContainerSettings, one: ContainerFacts, size: int, sent: bool) -> List[Verdict]:
    """Judge the runtime of a node, the image there, sources of volumes, and limits that have no effect.

    A missing runtime is the only verdict, and so is a missing image that is neither pulled nor sent. size: of the image in
    bytes, as another node knows it; -1: none does. sent: the node does not pull the image.
    """
    if not one.runtime:
        return [Verdict("error", one.problem, one.fix)]
    client = f"{one.runtime} {one.version}{' (rootless)' if one.rootless else ''}"
    if one.image_id and settings.pull != "always":
        found = [Verdict("ok", f"{client}, {short_digest(one.digest)}, {human_bytes(one.size)}")]
    elif settings.pull == "never" and not sent:
        fix = f'get it there by hand ({_by_hand(settings.image, one)}), or set pull to "missing"'
        return [Verdict("error", f'{client}: the image {settings.image} is not there, and pull is "never"', fix)]
    else:
        found = [_judge_room(settings, one, client, size, sent)]
    if one.missing:
        found.append(Verdict("error", *one.missing_source))
    limits = [option for option in settings.options if option.startswith(_LIMITED)]
    if limits and one.rootless and one.cgroup == "v1":
        fix = "boot the node with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or leave the option out"
        found.append(Verdict("warn", f"{limits[0]} has no effect in rootless containers with cgroup v1", fix))
    return found


def _by_hand(image: str, one: ContainerFacts) -> str:
    """Describe how to bring an image to a node by hand."""
    if one.runtime == APPTAINER:
        return f"copy {image}" if image.startswith("/") else f"apptainer pull FILE.sif {image}, and name that file"
    return f"{one.runtime} pull {image}"


def _judge_room(settings: ContainerSettings, one: ContainerFacts, client: str, size: int, sent: bool) -> Verdict:
    """Judge the room for an image that comes to the node: an error if the node has none yet and it does not fit.

    If its size is not known: a warning if less than 2 GiB are free. Otherwise ok. size, sent: see _judge_node().
    """
    free = one.store_free
    fix = f"make room in {one.store or 'the home'} ({one.runtime} image prune)"
    what = f"{client}: the image is not there" if not one.image_id else f'{client}: pull is "always"'
    if 0 <= free < size and not one.image_id:
        return Verdict("error", f"{what}; it needs {human_bytes(size)}, {human_bytes(free)} are free", fix)
    if 0 <= free < _LITTLE and size < 0:
        return Verdict("warn", f"{what}; {human_bytes(free)} are free for it", fix)
    return Verdict("ok", f"{what}, it will be {'sent' if sent else 'pulled'}")


def _wants_gpus(cluster: Cluster, settings: ContainerSettings, fact: Facts) -> bool:
    """Check whether ranks there get GPUs of NVIDIA, and the user's own options do not already add them."""
    chosen = any(mark in option for option in settings.options for mark in CHOSEN)
    return bool(fact.devices) and fact.device_kind == choose_device_kind(cluster, fact) == "gpu" and not chosen


def _judge_gpus(one: ContainerFacts) -> List[Verdict]:
    """Report an error where docker or podman lacks what it needs to pass GPUs of NVIDIA."""
    if one.runtime == PODMAN and one.gpu != CDI:
        return [Verdict("error", "no specification of CDI for nvidia.com/gpu, so podman cannot pass GPUs", _CDI_FIX)]
    if one.runtime == DOCKER and one.gpu not in (CDI, HOOK):
        return [Verdict("error", "docker has no runtime of NVIDIA, so it cannot pass GPUs", _HOOK_FIX)]
    return []


def short_digest(digest: str) -> str:
    """Shorten a digest to 19 characters; "no digest" for ""."""
    return digest[:_SHOWN] or "no digest"


def same_image(one: ContainerFacts, other: ContainerFacts) -> bool:
    """Check whether two nodes have the same image, by its id or its digest.

    Stores of nodes may state other digests for it: one that was loaded from a file has no registry's.
    """
    return one.image_id == other.image_id or (bool(one.digest) and one.digest == other.digest)


def different_images(known: Mapping[int, ContainerFacts], names: Mapping[int, str]) -> Dict[int, Verdict]:
    """Return {node: an error} for nodes whose image is not that of most nodes; {} if all are equal.

    Of equally many, the image of the first node counts. known: nodes with the image.
    """
    groups: List[List[int]] = []
    for node, one in sorted(known.items()):
        group = next((group for group in groups if same_image(known[group[0]], one)), None)
        if group is None:
            groups.append([node])
        else:
            group.append(node)
    groups.sort(key=len, reverse=True)
    if len(groups) < 2:
        return {}
    described = "; ".join(f"{_identity(known, group)} on {some([names[n] for n in group])}" for group in groups)
    fix = 'set pull to "always", name the image by its digest (IMAGE@sha256:...), or bring the same one to all nodes'
    verdict = Verdict("error", f"the nodes have different images of this name: {described}", fix)
    return {node: verdict for group in groups[1:] for node in group}


def _identity(known: Mapping[int, ContainerFacts], group: Sequence[int]) -> str:
    """Return the short digest of the image that these nodes have."""
    return short_digest(known[group[0]].digest)
