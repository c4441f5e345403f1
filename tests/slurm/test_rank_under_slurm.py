"""srun clusterrun --under slurm: the ranks of a real step meet at the addresses and ports that each has computed."""

from __future__ import annotations

import shutil
from pathlib import Path

import clustertool
from tests.lab.lab import LabError
from tests.slurm.slurm_site import SlurmSite

# Each rank listens on its endpoint; rank 0 also at the master, where the others report themselves.
PROGRAM = """
import os, socket
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
own = socket.create_server(("", int(os.environ["PADDLE_PORT"])))
master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank:
    for _ in range(100):
        try:
            with socket.create_connection(master, timeout=10) as link:
                link.sendall(os.environ["PADDLE_CURRENT_ENDPOINT"].encode())
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.1)
else:
    found = [os.environ["PADDLE_CURRENT_ENDPOINT"]]
    with socket.create_server(("", master[1])) as server:
        server.settimeout(20)
        while len(found) < world:
            found.append(server.accept()[0].makefile().read())
    print(sorted(found) == sorted(os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")), *found[:1], world)
"""


def test_the_ranks_of_a_step_meet(queue: SlurmSite) -> None:
    here = queue.shared / "code"
    shutil.copytree(
        Path(clustertool.__file__).parent, here / "clustertool", ignore=shutil.ignore_patterns("__pycache__")
    )
    (queue.shared / "meet.py").write_text(PROGRAM)
    clusterrun = [
        "env",
        "PYTHONPATH=code",
        "python3",
        "-S",
        "-m",
        "clustertool.cli.launchers.rank_program",
        "--under",
        "slurm",
    ]
    out = queue.lab.slurm("srun", "-N2", "-n3", "-c1", *clusterrun, "--start-port=7000", "meet.py")
    assert [line for line in out.splitlines() if "srun" not in line] == ["True node0:7000 3"]
    try:
        queue.lab.slurm("srun", "-N2", "-n4", "-c1", "--distribution=cyclic", *clusterrun, "meet.py")
        raise AssertionError("the tasks were numbered across the nodes, and started")
    except LabError as error:
        assert "exit code 64" in str(error) and "add --distribution=block to srun" in str(error)
