"""Read a rank's place from the variables that its MPI launcher sets: Open MPI, the Hydra of MPICH and its relatives, PMIx."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional

from clustertool.errors import UsageError
from clustertool.model.quantities import whole

_MOST = 99999
_FIX = "start it by mpirun"


class RankVariables(NamedTuple):
    """The place of a process among the ranks of its mpirun. None: the launcher does not state it.

    local_rank, local_size: among the ranks of the same node. launcher: "Open MPI", "MPICH" or "PMIx".
    """

    rank: int
    size: Optional[int]
    local_rank: Optional[int]
    local_size: Optional[int]
    launcher: str


class _Names(NamedTuple):
    """The variables of one family of launchers; "" for what it has no variable for."""

    launcher: str
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


_OPEN_MPI = _Names(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# MPICH 4 and 5, Intel MPI and MVAPICH2 have the same process manager. srun --mpi=pmi2 sets the first two only.
_MPICH = _Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMIX = _Names("PMIx", "PMIX_RANK")


def rank_variables(environ: Mapping[str, str]) -> RankVariables:
    """Read the rank, its local rank and their numbers from the variables of the launcher that has started this process.

    Of Open MPI, MPICH and PMIx it is the first that has set a local rank, else the first that has set a rank. Raises UsageError
    if none has, for a value that is no number or a rank that is not below the size, and if two with a local rank contradict
    each other: one has started the other.
    """
    found = tuple(_place_stated(environ, names) for names in (_OPEN_MPI, _MPICH, _PMIX) if environ.get(names.rank))
    if not found:
        names = f"{_OPEN_MPI.rank}, {_MPICH.rank} and {_PMIX.rank}"
        raise UsageError(f"{names} are not set: no mpirun has started this process", _FIX)
    complete = [one for one in found if one.local_rank is not None]
    if len({one[:4] for one in complete}) > 1:
        raise _contradiction(complete[0], complete[1])
    return (complete or found)[0]


def _contradiction(first: RankVariables, second: RankVariables) -> UsageError:
    """Build the error for two launchers that state different ranks."""
    stated = " and ".join(f"{one.launcher} states rank {one.rank} of {one.size}" for one in (first, second))
    fix = "do not start one mpirun from a rank of another, or remove the variables of the outer one: "
    fix += f"env -u {_OPEN_MPI.rank}, or env -u {_MPICH.rank}"
    return UsageError(f"two launchers have set the rank: {stated}", fix)


def _place_stated(environ: Mapping[str, str], names: _Names) -> RankVariables:
    """Read and check the variables of one launcher.

    Raises UsageError without a rank, for a text that is no number, and for a rank that is not below its size.
    """
    rank, size, local_rank, local_size = (_number_stated(environ, name) for name in names[1:])
    if rank is None:
        raise UsageError(f"{names.rank} is not set", _FIX)
    for value, limit, (low, high) in (
        (rank, size, (names.rank, names.size)),
        (local_rank, local_size, (names.local_rank, names.local_size)),
    ):
        if value is not None and limit is not None and value >= limit:
            raise UsageError(f"{low} is {value}, and {high} is {limit}", _FIX)
    return RankVariables(rank, size, local_rank, local_size, names.launcher)


def _number_stated(environ: Mapping[str, str], name: str) -> Optional[int]:
    """Return the number in a variable; None if it is not set. Raises UsageError for another text."""
    text = environ.get(name, "") if name else ""
    if not text:
        return None
    value = whole(text, 0, _MOST)
    if value is None:
        raise UsageError(f"{name} is {text!r}, no number", _FIX)
    return value
