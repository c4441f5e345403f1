"""mpirun clusterrun --under mpi, over ssh on three hosts: the ranks meet at the addresses and ports that each has computed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.lab import HOME, REPO, Lab

NODES = 2
SECONDS = 120  # of one mpirun: it takes 2
RANK = ["env", f"PYTHONPATH={REPO}", "PYTHONDONTWRITEBYTECODE=1"]
RANK += ["python3", "-S", "-m", "clustertool.cli.launchers.rank_program", "--under", "mpi"]
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none"]
MPICH = ["mpirun.mpich", "-launcher", "ssh"]

# Each rank listens on its endpoint, if it has one; rank 0 also at the master, where the others report themselves.
MEET = """
import os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
mpi = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
own = os.environ.get("PADDLE_CURRENT_ENDPOINT") or mpi
if ":" in own:
    listening = socket.create_server(("", int(own.rpartition(":")[2])))
master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank:
    for _ in range(300):
        try:
            with socket.create_connection(master, timeout=10) as link:
                link.sendall(own.encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
else:
    found = [own]
    with socket.create_server(("", master[1])) as server:
        server.settimeout(60)
        while len(found) < world:
            found.append(server.accept()[0].makefile().read())
    expected = os.environ.get("PADDLE_TRAINER_ENDPOINTS", ",".join(map(str, range(world))))
    print(sorted(found) == sorted(expected.split(",")), mpi == "0", os.uname().nodename, world, *sorted(found))
"""

# A pserver adds one number of each trainer, and each trainer compares the sums of all pservers.
TRAIN = """
import os, socket, time
role, trainers = os.environ["TRAINING_ROLE"], int(os.environ["PADDLE_TRAINERS_NUM"])
servers = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
if role == "PSERVER":
    assert os.environ["POD_IP"] + ":" + os.environ["PADDLE_PORT"] in servers
    with socket.create_server(("", int(os.environ["PADDLE_PORT"]))) as server:
        server.settimeout(60)
        links = [server.accept()[0] for _ in range(trainers)]
        total = sum(int(link.recv(9)) for link in links)
        for link in links:
            link.sendall(str(total).encode())
else:
    found = []
    for server in servers:
        host, port = server.split(":")
        for _ in range(300):
            try:
                link = socket.create_connection((host, int(port)), timeout=60)
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        link.sendall(str(int(os.environ["PADDLE_TRAINER_ID"]) + 1).encode())
        found.append(link)
    sums = " ".join(link.recv(9).decode() for link in found)
    print(f"trainer {os.environ['PADDLE_TRAINER_ID']} {sums}\\n", end="")  # one write: MPICH mixes the output of ranks
"""

# The form of Paddle's script for Open MPI: mpirun starts it once on each node, and it starts a pserver and a trainer there.
SCRIPT = """#!/bin/bash
port=7164
nohup paddle pserver --port=$port --num_gradient_servers=$OMPI_COMM_WORLD_SIZE >logs/pserver.log 2>&1 &
pserver=$!
clusterrun --under mpi --hosts machines --server-num 1 train.py >logs/train.log 2>&1
code=$?
kill $pserver
exit $code
"""
# Stands in for the pserver of Paddle 0.10, a program of that time.
PADDLE = """
import socket, sys
given = dict(argument.lstrip("-").split("=") for argument in sys.argv[2:])
with socket.create_server(("", int(given["port"]))) as server:
    links = [server.accept()[0] for _ in range(int(given["num_gradient_servers"]))]
    total = sum(int(link.recv(9)) for link in links)
    for link in links:
        link.sendall(str(total).encode())
    server.accept()  # until it is killed
"""
# Reads what Paddle's v2 API reads.
TRAIN_V2 = """
import os, socket, time
hosts, port = os.environ["PADDLE_INIT_PSERVERS"].split(","), int(os.environ["PADDLE_INIT_PORT"])
trainer, trainers = os.environ["PADDLE_INIT_TRAINER_ID"], os.environ["PADDLE_INIT_NUM_GRADIENT_SERVERS"]
links = []
for host in hosts:
    for _ in range(300):
        try:
            links.append(socket.create_connection((host, port), timeout=60))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
for link in links:
    link.sendall(str(int(trainer) + 1).encode())
print("trainer", trainer, "of", trainers, *(link.recv(9).decode() for link in links))
"""


class MpiHosts:
    """Two hosts that reach each other by ssh, with the same files."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def write(self, **files: str) -> None:
        """Files of the home folder of each host: `train="..."` is train.py."""
        for node in range(NODES):
            for name, text in files.items():
                path = self.lab.home(node) / (name if name in ("H", "machines") else f"{name}.py")
                path.write_text(text)

    def run(self, argv: list[str], node: int = 0) -> subprocess.CompletedProcess[str]:
        return self.lab.exec(node, argv, timeout=SECONDS)


@pytest.fixture(scope="module")
def hosts(module_lab: Callable[..., Lab]) -> Iterator[MpiHosts]:
    """DEMAND_ENGINES=1: fail where MPI is not installed."""
    missing = [program for program in (OPEN_MPI[0], MPICH[0]) if not shutil.which(program)]
    if missing and os.environ.get("DEMAND_ENGINES") == "1":
        pytest.fail(f"DEMAND_ENGINES=1, but no {', '.join(missing)} here")
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: scripts/engine-packages.sh installs them")
    yield MpiHosts(module_lab(NODES, installed=False, mutual_ssh=True, acquainted=True))


def slots(mpirun: list[str], number: int) -> str:
    """A hostfile in the form of this launcher."""
    form = "node{} slots={}\n" if mpirun is OPEN_MPI else "node{}:{}\n"
    return "".join(form.format(node, number) for node in range(NODES))


# test_the_order_of_the_hosts_is_that_of_mpirun has one with MPICH.
@pytest.mark.parametrize("mpirun", [OPEN_MPI, pytest.param(MPICH, marks=pytest.mark.chaos)], ids=["openmpi", "mpich"])
def test_the_ranks_of_mpirun_meet(hosts: MpiHosts, mpirun: list[str]) -> None:
    hosts.write(meet=MEET, H=slots(mpirun, 2))
    first = [f"node{node}:{7000 + number}" for node in range(NODES) for number in range(2)]
    done = hosts.run([*mpirun, "-hostfile", "H", "-n", "4", *RANK, "--hosts", "H", "--start-port", "7000", "meet.py"])
    assert done.stdout.split() == ["True", "True", "node0", "4", *first], done.stderr
    done = hosts.run([*mpirun, "-hostfile", "H", "-n", "3", *RANK, "--master", "node0", "meet.py"])
    assert done.stdout.split() == ["True", "True", "node0", "3", *map(str, range(3))], done.stderr


@pytest.mark.parametrize("mpirun", [OPEN_MPI, pytest.param(MPICH, marks=pytest.mark.chaos)], ids=["openmpi", "mpich"])
def test_some_ranks_of_each_node_are_pservers(hosts: MpiHosts, mpirun: list[str]) -> None:
    hosts.write(train=TRAIN, H=slots(mpirun, 3))
    roles = ["--server-num", "1", "--worker-num", "2"]
    done = hosts.run([*mpirun, "-hostfile", "H", "-n", "6", *RANK, "--hosts", "H", *roles, "train.py"])
    assert sorted(done.stdout.splitlines()) == [f"trainer {n} 10 10" for n in range(4)], done.stderr


def test_the_order_of_the_hosts_is_that_of_mpirun(hosts: MpiHosts) -> None:
    """Open MPI 4 numbers the ranks of the host first on which mpirun runs. MPICH keeps the order of the file."""
    hosts.write(meet=MEET, H=slots(OPEN_MPI, 2))
    done = hosts.run([*OPEN_MPI, "-hostfile", "H", "-n", "4", *RANK, "--hosts", "H", "meet.py"], node=1)
    assert done.returncode == 64 and not done.stdout
    assert "by --hosts this rank is on node0, but mpirun has put it on node1" in done.stderr
    assert "put the host on which mpirun runs at the top of it" in done.stderr
    across = hosts.run([*OPEN_MPI, "-hostfile", "H", "--map-by", "node", "-n", "4", *RANK, "--hosts", "H", "meet.py"])
    assert across.returncode == 64 and "on its node; by --hosts it has place" in across.stderr
    hosts.write(H=slots(MPICH, 2))
    done = hosts.run([*MPICH, "-f", "H", "-n", "4", *RANK, "--hosts", "H", "meet.py"], node=1)
    assert done.stdout.split()[:4] == ["True", "True", "node0", "4"], done.stderr


@pytest.mark.chaos
def test_the_exit_code_is_that_of_the_program(hosts: MpiHosts) -> None:
    hosts.write(
        H=slots(OPEN_MPI, 1), train="import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    done = hosts.run([*OPEN_MPI, "-hostfile", "H", "-n", "2", *RANK, "--hosts", "H", "train.py"])
    assert done.returncode == 7, done.stderr


def test_the_old_start_script_runs_with_one_line_changed(hosts: MpiHosts) -> None:
    """One rank on each node, which starts a pserver and then becomes a trainer; the file has addresses without slots."""
    hosts.write(train=TRAIN_V2, machines="".join(f"{hosts.lab.address(node)}\n" for node in range(NODES)))
    programs = {
        "paddle": f"#!/usr/bin/env python3{PADDLE}",
        "clusterrun": f'#!/bin/sh\nexec {" ".join(RANK[:-2])} "$@"\n',
        "start.sh": SCRIPT,
    }
    for node in range(NODES):
        home = hosts.lab.home(node)
        for folder in ("bin", "logs"):
            (home / folder).mkdir(exist_ok=True)
        for name, text in programs.items():
            (home / "bin" / name).write_text(text)
            (home / "bin" / name).chmod(0o755)
    path = f"PATH={HOME}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = hosts.run([*OPEN_MPI, "-x", path, "-hostfile", "machines", "--map-by", "ppr:1:node", f"{HOME}/bin/start.sh"])
    logs = [(hosts.lab.home(node) / "logs/train.log").read_text() for node in range(NODES)]
    assert (done.returncode, logs) == (0, [f"trainer {n} of 2 3 3\n" for n in range(NODES)]), done.stderr
    left = [process.argv for node in range(NODES) for process in hosts.lab.processes(node) if "pserver" in process.argv]
    assert not left
