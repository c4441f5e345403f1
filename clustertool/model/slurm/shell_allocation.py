"""A command can be typed in an allocation: in a shell of salloc, in a batch script, or in a step with a shell.

The variables are in salloc(1), sbatch(1) and srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Dict, Mapping, Optional, Tuple

from clustertool.errors import UsageError
from clustertool.model.launcher_variables import of_task
from clustertool.model.quantities import count
from clustertool.model.rank_signals import in_step
from clustertool.model.slurm.slurm_settings import SlurmSettings

_NUMBER = re.compile("[0-9]{1,10}")
_KEPT = ("SLURM_CONF",)  # where srun finds the cluster
_USED = ("login", "nodes", "cpus_per_node")  # the settings that a step has, too


@dataclass(frozen=True)
class ShellAllocation:
    """The allocation of Slurm in which a command was typed. job: its number. nodes: how many it has.

    cpus: processors on the node that has the fewest; 0: not known. gpus: of each node, as --gpus-per-node has them; "" for
    none. in_step: the shell itself is a step with all that was allocated, as with `srun --pty`. heterogeneous: it is the first
    part of a heterogeneous job, which has others.
    """

    job: str
    nodes: int = 0
    cpus: int = 0
    gpus: str = ""
    in_step: bool = False
    heterogeneous: bool = False

    def step(self, settings: SlurmSettings) -> SlurmSettings:
        """Return the settings of a step in the allocation: only login, nodes (else all nodes) and cpus_per_node are kept.

        Raises UsageError if the allocation is too small for them.
        """
        nodes, cpus = settings.nodes or self.nodes, settings.cpus_per_node
        if nodes > self.nodes:
            has = count(self.nodes, "node")
            what = f"the allocation {self.job} of this shell has {has}, and the job needs {nodes}"
            raise UsageError(what, f"give --nnodes {self.nodes}, or leave the allocation: a new job is submitted then")
        if self.cpus and cpus > self.cpus:
            has = count(self.cpus, "CPU")
            what = f"the allocation {self.job} of this shell has {has} on a node, and the job needs {cpus}"
            raise UsageError(what, f"give --cpus-per-node {self.cpus}, or leave the allocation")
        return SlurmSettings(login=settings.login, nodes=nodes, cpus_per_node=cpus)

    def with_resources(self, settings: SlurmSettings) -> SlurmSettings:
        """Return the settings with the GPUs of the allocation's nodes, and their processors if cpus_per_node is not set.

        They are for the plan that --dry shows.
        """
        return replace(settings, cpus_per_node=settings.cpus_per_node or self.cpus, gpus_per_node=self.gpus)

    def cpus_warning(self, settings: SlurmSettings, ranks: int) -> str:
        """Return a warning if ranks share the few processors of the allocation; "" if they do not, or that is not known.

        ranks: on each node, 0 if their number is not known.
        """
        if settings.cpus_per_node or not self.cpus or self.cpus >= max(ranks, 2):
            return ""
        has, them = count(self.cpus, "CPU"), "them" if self.cpus > 1 else "it"
        default = f"its {ranks} ranks share {them}"
        sharing = {0: f"all its ranks share {them}", 1: "its rank has no more"}.get(ranks, default)
        fix = "ask salloc for more: --cpus-per-task N, or --exclusive"
        return f"the allocation {self.job} has {has} on a node, and {sharing}; {fix}"


def shell_allocation(environ: Mapping[str, str]) -> Optional[ShellAllocation]:
    """Read the allocation of a shell from its variables, with 0 as the number of nodes; None without one.

    Returns None also if the shell is a rank of a job of ours, which uses all of the allocation.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not _NUMBER.fullmatch(job) or environ.get("CLUSTERTOOL_JOB"):
        return None
    counts = re.findall(r"(?:^|,)([0-9]{1,6})(?=[(,]|$)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # "4(x2),2"
    gpus = environ.get("SLURM_GPUS_PER_NODE", "")
    cpus = min(map(int, counts), default=0)
    return ShellAllocation(job, 0, cpus, gpus, in_step(environ), "SLURM_HET_SIZE" in environ)


def ignored_keys(settings: SlurmSettings) -> Tuple[str, ...]:
    """List the names of the settings that were given, and that have no effect in a step: the allocation has them already."""
    given = (each.name for each in fields(settings) if getattr(settings, each.name) != each.default)
    return tuple(name for name in given if name not in _USED)


def for_srun(environ: Mapping[str, str]) -> Dict[str, str]:
    """Copy the environment without the variables of a task, which srun reads as options: SLURM_NTASKS of `salloc -n 8`."""
    return {name: value for name, value in environ.items() if name in _KEPT or not of_task(name)}
