"""This module has the command lines of docker, podman and apptainer that inspect, pull, save and load images.

An image travels as a folder of files: COPY_DIR has the manifest, the configuration and the layers as podman's transport `dir:`
writes them, compressed; COPY_ARCHIVE has the files of a tar archive as `docker save` writes it; COPY_FILE has one .sif file.
"""

from __future__ import annotations

from typing import List, Sequence

from clustertool.model.container.container_names import APPTAINER, DOCKER, PODMAN

COPY_DIR, COPY_ARCHIVE, COPY_FILE = "dir", "archive", "file"
SIF = "image.sif"  # the only file of a COPY_FILE
# Nodes that pull an image at a time, with IMAGE_FROM = "registry": registries limit clients of one address.
PULLS_AT_ONCE = 8


def kind_of_copy(runtimes: Sequence[str]) -> str:
    """Choose how an image travels between machines with these runtimes: as all of them can load it."""
    if APPTAINER in runtimes:
        return COPY_FILE
    return COPY_ARCHIVE if DOCKER in runtimes else COPY_DIR


def is_file(image: str) -> bool:
    """Check whether an image is named by the path of a .sif file."""
    return image.startswith("/")


def pull(program: str, image: str) -> List[str]:
    return [program, "pull", "--quiet", image]


def pull_file(program: str, image: str, file: str) -> List[str]:
    """Build the command of apptainer that pulls an image into a file."""
    return [program, "pull", "--force", file, image]


def save(program: str, kind: str, runtime: str, image: str, folder: str) -> List[str]:
    """Build the command that saves an image: a COPY_DIR to the folder, the archive of a COPY_ARCHIVE to stdout.

    `dir:` keeps the form of the manifest, and so the id. Two copies of an image are the same bytes, so pieces of them are too.
    """
    if kind == COPY_DIR:
        return [program, "push", "--quiet", "--compress", image, f"dir:{folder}"]
    return [program, "save", *(("--format", "docker-archive") if runtime == PODMAN else ()), image]


def load(program: str, kind: str, folder: str) -> List[str]:
    """Build the command that loads an image. A COPY_ARCHIVE is read from stdin."""
    return [program, "pull", "--quiet", f"dir:{folder}"] if kind == COPY_DIR else [program, "load", "--quiet"]


def tag(program: str, id: str, image: str) -> List[str]:
    return [program, "tag", id, image]


def storage(program: str, runtime: str) -> List[str]:
    """Build the command that prints the folder in which the runtime keeps images."""
    key = "{{.Store.GraphRoot}}" if runtime == PODMAN else "{{.DockerRootDir}}"
    return [program, "info", "--format", key]


def plain_id(text: str) -> str:
    """Remove the name of its hash from an id."""
    return text.strip().rpartition(":")[2]
