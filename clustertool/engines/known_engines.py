"""The table of engines has what the command line and the reading of conf.py need: names, options and capabilities.

The classes that it names are imported when a job needs them (base.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustertool.errors import ConfigError, UsageError


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
        """The name of the setting: `setting`, else the option's name with underscores."""
        return self.setting or self.name.replace("-", "_")


@dataclass(frozen=True)
class Capabilities:
    """What an engine needs and does. Other code asks for these, and never for the name of an engine.

    needs_hosts: jobs run on HOSTS of conf.py. Else the engine chooses the nodes, and --nnodes is their number.
    queues: a job may wait before it starts, also while this machine is off. Else engine.fleet is open after submit(), and its
    nodes are numbered as those of the job.
    sends_workspace: the engine has its own way to bring the workspace to the nodes. Else DISPATCH and `dispatch` carry it.
    live_channels: open() has an agent on each node of a running job. Such an agent knows which processes live, and stops them.
    Else the agents only read records, and the engine alone knows whether a job has ended.
    requeues: a job may go back to the queue, and then has records of its earlier run.
    elastic: its jobs may follow nodes that come and go.
    """

    needs_hosts: bool
    queues: bool
    sends_workspace: bool
    live_channels: bool
    requeues: bool = False
    elastic: bool = False


@dataclass(frozen=True)
class EngineEntry:
    """An engine by its name in ENGINE and --engine, and in job.toml as the name of a table with settings.

    engine, starter: "module:class", an Engine and a Starter. options: of `run`; the starter gets them
    in RunWish.settings. allocation: the variable that names an allocation of nodes in a shell, "" where there is none. growth:
    what adds nodes to an elastic job, "" where the engine chooses the nodes. of_workspace: what a job.toml may set
    (workspace_rights.py).
    """

    name: str
    engine: str
    starter: str
    capabilities: Capabilities
    options: tuple[EngineOption, ...] = ()
    allocation: str = ""
    growth: str = ""
    of_workspace: tuple[str, ...] = ()

    @property
    def settings(self) -> str:
        """The key of conf.py that has the engine's settings, such as SLURM."""
        return self.name.upper().replace("-", "_")


DEFAULT = "ssh"
_ENTRIES: dict[str, EngineEntry] = {}


def register(entry: EngineEntry) -> None:
    """Add an engine to the table, or replace the one of the same name."""
    _ENTRIES[entry.name] = entry


