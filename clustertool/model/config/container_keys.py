"""This module reads the container's settings: CONTAINER of conf.py, [container] of job.toml, and --image, in this order.

A later source replaces the values of an earlier one key by key; only `options` are added.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Collection, Dict, Mapping, Optional, Tuple, Type

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.config import workspace_rights
from clustertool.model.config.job_tables import Toml
from clustertool.model.config.value_readers import Reader, one_of, read_values
from clustertool.model.container.container_options import describe_refused
from clustertool.model.container.container_runtimes import APPTAINER, AUTO, PULLS, RUNTIMES, only_for_apptainer
from clustertool.model.container.container_settings import ContainerSettings

# What a job.toml may set: the image, and options that limit its container or give it memory of its own.
_OF_WORKSPACE = (
    "image",
    "pull",
    *(
        f"options.--{name}"
        for name in """cap-drop contain cpu-shares cpus cpuset-cpus cpuset-mems drop-caps gpus memory memory-reservation
        memory-swap no-healthcheck no-privs nv pids-limit platform quiet read-only rocm shm-size tmpfs
        writable-tmpfs""".split()
    ),
)
_OPTION = r"[^\0\n]+"
_VOLUME = r"(/|[A-Za-z0-9])[^:\0\n]*:/[^:\0\n]*(:[A-Za-z0-9_,=-]+)?"


def read_conf(value: object) -> ContainerSettings:
    """Read CONTAINER of conf.py.

    Raises ValueError for what is no dict, and ConfigError for a wrong key or value, or what does not fit the runtime.
    """
    if not isinstance(value, Mapping):
        raise ValueError('a dict: {"image": "registry.example.org/train:1"}')
    found = read_values(value, _READERS, ConfigError, lambda name: f"CONTAINER[{name!r}] =")
    return _require_consistent(ContainerSettings(**found), ConfigError, "CONTAINER")


def merge_container(
    conf: ContainerSettings, toml: Toml, typed: Optional[str], may_set: Collection[str] = ()
) -> ContainerSettings:
    """Merge the settings of a job's container: keys of [container] replace those of CONTAINER, and --image replaces `image`.

    `options` of both tables are added up. conf: CONTAINER. toml: [container]. typed: of --image; None: not given, "": no
    container. may_set: WORKSPACE_MAY_SET. Raises DataError for [container], also for what a workspace may not set, UsageError
    for --image.
    """
    settings = conf
    if toml:
        found = read_values(toml, _READERS, DataError, lambda name: f"job.toml: [container] {name} =")
        added = {**found, "options": (*conf.options, *found.get("options", ()))}
        settings = _require_consistent(replace(settings, **added), DataError, "job.toml: [container]")
        leaves = conf and not settings  # the container that conf.py has chosen
        workspace_rights.check("container", toml, _OF_WORKSPACE[1:] if leaves else _OF_WORKSPACE, may_set)
    if typed is not None:
        typed_image = read_values({"image": typed}, _READERS, UsageError, lambda name: "--image")
        settings = _require_consistent(replace(settings, **typed_image), UsageError, "--image")
    return settings


def refuse_launcher(settings: ContainerSettings, mode: str) -> None:
    """Raise ConfigError for mode mpi with a container."""
    if settings and mode == "mpi":
        what = f"mode mpi in a container is not possible ({settings.image}): mpirun starts its ranks on the nodes themselves"
        fix = 'take another mode, or no container: image = "" in [container] of job.toml, or --image ""'
        raise ConfigError(what, fix)


def _require_consistent(settings: ContainerSettings, error: Type[ClustertoolError], where: str) -> ContainerSettings:
    """Return the settings as they are.

    where: the option or table that has set them, for the error. Raises `error` if the runtime cannot run the image, or
    `options` has one that the tool refuses for the runtime.
    """
    if only_for_apptainer(settings.image) and settings.runtime not in (AUTO, APPTAINER):
        what = f"{where}: {settings.runtime} cannot run the image {settings.image!r}"
        raise error(what, f"runtime = {APPTAINER!r}, or an image of a registry")
    runtime = APPTAINER if only_for_apptainer(settings.image) else settings.runtime
    wrong = describe_refused(settings.options, runtime)
    if wrong:
        raise error(f"{where}: options has {wrong!r}", "leave it out")
    return settings


def _read_image(value: object) -> str:
    """Read `image`: a name, an absolute path, or "" for none. Raises ValueError, which states what is right."""
    if not isinstance(value, str) or re.search(r"\s", value) or not value.isprintable() or value.startswith("-"):
        raise ValueError('a name as the runtime knows it, "registry.example.org/train:1", or the path of a .sif file')
    if value.startswith(("./", "../", "~")) or (value.endswith(".sif") and "://" not in value and value[0] != "/"):
        raise ValueError("an absolute path on the nodes, where it is the path of a file")
    return value


def _list_of(form: str, right: str) -> Reader:
    """Create a reader of a list of strings that have this form, a pattern. right: describes such a list in the ValueError."""

    def read(value: object) -> Tuple[str, ...]:
        texts = value if isinstance(value, (list, tuple)) else [None]
        if not all(isinstance(text, str) and re.fullmatch(form, text) for text in texts):
            raise ValueError(right)
        return tuple(texts)

    return read


_READERS: Dict[str, Reader] = {
    "image": _read_image,
    "runtime": one_of(*RUNTIMES),
    "options": _list_of(_OPTION, 'a list of strings: ["--shm-size=8g"]'),
    "volumes": _list_of(
        _VOLUME, 'a list of "SOURCE:TARGET" or "SOURCE:TARGET:OPTIONS" with absolute paths: ["/data:/data:ro"]'
    ),
    "pull": one_of(*PULLS),
}
assert set(_READERS) == {each.name for each in fields(ContainerSettings)}
