"""srun sets these variables for each task of a step (srun(1), OUTPUT ENVIRONMENT VARIABLES)."""

from __future__ import annotations

from typing import List, Mapping

from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.model.quantities import whole
from clustertool.model.slurm.slurm_answers import read_node_list

_MOST = 99999


def text(environ: Mapping[str, str], name: str, fix: str) -> str:
    """Return the value of a variable that srun sets. Raises UsageError with this fix if it is not set: this is no step."""
    found = environ.get(name, "")
    if not found:
        raise UsageError(f"{name} is not set: no step of Slurm has started this process", fix)
    return found


def number(environ: Mapping[str, str], name: str, fix: str) -> int:
    """Return the value of a variable that srun sets as a number.

    Raises UsageError with this fix if it is not set, or no number from 0 to 99,999.
    """
    found = text(environ, name, fix)
    value = whole(found, 0, _MOST)
    if value is None:
        raise UsageError(f"{name} is {found!r}, no number", fix)
    return value


def node_names(environ: Mapping[str, str], fix: str) -> List[str]:
    """Return the names of the step's nodes.

    Raises UsageError with this fix if their variable is not set, or no list of nodes.
    """
    found = text(environ, "SLURM_STEP_NODELIST", fix)
    try:
        return read_node_list(found)
    except (ConfigError, DataError) as error:
        raise UsageError(f"SLURM_STEP_NODELIST cannot be read: {error.what}", fix) from None