register(
    EngineEntry(
        "ssh",
        "clustertool.engines.ssh.ssh_engine:SshEngine",
        "clustertool.engines.ssh.ssh_start:SshStart",
        Capabilities(needs_hosts=True, queues=False, sends_workspace=False, live_channels=True, elastic=True),
        growth="clustertool.engines.elastic.elastic_members:Growth",
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
# How many nodes, which ones and for how long, within what Slurm grants to the user. No option reads a file, or chooses a user.
_SLURM_OF_WORKSPACE = (
    *(option.sets for option in SLURM_OPTIONS if not option.many),
    "nodes",
    *(
        f"options.--{name}"
        for name in """begin contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot dependency
        distribution exclusive extra-node-info gpu-bind gpu-freq gpus gpus-per-socket gres gres-flags hint hold immediate
        kill-on-invalid-dep licenses mail-type mem-bind mem-per-cpu mem-per-gpu mincpus nice oversubscribe prefer priority
        signal sockets-per-node spread-job switches thread-spec threads-per-core time-min tmp use-min-nodes
        wait-all-nodes""".split()
    ),
)
_SLURM = "clustertool.engines.slurm"
register(
    EngineEntry(
        "slurm",
        f"{_SLURM}.slurm_engine:SlurmEngine",
        f"{_SLURM}.slurm_start:SlurmStart",
        Capabilities(
            needs_hosts=False, queues=True, sends_workspace=False, live_channels=False, requeues=True, elastic=True
        ),
        SLURM_OPTIONS,
        "SLURM_JOB_ID",
        of_workspace=_SLURM_OF_WORKSPACE,
    )
)

KUBERNETES_OPTIONS = (
    EngineOption("context", "the context of the kubeconfig", "NAME"),
    EngineOption("namespace", "the namespace of the job", "NAME"),
    EngineOption("dialect", "the kind of workload: job (an Indexed Job), jobset or paddlejob", "KIND"),
    EngineOption("queue", "the queue of Kueue", "NAME"),
    EngineOption("priority-class", "the priority class of the pods", "NAME"),
)
# How many pods, how large and on which kind of node. Not as whom they run, nor what of the cluster and its machines they reach.
_KUBERNETES_OF_WORKSPACE = tuple(
    """nodes resources node_selector tolerations affinity shared_memory dialect queue keep workspace output
    paddlejob.clean_pod_policy paddlejob.with_gloo volumes.pvc volumes.configmap volumes.emptydir volumes.image
    volumes.persistentVolumeClaim volumes.configMap volumes.emptyDir volumes.readOnly volumes.subPath""".split()
)
_KUBERNETES = "clustertool.engines.kubernetes"
register(
    EngineEntry(
        "kubernetes",
        f"{_KUBERNETES}.kubernetes_engine:KubernetesEngine",
        f"{_KUBERNETES}.kubernetes_start:KubernetesStart",
        Capabilities(needs_hosts=False, queues=True, sends_workspace=True, live_channels=False),
        KUBERNETES_OPTIONS,
        of_workspace=_KUBERNETES_OF_WORKSPACE,
    )
)


def names() -> tuple[str, ...]:
    """List the names of all engines."""
    return tuple(_ENTRIES)


def entries() -> tuple[EngineEntry, ...]:
    """List the entries of all engines."""
    return tuple(_ENTRIES.values())


def options() -> dict[str, EngineOption]:
    """Return {name: option} of all engines. Of two options of one name the engine that was registered last counts."""
    return {option.name: option for entry in _ENTRIES.values() for option in entry.options}


def typed_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Return {setting: value} of the options of all engines that a command line has given.

    given: all its options, by their names with underscores. An empty value ("", (), False, None) counts as not given.
    """
    typed = {option.sets: given.get(option.name.replace("-", "_")) for option in options().values()}
    return {name: value for name, value in typed.items() if value}


def refuse_settings(engine: str, typed: Mapping[str, object]) -> None:
    """Raise UsageError for the first typed setting that the engine does not have; do nothing if it has them all.

    engine: "" for the default. typed: {setting: value}, as of typed_settings().
    """
    mine = {option.sets for option in entry_of(engine).options}
    for option in options().values():
        if option.sets in typed and option.sets not in mine:
            of = next(entry.name for entry in _ENTRIES.values() if option in entry.options)
            what = f"--{option.name} is an option of the engine {of}, and this job uses the engine {engine or DEFAULT}"
            raise UsageError(what, f"add --engine {of}, or leave --{option.name} out")
    for name in typed.keys() - mine:
        fix = f"known: {', '.join(sorted(mine))}" if mine else "leave it out"
        raise UsageError(f"the engine {engine or DEFAULT} has no setting {name!r}", fix)


def settings_keys() -> dict[str, str]:
    """Map each key of conf.py that has the settings of an engine (SLURM) to the name of the engine."""
    return {entry.settings: entry.name for entry in _ENTRIES.values()}


def ignored_allocations(environ: Mapping[str, str], engine: str) -> list[str]:
    """List NAME=value of each variable that names an allocation of an engine other than `engine`, if the environment has it.

    These allocations are not used by the job.
    """
    others = [entry.allocation for entry in _ENTRIES.values() if entry.name != (engine or DEFAULT)]
    return [f"{name}={environ[name]}" for name in others if environ.get(name)]


def capabilities(engine: str) -> Capabilities:
    """Return the capabilities of an engine; "": of the default. Raises ConfigError for a name that is not known."""
    return entry_of(engine).capabilities


def entry_of(name: str) -> EngineEntry:
    """Return the entry of an engine; "": of the default. Raises ConfigError for a name that is not known."""
    found = _ENTRIES.get(name or DEFAULT)
    if found is None:
        raise ConfigError(f"the engine {name!r} is not known", f"one of {', '.join(names())}")
    return found
