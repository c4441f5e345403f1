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
    """Read the job.toml of a workspace without the tables of engines; an empty one if there is no file. Raises DataError."""
    return job_toml(_toml_text(folder))


def workspace_settings(folder: Path, cluster: Cluster) -> Toml:
    """Read the table of the cluster's engine in the job.toml of a workspace, {} if there is none.

    Raises DataError, also if there is no such folder, and for a setting that a workspace may not set.
    """
    return engine_table(_toml_text(folder), cluster)


def _toml_text(folder: Path) -> str:
    """Read the text of a folder's job.toml, "" if it has none.

    Raises DataError if there is no such folder, for a file in its place, or if the text cannot be read.
    """
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
        fix = "give rights to it, and to each folder above"
        raise DataError(f"{path} cannot be read: {error.strerror}", fix) from None


def workspace(caller: Caller, folder: Path, ignore_from: Sequence[str] = ()) -> Workspace:
    """Read a workspace with the files that are sent, remark on those left out or still written to, and warn of suspicious ones.

    ignore_from: IGNORE_FROM of conf.py. Suspicious are files that may have secrets, or are probably large by accident; at most
    four of each kind are named.
    """
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
        advice = "if it has secrets, name it in .clusterignore, and pass them by SECRETS of conf.py"
        caller.warn(f"{path} is sent too; {advice}")
    for path, size in accidents(found)[:4]:
        caller.warn(f"{path} ({human_bytes(size)}) is sent too; if that is not meant, name it in .clusterignore")
    return found


def uses_one_port(found: Workspace) -> bool:
    """Check whether one of the first 200 .py files below 256 KiB of a workspace uses PADDLE_INIT_PORT or paddle.v2.

    Such a program connects to all pservers at one port.
    """
    scripts = [entry.path for entry in found.entries if entry.path.endswith(".py") and entry.size < _SCRIPT]
    return any(_has_v2(found.top / path) for path in scripts[:_SCRIPTS])


def _has_v2(script: Path) -> bool:
    """Check whether the text of a program has PADDLE_INIT_PORT or paddle.v2; False if it cannot be read.

    The dispatch reports a file that cannot be read.
    """
    with contextlib.suppress(OSError):
        return script.is_file() and _V2.search(script.read_bytes()) is not None
    return False


def read_scattered_job(cluster: Cluster, toml: Toml) -> JobSpec | None:
    """Read the job of a job.toml whose shards are sent only to the nodes that read them; None if all nodes get all."""
    shards = toml.get("shards")
    if not isinstance(shards, dict) or not shards.get("only_where_read"):
        return None
    return read_job(cluster, toml, Options())


def container(cluster: Cluster, toml: Toml, image: str | None) -> ContainerSettings:
    """Merge the container settings of conf.py, of job.toml and of --image (`image`), and refuse a mode that needs a launcher.

    Raises DataError for [container] of job.toml, UsageError for --image, and ConfigError for such a mode in a container.
    """
    given = toml.get("container")
    table = given if isinstance(given, dict) else {}
    found = merge_container(cluster.container, table, image, cluster.workspace_may_set)
    refuse_launcher(found, str(toml.get("mode", "")))
    return found
