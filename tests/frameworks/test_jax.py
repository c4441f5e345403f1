"""JAX in a job of Slurm: the call of docs/slurm.md takes the ranks for the world, and the detection of JAX 0.5 does not."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from clustertool.node.supervisor.rank_process import allocation_variables
from tests.cli import REPO
from tests.frameworks.examples import find_venv
from tests.free_ports import free_port

TASK = {
    "SLURM_JOB_ID": "812",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "node1",
}
SHOWS = "print(jax.process_index(), jax.process_count(), jax.device_count(), flush=True)\n"


def documented() -> str:
    """The call of the page."""
    found = re.search(r"```python\n(import os, jax\n.*?)```", (REPO / "docs/slurm.md").read_text(), re.S)
    assert found
    return found[1]


def both(program: str) -> list[tuple[int, str]]:
    """The exit codes and the output of two ranks of a job in Slurm on this machine."""
    python = find_venv("mpi-allreduce+jax") / "bin/python"
    port = str(free_port())
    started = []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**allocation_variables({**os.environ, **TASK}), **variables, "JAX_PLATFORMS": "cpu"}
        started.append(
            subprocess.Popen(
                [python, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs)]


@pytest.mark.frameworks
def test_the_documented_call_takes_the_ranks_for_the_world() -> None:
    found = both(documented() + SHOWS)
    assert [(code, output.strip().splitlines()[-1]) for code, output in found] == [(0, "0 2 2"), (0, "1 2 2")], found


@pytest.mark.frameworks
def test_the_detection_misses_the_variables_of_a_task() -> None:
    """If this fails, JAX has changed, and the page does not need the call."""
    program = documented().replace('    cluster_detection_method="deactivate",\n', "")
    assert all(code and "KeyError: 'SLURM_LOCALID'" in output for code, output in both(program))
