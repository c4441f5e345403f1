"""This module reads a workspace: its job.toml becomes settings, and its files what is sent to the nodes."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from clustertool.engines.caller import Caller
from clustertool.engines.job_request import engine_table, job_toml
from clustertool.errors import DataError
from clustertool.fleet.dispatch.workspace import CREDENTIALS, PRIVATE_KEY, UNUSUAL, Workspace, accidents
from clustertool.fleet.dispatch.workspace import read_workspace as read
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.container_keys import merge_container, refuse_launcher
from clustertool.model.config.job import JobSpec, Options, read_job
from clustertool.model.config.job_tables import Toml
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.quantities import human_bytes

_V2 = re.compile(rb"PADDLE_INIT_PORT\b|\bpaddle\.v2\b|\bfrom paddle import v2\b")
_SCRIPT, _SCRIPTS = 1 << 18, 200  # bytes of a program that is searched for this, and how many
_LISTED = 8  # files that are left out, in one line; of private keys and the like four times as many


def workspace_toml(folder: Path) -> Toml:
    """Read the job.toml of a workspace without the settings of engines. Raises DataError."""
    return job_toml(_toml_text(folder))


def workspace_settings(folder: Path, cluster: Cluster) -> Toml:
    """Read the settings of the cluster's engine in its job.toml. Raises DataError."""
    return engine_table(_toml_text(folder), cluster)


def _toml_text(folder: Path) -> str:
    if os.path.isfile(folder):
        fix = "give its folder: --workspace DIR --script FILE"
        raise DataError(f"the workspace {str(folder)!r} is a file, not a folder", fix)
    path = folder / "job.toml"
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise FileNotFoundError
        return path.read_text("utf-8") if stat.S_ISREG(os.stat(path).st_mode) else ""  # as TOML is, whatever the locale
    except FileNotFoundError:
        if os.path.isdir(folder):
            return ""
        raise DataError(f"there is no workspace {str(folder)!r}", "give a folder: --workspace ./job") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read: {error}", "save it as UTF-8") from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", "give rights to it, and to each folder above"
        ) from None


def workspace(caller: Caller, folder: Path, ignore_from: Sequence[str] = ()) -> Workspace:
    """Walk it, and report once what is excluded. ignore_from: of conf.py."""
    found = read(folder, ignore_from)
    if found.left_out:
        secret = [left for left in found.left_out if left.why in (PRIVATE_KEY, CREDENTIALS)]
        usual = [left for left in found.left_out if left not in secret]
        ordered = [*secret, *sorted(usual, key=lambda left: left.why not in UNUSUAL)]
        count = max(_LISTED, min(len(secret), 4 * _LISTED))
        listed = ", ".join(f"{left.path} ({left.why}, {human_bytes(left.size)})" for left in ordered[:count])
        more = f" and {len(ordered) - count} more" if len(ordered) > count else ""
        named = [*secret, *(left for left in ordered if left.path in ("log/", "output/"))]
        takes = f"; a line !{named[0].path} in .clusterignore takes it" if named else ""
        caller.remark(f"left out: {listed}{more}{takes}")
    if found.grown:
        grown = ", ".join(found.grown[:_LISTED]) + " and more" * (len(found.grown) > _LISTED)
        caller.remark(f"written to while it was read: {grown}; sent is what was there at first")
    for path in found.unsure[:4]:
        caller.warn(
            f"{path} is sent too; if it has secrets, name it in .clusterignore, and pass them by SECRETS of conf.py"
        )
    for path, size in accidents(found)[:4]:
        caller.warn(f"{path} ({human_bytes(size)}) is sent too; if that is not meant, name it in .clusterignore")
    return found


def uses_one_port(found: Workspace) -> bool:
    """Search for a program that connects to all pservers at one port, by PADDLE_INIT_PORT or paddle.v2, which reads that."""
    scripts = [entry.path for entry in found.entries if entry.path.endswith(".py") and entry.size < _SCRIPT]
    return any(_has_v2(found.top / path) for path in scripts[:_SCRIPTS])


def _has_v2(script: Path) -> bool:
    """Search the text of a program. What cannot be read is an error of the dispatch."""
    with contextlib.suppress(OSError):
        return script.is_file() and _V2.search(script.read_bytes()) is not None
    return False


def scattered(cluster: Cluster, toml: Toml) -> JobSpec | None:
    """Read the job of a job.toml whose shards are sent only to the nodes that read them; None where all nodes get all."""
    shards = toml.get("shards")
    if not isinstance(shards, dict) or not shards.get("only_where_read"):
        return None
    return read_job(cluster, toml, Options())


def container(cluster: Cluster, toml: Toml, image: str | None) -> ContainerSettings:
    """Read the container of a job of this workspace. image: of --image. Raises ConfigError, DataError, UsageError."""
    table = toml.get("container", {})
    found = merge_container(
        cluster.container, table if isinstance(table, dict) else {}, image, cluster.workspace_may_set
    )
    refuse_launcher(found, str(toml.get("mode", "")))
    return found
