"""What differs by engine for machines that join: their place, the time that they have, and where their messages are.

An engine's own variables state the place of a machine: its index, and the host of the coordinator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple

from clustertool.errors import DataError, UsageError
from clustertool.model.joining.join_file import JOIN_TIMEOUT, JoinFile
from clustertool.model.kubernetes.pod_variables import coordinator, pod_node
from clustertool.model.paths import STEP_OUTPUT
from clustertool.model.slurm.step_variables import node_names, number

_TOGETHER = {"slurm": 120.0}  # JOIN_TIMEOUT where an engine starts all nodes at once
_SRUN = "start it with: srun --ntasks-per-node=1 python3 bundle.pyz join"

# The index of a machine (0 is the coordinator), the names of all, as the engine knows them, and the coordinator's host.
EnginePlace = Tuple[int, Sequence[str], str]


def with_engine_place(join: JoinFile, environ: Mapping[str, str]) -> JoinFile:
    """Add to the join file what the engine states: index and name of this machine, all names, and the coordinator's host.

    Without an engine the file is returned unchanged. Raises DataError for an unknown engine; UsageError if the engine has not
    set its variables, or has started another number of machines than the job has.
    """
    if not join.engine:
        return join
    if join.engine not in _PLACES:
        raise DataError(f"the join file has the engine {join.engine!r}", f"the engines are {', '.join(_PLACES)}")
    node, names, host = _PLACES[join.engine](join, environ)
    count = len(names)
    elastic = join.job.elastic
    fits = elastic.minimum <= count <= elastic.maximum if elastic.present else count == join.nnodes
    if not fits or not 0 <= node < count:
        wanted = elastic.text if elastic.present else join.nnodes
        what = f"{join.engine} has started node {node} of {count}, and the job has {wanted} nodes"
        raise UsageError(what, "start the bundle once on each node of the job")
    own = replace(join.own, name=names[node])
    meets = replace(join.coordinator, host=host)
    return replace(join, index=node, coordinator=meets, own=own, names=tuple(names), nnodes=count)


def _slurm(join: JoinFile, environ: Mapping[str, str]) -> EnginePlace:
    """Read node, names of nodes and the coordinator's host, the first one, from the variables of a task of srun.

    Raises UsageError if one is missing, or if there are more or fewer tasks than nodes.
    """
    node, tasks = number(environ, "SLURM_NODEID", _SRUN), number(environ, "SLURM_STEP_NUM_TASKS", _SRUN)
    names = node_names(environ, _SRUN)
    if tasks != len(names):
        raise UsageError(f"srun has started {tasks} tasks on {len(names)} nodes", _SRUN)
    return node, names, names[0]


def _kubernetes(join: JoinFile, environ: Mapping[str, str]) -> EnginePlace:
    """Read node, names of nodes and the coordinator's host from the join file and the variables of a pod.

    The join file has the names of the pods, and mostly that of the coordinator's host.
    """
    return pod_node(environ), join.names, join.coordinator.host or coordinator(environ)


_PLACES: Dict[str, Callable[[JoinFile, Mapping[str, str]], EnginePlace]] = {"slurm": _slurm, "kubernetes": _kubernetes}


def join_timeout_of(given: Optional[float], engine: str = "") -> float:
    """Return the seconds for the joining: those given, else 120 with slurm and 600 with another engine or none.

    given: JOIN_TIMEOUT of conf.py, None if it is not set. engine: starts the machines.
    """
    return given or _TOGETHER.get(engine, JOIN_TIMEOUT)


def messages_of(engine: str) -> str:
    """Name the place with the messages of joining machines that this engine has started."""
    return {"slurm": STEP_OUTPUT, "kubernetes": "`kubectl logs`"}.get(engine, "the terminal")
