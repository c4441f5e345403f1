"""Container facts are what a node reports of its container runtime and of a job's image there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

from clustertool.model.job.outcome import some


@dataclass(frozen=True)
class ContainerFacts:
    """Of the runtime that the node has chosen. "" and -1: not known.

    runtime: "" where none can be used; then `problem` and `fix` state why. program: its absolute path. cgroup: "v1" or "v2".
    image_id: "" where the image is not there. digest: that of the registry's manifest, else the id with its hash. size:
    bytes of the image in the store. store_free: bytes free where images are kept. gpu: CDI or HOOK of runtime_output.py, ""
    for neither.
    process_limit: it limits the processes and threads of a container by default (podman: 2048), and can allow more.
    uid, groups: of the user; the primary group is the first one. missing: sources of volumes that are not there.
    """

    runtime: str = ""
    program: str = ""
    version: str = ""
    rootless: bool = False
    cgroup: str = ""
    problem: str = ""
    fix: str = ""
    image_id: str = ""
    digest: str = ""
    size: int = -1
    store: str = ""
    store_free: int = -1
    gpu: str = ""
    process_limit: bool = False
    uid: int = 0
    groups: Tuple[int, ...] = ()
    missing: Tuple[str, ...] = ()


def missing_source(one: ContainerFacts) -> Tuple[str, str]:
    """Return what is wrong, and the fix."""
    what = f"there is no {some(one.missing)}, the source of a volume"
    return what, "make it there, or take it out of `volumes` of CONTAINER"
