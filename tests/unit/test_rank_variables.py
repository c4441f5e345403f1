"""The place of a rank, as each MPI launcher states it."""

from __future__ import annotations

import pytest

from clustertool.errors import UsageError
from clustertool.model.mpi.rank_variables import RankVariables, rank_variables


def open_mpi(rank: object, size: object, local_rank: object, local_size: object) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{name}": str(n) for name, n in zip(names, (rank, size, local_rank, local_size))}


def mpich(rank: object, size: object, local_rank: object, local_size: object) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return {name: str(n) for name, n in zip(names, (rank, size, local_rank, local_size))}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (open_mpi(3, 4, 1, 2), RankVariables(3, 4, 1, 2, "Open MPI")),
        (mpich(3, 4, 1, 2), RankVariables(3, 4, 1, 2, "MPICH")),
        # Open MPI states the rank by PMIX_RANK, too.
        ({**open_mpi(3, 4, 1, 2), "PMIX_RANK": "3"}, RankVariables(3, 4, 1, 2, "Open MPI")),
        ({"PMIX_RANK": "3"}, RankVariables(3, None, None, None, "PMIx")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, RankVariables(3, 4, None, None, "MPICH")),
        # mpirun in a step of srun --mpi=pmi2, which has set its own variables for the one task of the step.
        ({**open_mpi(3, 4, 1, 2), "PMI_RANK": "0", "PMI_SIZE": "1"}, RankVariables(3, 4, 1, 2, "Open MPI")),
        ({**mpich(3, 4, 1, 2), "PMIX_RANK": "0"}, RankVariables(3, 4, 1, 2, "MPICH")),
        ({**open_mpi(0, 1, 0, 1), **mpich(0, 1, 0, 1)}, RankVariables(0, 1, 0, 1, "Open MPI")),
    ],
)
def test_the_place_of_a_rank(environ: dict[str, str], place: RankVariables) -> None:
    assert rank_variables(environ) == place


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({}, "OMPI_COMM_WORLD_RANK, PMI_RANK and PMIX_RANK are not set: no mpirun has started this process"),
        ({"PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "are not set"),
        (open_mpi("x", 4, 1, 2), "OMPI_COMM_WORLD_RANK is 'x', no number"),
        (open_mpi(-1, 4, 1, 2), "OMPI_COMM_WORLD_RANK is '-1', no number"),
        (mpich(1, "100000", 1, 2), "PMI_SIZE is '100000', no number"),
        ({"PMIX_RANK": "4294967295"}, "PMIX_RANK is '4294967295', no number"),
        (open_mpi(4, 4, 1, 2), "OMPI_COMM_WORLD_RANK is 4, and OMPI_COMM_WORLD_SIZE is 4"),
        (mpich(3, 4, 2, 2), "MPI_LOCALRANKID is 2, and MPI_LOCALNRANKS is 2"),
        (
            {**open_mpi(0, 1, 0, 1), **mpich(1, 2, 1, 2)},
            "two launchers have set the rank: Open MPI states rank 0 of 1 and MPICH states rank 1 of 2",
        ),
        ({**open_mpi(0, 4, 0, 4), **mpich(0, 2, 0, 2)}, "two launchers have set the rank"),
    ],
)
def test_a_place_that_cannot_be_known(environ: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        rank_variables(environ)
    assert what in caught.value.what and caught.value.fix
