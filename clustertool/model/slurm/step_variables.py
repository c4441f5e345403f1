"""srun sets these variables for each task of a step (srun(1), OUTPUT ENVIRONMENT VARIABLES)."""

from __future__ import annotations

from typing import List, Mapping

from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.model.quantities import whole
from clustertool.model.slurm.slurm_answers import read_node_list

_MOST = 99999


def text(environ: Mapping[str, str], name: str, fix: str) -> str:
    """Read a variable. Raises UsageError with this fix where no step has started the process."""
    found = environ.get(name, "")
    if not found:
        raise UsageError(f"{name} is not set: no step of Slurm has started this process", fix)
    return found


def number(environ: Mapping[str, str], name: str, fix: str) -> int:
    """Read a variable as a number. Raises UsageError."""
    found = text(environ, name, fix)
    value = whole(found, 0, _MOST)
    if value is None:
        raise UsageError(f"{name} is {found!r}, no number", fix)
    return value


def node_names(environ: Mapping[str, str], fix: str) -> List[str]:
    """Read the nodes of the step. Raises UsageError."""
    found = text(environ, "SLURM_STEP_NODELIST", fix)
    try:
        return read_node_list(found)
    except (ConfigError, DataError) as error:
        raise UsageError(f"SLURM_STEP_NODELIST cannot be read: {error.what}", fix) from None
