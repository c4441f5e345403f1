"""The table of engines names their modules, which are imported when they are used: the command line reads only the names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clustertool.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from clustertool.engines.base import Engine, Starter
    from clustertool.engines.job_request import RunRequest
    from clustertool.model.config.cluster import Cluster
    from clustertool.model.config.hosts import Host


@dataclass(frozen=True)
class EngineOption:
    """An option of `run` that sets a setting of an engine. The engine checks the value.

    value: what help calls it; "" for a flag. setting: its name in the settings, by default that of the option with underscores.
    """

    name: str
    help: str
    value: str = ""
    many: bool = False
    setting: str = ""

    @property
    def sets(self) -> str:
        return self.setting or self.name.replace("-", "_")


@dataclass(frozen=True)
class EngineEntry:
    """An engine by its name in ENGINE and --engine, and in job.toml as the name of a table with settings.

    engine, starter: "module:class", an Engine and a Starter. growth: what adds nodes to an elastic job, "" where the engine
    chooses the nodes. options: of `run`; the starter gets them in RunWish.settings.
    allocation: the variable that names an allocation of nodes in a shell, "" where there is none.
    """

    name: str
    engine: str
    starter: str
    options: tuple[EngineOption, ...] = ()
    allocation: str = ""
    growth: str = ""

    @property
    def settings(self) -> str:
        """The key of conf.py with its settings."""
        return self.name.upper().replace("-", "_")


DEFAULT = "ssh"
_ENTRIES: dict[str, EngineEntry] = {}


def register(entry: EngineEntry) -> None:
    """Add an engine, or replace the one of the same name."""
    _ENTRIES[entry.name] = entry


register(
    EngineEntry(
        "ssh",
        "clustertool.engines.ssh_engine:SshEngine",
        "clustertool.engines.ssh_start:SshStart",
        growth="clustertool.engines.elastic.growth:Growth",
    )
)

SLURM_OPTIONS = (
    EngineOption("partition", "the partition of Slurm, or several: a,b", "NAME"),
    EngineOption("account", "the account to charge", "NAME"),
    EngineOption("qos", "the quality of service", "NAME"),
    EngineOption("time", "the time limit of the allocation: 30 (minutes), 1:30:00, 2-12, or with a unit: 2h", "TIME"),
    EngineOption("cpus-per-node", "processors for the ranks of each node", "N"),
    EngineOption("mem", "memory of each node: 64G; 0 is all of it", "SIZE"),
    EngineOption("gpus-per-node", "GPUs of each node: 4, or with their type: a100:4", "[TYPE:]N"),
    EngineOption("exclusive", "whole nodes, which the job shares with no other"),
    EngineOption("constraint", "features that the nodes need", "FEATURES"),
    EngineOption("nodelist", "nodes that the job needs: node[1-4],node7", "NODES"),
    EngineOption("exclude", "nodes that the job does not get", "NODES"),
    EngineOption("reservation", "the reservation to use", "NAME"),
    EngineOption("requeue", "start the job again if Slurm takes its nodes away"),
    EngineOption(
        "sbatch-option", "another option of sbatch: --sbatch-option=--mail-type=END", "OPTION", True, "options"
    ),
)
_SLURM = "clustertool.engines.slurm"
register(
    EngineEntry(
        "slurm",
        f"{_SLURM}.slurm_engine:SlurmEngine",
        f"{_SLURM}.slurm_start:SlurmStart",
        SLURM_OPTIONS,
        "SLURM_JOB_ID",
    )
)

KUBERNETES_OPTIONS = (
    EngineOption("context", "the context of the kubeconfig", "NAME"),
    EngineOption("namespace", "the namespace of the job", "NAME"),
    EngineOption("dialect", "the kind of workload: job (an Indexed Job), jobset or paddlejob", "KIND"),
    EngineOption("queue", "the queue of Kueue", "NAME"),
    EngineOption("priority-class", "the priority class of the pods", "NAME"),
)
_KUBERNETES = "clustertool.engines.kubernetes"
register(
    EngineEntry(
        "kubernetes",
        f"{_KUBERNETES}.kubernetes_engine:KubernetesEngine",
        f"{_KUBERNETES}.kubernetes_start:KubernetesStart",
        KUBERNETES_OPTIONS,
    )
)


def names() -> tuple[str, ...]:
    return tuple(_ENTRIES)


def entries() -> tuple[EngineEntry, ...]:
    return tuple(_ENTRIES.values())


def options() -> dict[str, EngineOption]:
    """The options of all engines, by their names. An option that two engines have is one option."""
    return {option.name: option for entry in _ENTRIES.values() for option in entry.options}


def typed_settings(given: Mapping[str, object]) -> dict[str, object]:
    """The settings that a command line has given. given: its options by their names with underscores; "", () and False are not
    given."""
    typed = {option.sets: given.get(option.name.replace("-", "_")) for option in options().values()}
    return {name: value for name, value in typed.items() if value}


def refuse_settings(engine: str, typed: Mapping[str, object]) -> None:
    """Raises UsageError for a setting of a command line that the engine does not have. engine: "" for the default."""
    mine = {option.sets for option in _entry(engine).options}
    for option in options().values():
        if option.sets in typed and option.sets not in mine:
            of = next(entry.name for entry in _ENTRIES.values() if option in entry.options)
            what = f"--{option.name} is an option of the engine {of}, and this job uses the engine {engine or DEFAULT}"
            raise UsageError(what, f"add --engine {of}, or leave --{option.name} out")
    for name in typed.keys() - mine:
        fix = f"known: {', '.join(sorted(mine))}" if mine else "leave it out"
        raise UsageError(f"the engine {engine or DEFAULT} has no setting {name!r}", fix)


def settings_keys() -> dict[str, str]:
    """The keys of conf.py that have settings of engines, with the engine of each."""
    return {entry.settings: entry.name for entry in _ENTRIES.values()}


def ignored_allocations(environ: Mapping[str, str], engine: str) -> list[str]:
    """NAME=value of each allocation of another engine in which the shell is. engine: the one that is used."""
    others = [entry.allocation for entry in _ENTRIES.values() if entry.name != (engine or DEFAULT)]
    return [f"{name}={environ[name]}" for name in others if environ.get(name)]


def engine_named(name: str) -> type[Engine]:
    """`name`: "" for the default. Raises ConfigError."""
    found: type[Engine] = _target(_entry(name).engine)
    return found


def engine_of(cluster: Cluster) -> type[Engine]:
    """Raises ConfigError for a job of an engine that this version does not have."""
    return engine_named(cluster.engine)


def starter_of(engine: Engine, request: RunRequest) -> Starter:
    """Raises ConfigError."""
    starter: Starter = _target(_entry(request.cluster.engine).starter)(engine, request)
    return starter


def grow(engine: Engine, job: str, hosts: Sequence[Host]) -> Mapping[str, str]:
    """Start further nodes of an elastic job that runs, or nodes of it again that do not take part. engine: its fleet is open.

    Returns {name: what becomes of it}. Raises UsageError where the engine chooses the nodes; ClustertoolError.
    """
    entry = _entry(engine.fleet.cluster.engine)
    if not entry.growth:
        what = f"the engine {entry.name} chooses the nodes itself"
        raise UsageError(what, "ask it for more nodes, which join the job by themselves")
    found: Mapping[str, str] = _target(entry.growth)(engine.caller, engine.fleet, job).run(hosts)
    return found


def revive(engine: Engine, job: str, node: int) -> bool:
    """Start a node of an elastic job again that does not take part in it, and whose agent is open. Called in a thread.

    Returns whether it was started: an engine that chooses the nodes does so itself. Raises ClustertoolError.
    """
    growth = _entry(engine.fleet.cluster.engine).growth
    return bool(growth) and bool(_target(growth)(engine.caller, engine.fleet, job).again(node))


def _entry(name: str) -> EngineEntry:
    found = _ENTRIES.get(name or DEFAULT)
    if found is None:
        raise ConfigError(f"the engine {name!r} is not known", f"one of {', '.join(names())}")
    return found


def _target(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
