"""Elastic jobs in the modes ps and mpi: what a lost node, a failed process and exit code 101 change."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests import mpi
from tests.node.harness import read, until
from tests.node.joining import JoinBench, Machine, codes, start
from tests.node.test_epochs import elastic, end

# A pserver listens. A process prints its part in the epoch, ends with a code if that is its order, and waits otherwise.
PS = """
import json, os, socket, sys, time
env = os.environ
role, epoch = env["TRAINING_ROLE"].lower(), env["CLUSTERTOOL_ATTEMPT"]
name = role + env["CLUSTERTOOL_RANK"]
if role == "pserver":
    listener = socket.create_server((env["POD_IP"], int(env["PADDLE_PORT"])))
servers = env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
shards = [line.rpartition("-")[2] for line in open(env["CLUSTERTOOL_SHARDS"]).read().split()] if role == "trainer" else []
print("epoch", epoch, name, "pservers", len(servers), "trainers", env["PADDLE_TRAINERS_NUM"], *shards, flush=True)
if role == "trainer":
    for server in servers:
        socket.create_connection(server.rsplit(":", 1)).close()
order = json.loads(sys.argv[1])
if epoch in order.get(name, {}):
    sys.exit(order[name][epoch])
time.sleep(600)
"""
MPI = (
    "echo epoch $CLUSTERTOOL_ATTEMPT rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE world $WORLD_SIZE; "
    "[ $CLUSTERTOOL_ATTEMPT$OMPI_COMM_WORLD_RANK = {order} ] && exit {code}; exec sleep 600"
)
FAST = {"loss_timeout": 3.0}  # seconds


def ps(bench: JoinBench, count: int, order: str = "{}", **options: Any) -> list[Machine]:
    """Machines of a job in mode ps, with a pserver and a trainer each. order: {"trainer0": {"EPOCH": CODE}}."""
    folder = bench.tmp / "files"
    folder.mkdir(exist_ok=True)
    for shard in range(6):
        (folder / f"part-{shard}").touch()
    given = {"shards": {"files": ["part-*"]}, "policy": {"max_restarts": options.pop("restarts", 0)}}
    command = (sys.executable, "-c", PS, order)
    return bench.job(count, command, cluster=FAST, toml=given, folder=folder, options={"mode": "ps"}, **options)


def part(machine: Machine, epoch: int, name: str, text: str) -> None:
    """A process has printed its part in an epoch."""
    kind = {"pserver": "serverlog", "trainer": "workerlog"}[name[:-1]]
    log = machine.job_dir / "log" / (f"attempt{epoch}" if epoch else "") / f"{kind}.{name[-1]}"
    wanted = f"epoch {epoch} {name} {text}\n"
    until(lambda: read(str(log)).decode() == wanted, f"{log}: {wanted} {read(str(log))!r} {machine.lines}", 40.0)


def epoch_event(machine: Machine, attempt: int) -> dict[str, Any]:
    (found,) = (event for event in machine.events("epoch") if event["attempt"] == attempt)
    return found


def test_a_lost_pserver_starts_an_epoch_of_those_that_are_left(join_bench: JoinBench) -> None:
    """Each node has a pserver and a trainer. All have other endpoints and shards after that."""
    machines = start(elastic(ps(join_bench, 3), 2, 3))
    for rank, machine in enumerate(machines):
        part(machine, 0, f"pserver{rank}", "pservers 3 trainers 3")
        part(machine, 0, f"trainer{rank}", f"pservers 3 trainers 3 {rank} {rank + 3}")
    machines[1].signal(signal.SIGKILL)
    for rank, machine in enumerate((machines[0], machines[2])):
        part(machine, 1, f"pserver{rank}", "pservers 2 trainers 2")
        part(machine, 1, f"trainer{rank}", f"pservers 2 trainers 2 {rank} {rank + 2} {rank + 4}")
    assert epoch_event(machines[0], 1)["left"] == [[1, "lost"]]
    end([machines[0], machines[2]])


@pytest.mark.chaos
def test_a_pserver_that_fails_counts_for_max_restarts(join_bench: JoinBench) -> None:
    """Its node is there. 101 counts for nothing, also of a pserver."""
    order = '{"pserver1": {"0": 101, "1": 9, "2": 9}}'
    machines = start(elastic(ps(join_bench, 2, order, restarts=1), 2, 2))
    assert codes(machines) == [9, 9], [one.lines for one in machines]
    assert "asks to be started again (exit code 101)" in epoch_event(machines[0], 1)["cause"]
    assert [event["attempt"] for event in machines[0].events("epoch")] == [0, 1]
    assert [event["attempt"] for event in machines[0].events("restart")] == [2]


def with_roles(machines: list[Machine], *roles: str) -> list[Machine]:
    for machine, role in zip(machines, roles):
        machine.join = replace(machine.join, own=replace(machine.join.own, roles=((role, None),)))
    return machines


def test_the_only_pserver_is_lost_and_comes_back(join_bench: JoinBench) -> None:
    """Nodes with one role each, as HOSTS may give them: without a pserver the job waits for it."""
    machines = with_roles(elastic(ps(join_bench, 3), 1, 3), "trainer", "pserver", "trainer")
    start(machines)
    part(machines[1], 0, "pserver0", "pservers 1 trainers 2")
    part(machines[2], 0, "trainer1", "pservers 1 trainers 2 1 3 5")
    machines[1].signal(signal.SIGKILL)
    until(lambda: machines[0].events("epoch-ended"), "the epoch ends")
    machines[1].wait()
    machines[1].start()
    part(machines[1], 1, "pserver0", "pservers 1 trainers 2")
    part(machines[2], 1, "trainer1", "pservers 1 trainers 2 1 3 5")
    end(machines)


@pytest.mark.chaos
def test_without_any_pserver_the_job_ends(join_bench: JoinBench) -> None:
    machines = with_roles(elastic(ps(join_bench, 3), 1, 3, timeout=8.0), "trainer", "pserver", "trainer")
    start(machines)
    part(machines[2], 0, "trainer1", "pservers 1 trainers 2 1 3 5")
    machines[1].signal(signal.SIGKILL)
    assert codes([machines[0], machines[2]]) == [75, 75], [one.lines for one in machines]
    assert "no host is left to run a pserver" in machines[0].error


def by_mpirun(bench: JoinBench, count: int, order: str = "none", code: int = 0, restarts: int = 0) -> list[Machine]:
    """Machines of a job in mode mpi. order: epoch and rank that end with the code."""
    mpi.demand(mpi.OPENMPI)
    home = bench.tmp / "programs"
    home.mkdir()
    mpi.OPENMPI.put_into(home)
    prelude = "\n".join(mpi.OPENMPI.prelude(home, python=False))
    command = MPI.format(order=order, code=code)
    options = {"mode": "mpi", "max_restarts": str(restarts)}
    return bench.job(count, command, cluster={**FAST, "prelude": prelude}, options=options)


def rank_of_mpi(machine: Machine, epoch: int, rank: int, world: int) -> None:
    log = machine.job_dir / "log" / (f"attempt{epoch}" if epoch else "") / f"workerlog.{rank}"
    wanted = f"epoch {epoch} rank {rank} of {world} world {world}"
    until(lambda: wanted in read(str(log)).decode(), f"{log}: {wanted} {read(str(log))!r} {machine.lines}", 40.0)


def test_mpirun_runs_on_the_nodes_that_are_left(join_bench: JoinBench) -> None:
    """Their numbers in the job have a gap, and those of mpirun have none."""
    machines = start(elastic(by_mpirun(join_bench, 3), 2, 3))
    for rank, machine in enumerate(machines):
        rank_of_mpi(machine, 0, rank, 3)
    machines[1].signal(signal.SIGKILL)
    rank_of_mpi(machines[0], 1, 0, 2)
    rank_of_mpi(machines[2], 1, 1, 2)
    event = epoch_event(machines[0], 1)
    assert (event["nodes"], event["left"]) == ([0, 2], [[1, "lost"]])
    assert "is lost" in event["cause"], event
    end([machines[0], machines[2]])


@pytest.mark.chaos
def test_a_rank_of_mpirun_asks_to_be_started_again(join_bench: JoinBench) -> None:
    machines = start(elastic(by_mpirun(join_bench, 2, "01", 101), 2, 2))
    for rank, machine in enumerate(machines):
        rank_of_mpi(machine, 1, rank, 2)
    assert "asks to be started again (exit code 101)" in epoch_event(machines[0], 1)["cause"]
    end(machines)


@pytest.mark.chaos
def test_a_failed_rank_of_mpirun_counts(join_bench: JoinBench) -> None:
    machines = start(elastic(by_mpirun(join_bench, 2, "01", 7, restarts=1), 2, 2))
    for rank, machine in enumerate(machines):
        rank_of_mpi(machine, 1, rank, 2)
    assert [event["attempt"] for event in machines[0].events("epoch")] == [0]
    end(machines)
