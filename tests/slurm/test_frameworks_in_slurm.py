"""Packages that know Slurm or a launcher take the ranks of a job in Slurm for the world (docs/decisions/0075)."""

from __future__ import annotations

import re

import pytest

from tests import mpi
from tests.frameworks.examples import TIMEOUT, activate, find_venv
from tests.slurm.engine_runs import SLURM, use
from tests.slurm.slurm_site import SlurmSite

NODES, EACH = 2, 2
TORCH, BOTH = "digits-torch", "digits-torch+lightning"
# Each prints: rank, world, rank on its node, and the sum of all ranks by a collective operation of the package.
PROGRAMS = {
    "torch": """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
print("world", dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], int(total), flush=True)
dist.destroy_process_group()
""",
    "accelerate": """
import torch
from accelerate import Accelerator
one = Accelerator(cpu=True)
total = int(one.gather(torch.tensor([one.process_index])).sum())
print("world", one.process_index, one.num_processes, one.local_process_index, total, flush=True)
one.end_training()
""",
    "lightning": """
import torch
from lightning.fabric import Fabric
one = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp")
one.launch()
total = int(one.all_reduce(torch.tensor(float(one.global_rank)), reduce_op="sum"))
print("world", one.global_rank, one.world_size, one.local_rank, total, flush=True)
torch.distributed.destroy_process_group()
""",
    "trainer": """
import torch
from lightning.pytorch import LightningModule, Trainer
class Sums(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
one = Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp", max_epochs=1, **quiet)
one.fit(Sums())
total = int(one.strategy.reduce(torch.tensor(float(one.global_rank)), reduce_op="sum"))
print("world", one.global_rank, one.world_size, one.local_rank, total, flush=True)
torch.distributed.destroy_process_group()
""",
    "mpi4py": """
from mpi4py import MPI
world = MPI.COMM_WORLD
own = world.Split_type(MPI.COMM_TYPE_SHARED)
print("world", world.rank, world.size, own.rank, world.allreduce(world.rank), flush=True)
""",
}


def worlds(site: SlurmSite, name: str, prelude: str, *options: object) -> list[str]:
    """What the ranks of a job of 2 x 2 print, in their order."""
    site.workspace(train_py=PROGRAMS[name])
    use(site, SLURM, prelude)
    given = ("--nnodes", NODES, "--nproc-per-node", EACH, "--all-ranks", *options)
    done = site.inv("run", "--workspace", "job", *given, timeout=TIMEOUT).ends(0)
    return sorted(re.findall(r"world (\d.*\d)", done.out))


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "venv"), [("torch", TORCH), ("accelerate", BOTH), ("lightning", BOTH), ("trainer", BOTH)]
)
def test_it_takes_the_ranks_for_the_world(queue: SlurmSite, name: str, venv: str) -> None:
    found = worlds(queue, name, activate(find_venv(venv)))
    assert found == ["0 4 0 6", "1 4 1 6", "2 4 0 6", "3 4 1 6"]


@pytest.mark.engines
@pytest.mark.parametrize("kind", mpi.BOTH, ids=lambda kind: kind.name)
def test_mpi_takes_the_ranks_for_the_world(queue: SlurmSite, kind: mpi.Mpi) -> None:
    """In mode mpi. In a job of another mode each rank is a world of its own: MPI sees no step of Slurm, and waits for none."""
    mpi.demand(kind)
    kind.put_into(queue.shared)
    prelude = "\n".join(kind.prelude())
    assert worlds(queue, "mpi4py", prelude, "--mode", "mpi") == ["0 4 0 6", "1 4 1 6", "2 4 0 6", "3 4 1 6"]
    assert worlds(queue, "mpi4py", prelude) == ["0 1 0 0"] * 4
