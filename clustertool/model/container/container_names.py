"""This module names container runtimes and settings. It is apart from the settings: a node imports no dataclass for a name."""

from __future__ import annotations

AUTO = "auto"
DOCKER, PODMAN, APPTAINER = "docker", "podman", "apptainer"
RUNTIMES = (AUTO, DOCKER, PODMAN, APPTAINER)
MISSING, ALWAYS, NEVER = "missing", "always", "never"
PULLS = (MISSING, ALWAYS, NEVER)
LAPTOP, FIRST, REGISTRY = "laptop", "first", "registry"
IMAGE_SOURCES = (LAPTOP, FIRST, REGISTRY)  # IMAGE_FROM
_OF_APPTAINER = ("/", "docker://", "docker-archive://", "library://", "oras://", "shub://", "oci://", "oci-archive://")


def only_for_apptainer(image: str) -> bool:
    """Check whether an image is named by the path of a .sif file, or an address as only apptainer has it."""
    return image.startswith(_OF_APPTAINER)
