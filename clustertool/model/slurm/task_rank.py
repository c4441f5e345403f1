"""A task of srun as one rank: the environment that `run` would give it, from srun's variables (srun(1), OUTPUT ENVIRONMENT).

    srun --ntasks-per-node=4 clusterrun --under slurm train.py

Each task computes it by itself, so all of them must come to the same ranks, hosts and ports.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, List, Mapping, NamedTuple, Tuple

from clustertool.errors import UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec
from clustertool.model.devices.visibility import VARIABLES, allocated, one_each
from clustertool.model.facts import Facts, Identity
from clustertool.model.launcher_variables import of_launcher
from clustertool.model.paths import JobPaths
from clustertool.model.planning import ports, ranks
from clustertool.model.planning.environment import DEFAULTS, Table, environment
from clustertool.model.slurm.step_variables import node_names, number, text

_SRUN = "start it as a task of srun: srun -N 2 --ntasks-per-node=4 clusterrun --under slurm train.py"
_BLOCKS, _BLOCK = 300, 64  # of ports; all are below the kernel's own range
# Of a job that the tool has started: its directory, its id, and what belongs to them. There is no such job here.
_OF_JOBS = (
    "CLUSTERTOOL_JOB",
    "CLUSTERTOOL_MARK",
    "CLUSTERTOOL_OUTPUT",
    "CLUSTERTOOL_SHARDS",
    "TORCHELASTIC_ERROR_FILE",
)


class Task(NamedTuple):
    """A task of a step. hosts: the names of the step's nodes. tasks: how many tasks each of them has."""

    rank: int
    local_rank: int
    node: int
    hosts: Tuple[str, ...]
    tasks: Tuple[int, ...]
    step: str


def read_task(environ: Mapping[str, str]) -> Task:
    """Raises UsageError where no step has started this process, and where ranks are not numbered node by node."""
    variables = ("SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_NTASKS")
    node, local, rank, total = (number(environ, name, _SRUN) for name in variables)
    hosts = tuple(node_names(environ, _SRUN))
    tasks = _counts(text(environ, "SLURM_STEP_TASKS_PER_NODE", _SRUN))
    if len(tasks) != len(hosts) or sum(tasks) != total or node >= len(hosts) or local >= tasks[node]:
        raise UsageError(f"the variables of srun contradict each other: {total} tasks, {tasks} on {hosts}", _SRUN)
    other = environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0] not in ("block", "pack", "nopack", "")
    if sum(tasks[:node]) + local != rank or (other and len(hosts) > 1 and max(tasks) > 1):
        what = f"srun has numbered its tasks across the nodes: task {rank} is number {local} of node {node}"
        raise UsageError(what, "add --distribution=block to srun: ranks are numbered node by node")
    step = f"{text(environ, 'SLURM_JOB_ID', _SRUN)}.{environ.get('SLURM_STEP_ID', '0')}"
    return Task(rank, local, node, hosts, tasks, step)


def rank_environment(environ: Mapping[str, str], start_port: int = 0, own: bool = False) -> Dict[str, str]:
    """The environment of a task's rank: that of the task, and the variables that `run` sets in a collective job.

    start_port: of the first rank on each node; 0: one that the step determines. own: LOCAL_RANK is 0,
    for programs of which each task sees one device only. Raises UsageError.
    """
    task = read_task(environ)
    computed = {name: value for name, value in _planned(task, start_port).items() if name not in _OF_JOBS}
    cards = _cards(task, environ)
    if cards:
        del computed["PADDLE_DISTRI_BACKEND"]
        computed.update(cards)
    if own:
        computed["LOCAL_RANK"] = "0"
    if "SLURM_CPUS_PER_TASK" in environ:
        computed["OMP_NUM_THREADS"] = environ["SLURM_CPUS_PER_TASK"]
    # Settings of Open MPI stay: Slurm starts its programs as well.
    kept = {name: value for name, value in environ.items() if not of_launcher(name) or name.startswith("OMPI_MCA_")}
    return {**kept, **computed, **{name: environ[name] for name in DEFAULTS if name in environ}}


def _planned(task: Task, start_port: int) -> Dict[str, str]:
    """The variables of the rank in a job on these hosts."""
    hosts = tuple(
        Host(index=index, host=name, name=name, address=name, nproc=tasks)
        for index, (name, tasks) in enumerate(zip(task.hosts, task.tasks))
    )
    facts = {host.index: Facts(host.index, address=host.host, boot_id=host.host, root="/") for host in hosts}
    first = start_port or ports.LOWEST_PORT + _BLOCK * (sum(map(int, re.findall("[0-9]+", task.step))) % _BLOCKS)
    cluster, job, name = Cluster(hosts, device_kind="cpu", start_port=first), JobSpec(), f"slurm-{task.step}"
    seats = ranks.assign(hosts, job, facts, {host.index: () for host in hosts})
    chosen = ports.choose(seats, cluster, job, facts, name)
    table = Table(Identity(name), cluster, job, facts, seats, chosen, ("cpu",) * len(hosts))
    return environment(table, seats[task.rank], JobPaths("/", name), "")


def _cards(task: Task, environ: Mapping[str, str]) -> Dict[str, str]:
    """Paddle's flag for the device of this rank, {} without devices. Slurm's own variable stays as it is; only of MIG instances
    a rank sees its own one, because CUDA shows a process the first."""
    for kind, (variable, selected) in VARIABLES.items():
        names = allocated(kind, environ)
        if one_each(names):
            return {variable: names[task.local_rank % len(names)], selected: "0"}
        if names:
            return {selected: str(task.local_rank % len(names))}
    return {}


def _counts(listed: str) -> Tuple[int, ...]:
    """ "2(x3),1" -> 2, 2, 2, 1. Raises UsageError."""
    found: List[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE is {listed!r}", _SRUN)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


# The values of --under.
UNDER: Dict[str, Callable[[Mapping[str, str], int, bool], Dict[str, str]]] = {"slurm": rank_environment}
