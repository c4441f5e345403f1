"""PyTorch as ranks of a bare mpirun on three hosts: clusterrun --under mpi gives torch.distributed what it reads."""

from __future__ import annotations

import pytest

from tests.frameworks.examples import TIMEOUT, find_venv
from tests.lab.conftest import module_lab
from tests.lab.test_under_mpi import MPICH, NODES, OPEN_MPI, RANK, MpiHosts, hosts, slots

__all__ = ["hosts", "module_lab"]  # fixtures: three hosts that reach each other by ssh

# One all-reduce with gloo, which connects each rank with each other.
REDUCE = """
import os, torch, torch.distributed
torch.distributed.init_process_group("gloo")
found = torch.tensor([torch.distributed.get_rank() + 1])
torch.distributed.all_reduce(found)
mpi = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
same = torch.distributed.get_rank() == int(mpi)
print(f"{same} {torch.distributed.get_world_size()} {int(found)}\\n", end="")
torch.distributed.destroy_process_group()
"""


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("mpirun", "addresses"),
    [
        pytest.param(OPEN_MPI, ("--hosts", "H"), id="openmpi-hosts"),
        pytest.param(MPICH, ("--master", "node0"), id="mpich-master"),
        pytest.param(OPEN_MPI, ("--master", "node0"), id="openmpi-master", marks=pytest.mark.chaos),
        pytest.param(MPICH, ("--hosts", "H"), id="mpich-hosts", marks=pytest.mark.chaos),
    ],
)
def test_gloo_connects_the_ranks_of_mpirun(hosts: MpiHosts, mpirun: list[str], addresses: tuple[str, str]) -> None:
    python = str(find_venv("digits-torch") / "bin/python")
    hosts.write(reduce=REDUCE, H=slots(mpirun, 2))
    program = [*RANK, *addresses, "--no-python", python, "reduce.py"]
    done = hosts.lab.exec(0, [*mpirun, "-hostfile", "H", "-n", str(2 * NODES), *program], timeout=TIMEOUT)
    assert done.stdout.splitlines() == ["True 6 21"] * 6, done.stderr
