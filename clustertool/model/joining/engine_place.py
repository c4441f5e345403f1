"""An engine's own variables state the place of a machine that joins: its index, and the host of the coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, List, Mapping, NamedTuple

from clustertool.errors import DataError, UsageError
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.slurm.step_variables import node_names, number

_SRUN = "start it with: srun --ntasks-per-node=1 python3 bundle.pyz join"


class EnginePlace(NamedTuple):
    """node: the index of this machine, 0 is the coordinator. names: of all machines, as the engine knows them."""

    node: int
    names: List[str]


def placed(join: JoinFile, environ: Mapping[str, str]) -> JoinFile:
    """The join file with the place of this machine, if an engine starts it. Raises UsageError, DataError."""
    if not join.engine:
        return join
    if join.engine not in _PLACES:
        raise DataError(f"the join file has the engine {join.engine!r}", f"the engines are {', '.join(_PLACES)}")
    place = _PLACES[join.engine](environ)
    names, count = place.names, len(place.names)
    if count != join.nnodes or not 0 <= place.node < count:
        what = f"{join.engine} has started node {place.node} of {count}, and the job has {join.nnodes} nodes"
        raise UsageError(what, "start the bundle once on each node of the job")
    own = replace(join.own, name=names[place.node])
    coordinator = replace(join.coordinator, host=names[0])
    return replace(join, index=place.node, coordinator=coordinator, own=own, names=tuple(names))


def _slurm(environ: Mapping[str, str]) -> EnginePlace:
    """From the variables of a task of srun."""
    node, tasks = number(environ, "SLURM_NODEID", _SRUN), number(environ, "SLURM_STEP_NUM_TASKS", _SRUN)
    names = node_names(environ, _SRUN)
    if tasks != len(names):
        raise UsageError(f"srun has started {tasks} tasks on {len(names)} nodes", _SRUN)
    return EnginePlace(node, names)


_PLACES: Dict[str, Callable[[Mapping[str, str]], EnginePlace]] = {"slurm": _slurm}
