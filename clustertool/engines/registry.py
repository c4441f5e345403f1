"""The registry imports the classes of an engine when a job needs them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clustertool.engines.known_engines import entry_of
from clustertool.errors import UsageError

if TYPE_CHECKING:
    from clustertool.engines.base import Engine, Starter
    from clustertool.engines.job_request import RunRequest
    from clustertool.model.config.cluster import Cluster
    from clustertool.model.config.hosts import Host


def engine_named(name: str) -> type[Engine]:
    """`name`: "" for the default. Raises ConfigError."""
    found: type[Engine] = _target(entry_of(name).engine)
    return found


def engine_of(cluster: Cluster) -> type[Engine]:
    """Return the engine class of a cluster. Raises ConfigError for an engine that this version does not have."""
    return engine_named(cluster.engine)


def starter_of(engine: Engine, request: RunRequest) -> Starter:
    """Create the starter of a request. Raises ConfigError."""
    starter: Starter = _target(entry_of(request.cluster.engine).starter)(engine, request)
    return starter


def grow(engine: Engine, job: str, hosts: Sequence[Host]) -> Mapping[str, str]:
    """Start further nodes of an elastic job that runs, or nodes of it again that do not take part. engine: its fleet is open.

    Returns {name: what becomes of it}. Raises UsageError where the engine chooses the nodes; ClustertoolError.
    """
    entry = entry_of(engine.fleet.cluster.engine)
    if not entry.growth:
        what = f"the engine {entry.name} chooses the nodes itself"
        raise UsageError(what, "ask it for more nodes, which join the job by themselves")
    found: Mapping[str, str] = _target(entry.growth)(engine.caller, engine.fleet, job).run(hosts)
    return found


def revive(engine: Engine, job: str, node: int) -> bool:
    """Start a node of an elastic job again that does not take part in it, and whose agent is open. Called in a thread.

    Returns whether it was started: an engine that chooses the nodes does so itself. Raises ClustertoolError.
    """
    growth = entry_of(engine.fleet.cluster.engine).growth
    return bool(growth) and bool(_target(growth)(engine.caller, engine.fleet, job).again(node))


def _target(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
