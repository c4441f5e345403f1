"""A task of srun becomes one rank: it gets the environment of `run`, by srun's variables (srun(1), OUTPUT ENVIRONMENT).

srun --ntasks-per-node=4 clusterrun --under slurm train.py
"""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, NamedTuple, Tuple

from clustertool.errors import UsageError
from clustertool.model.launcher_variables import of_launcher
from clustertool.model.planning.launched_rank import RankOptions, collective_rank, hosts_with_ranks, laid_over
from clustertool.model.slurm.step_variables import node_names, number, text

_SRUN = "start it as a task of srun: srun -N 2 --ntasks-per-node=4 clusterrun --under slurm train.py"


class Task(NamedTuple):
    """A task of a step. hosts: the names of the step's nodes. tasks: how many tasks each of them has."""

    rank: int
    local_rank: int
    node: int
    hosts: Tuple[str, ...]
    tasks: Tuple[int, ...]
    step: str


def read_task(environ: Mapping[str, str]) -> Task:
    """Read rank, local rank, node and the step's nodes of a task from the variables of srun.

    Raises UsageError if no step has started this process, if the variables contradict each other, and if ranks are not numbered
    node by node.
    """
    variables = ("SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_NTASKS")
    node, local, rank, total = (number(environ, name, _SRUN) for name in variables)
    hosts = tuple(node_names(environ, _SRUN))
    tasks = _parse_counts(text(environ, "SLURM_STEP_TASKS_PER_NODE", _SRUN))
    if len(tasks) != len(hosts) or sum(tasks) != total or node >= len(hosts) or local >= tasks[node]:
        raise UsageError(f"the variables of srun contradict each other: {total} tasks, {tasks} on {hosts}", _SRUN)
    other = environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0] not in ("block", "pack", "nopack", "")
    if sum(tasks[:node]) + local != rank or (other and len(hosts) > 1 and max(tasks) > 1):
        what = f"srun has numbered its tasks across the nodes: task {rank} is number {local} of node {node}"
        raise UsageError(what, "add --distribution=block to srun: ranks are numbered node by node")
    step = f"{text(environ, 'SLURM_JOB_ID', _SRUN)}.{environ.get('SLURM_STEP_ID', '0')}"
    return Task(rank, local, node, hosts, tasks, step)


def rank_environment(environ: Mapping[str, str], options: RankOptions) -> Dict[str, str]:
    """Build the environment of a task's rank: variables of the task, and over them those that `run` sets in a collective job.

    Left out are variables of launchers (of_launcher()), except OMPI_MCA_*. The task's own SHELL_DEFAULTS stay; without its
    own OMP_NUM_THREADS, SLURM_CPUS_PER_TASK is used if that is set. Raises UsageError as read_task().
    """
    task = read_task(environ)
    hosts = hosts_with_ranks(task.hosts, task.tasks)
    computed = collective_rank(hosts, options, f"slurm-{task.step}", task.rank, task.local_rank, environ)
    if "SLURM_CPUS_PER_TASK" in environ:
        computed["OMP_NUM_THREADS"] = environ["SLURM_CPUS_PER_TASK"]
    # Settings of Open MPI stay: Slurm starts its programs as well.
    return laid_over(environ, computed, options, lambda name: not of_launcher(name) or name.startswith("OMPI_MCA_"))


def _parse_counts(listed: str) -> Tuple[int, ...]:
    """Parse `listed`, the tasks of each node: "2(x3),1" is 2, 2, 2, 1. Raises UsageError for another text."""
    found: List[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE is {listed!r}", _SRUN)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)
