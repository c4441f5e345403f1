"""This module parses job.toml, which is in the workspace of this machine or on the nodes."""

from __future__ import annotations

import sys

from clustertool.engines import known_engines
from clustertool.errors import DataError
from clustertool.model.config import workspace_rights
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job_tables import Toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def job_toml(text: str) -> Toml:
    """Parse the tables of a job.toml, without those of engines. Raises DataError with the line."""
    engines = known_engines.names()
    return {name: table for name, table in _loads(text).items() if name not in engines}


def engine_table(text: str, cluster: Cluster) -> Toml:
    """Read the settings of the cluster's engine in job.toml's text; the tables of other engines have no effect.

    Raises DataError, also for what a workspace may not set.
    """
    entry = known_engines.entry_of(cluster.engine)
    table = _loads(text).get(entry.name, {})
    if not isinstance(table, dict):
        raise DataError(
            f"job.toml: {entry.name} = {table!r} is no table", f"write [{entry.name}] and its keys below it"
        )
    workspace_rights.check(entry.name, table, entry.of_workspace, cluster.workspace_may_set)
    return table


def settings_note(toml: Toml, table: Toml, cluster: Cluster) -> str:
    """Return what a job.toml sets of its container and of the engine (`table`), in one line; "" for nothing."""
    name = known_engines.entry_of(cluster.engine).name
    found = workspace_rights.shown({"container": toml.get("container", {}), name: table})
    return f"job.toml sets {found}" if found else ""


def _loads(text: str) -> Toml:
    try:
        return dict(tomllib.loads(text.removeprefix("\ufeff")))  # an editor may put a mark in front
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"job.toml: {error}", "correct it; docs/reference.md has an example") from None
