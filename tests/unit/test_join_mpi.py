"""Unit tests of mode mpi for machines that join: what they ask of themselves, and the plan that the coordinator makes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from clustertool.errors import ClustertoolError
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Facts, Identity
from clustertool.model.finding import Seen
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings
from clustertool.model.joining.join_plan import Arrival, cluster_of, facts_of, plan_of, probe_of, specs
from clustertool.model.planning.plan import Plan

OPEN_MPI = "mpirun (Open MPI) 4.1.4"


def join_file(mode: str = "mpi", engine: str = "slurm") -> JoinFile:
    cluster = read_cluster({"HOSTS": ["10.0.0.1"], "ENV": {"A": "conf"}, "PRELUDE": "module load openmpi"})
    toml = {"trainer": {"command": ["./prog"]}, "env": {"B": "toml"}}
    job = read_job(cluster, toml, Options(mode=mode))
    point = MeetingPoint("10.0.0.1", 29500)
    return JoinFile("1", "0" * 32, Identity("J1", token="t"), cluster, job, 2, point, engine=engine)


def planned(*versions: str) -> tuple[Plan, list[Arrival]]:
    join = join_file()
    arrivals = [Arrival(f"box{node}", f"10.0.0.{node + 1}", OwnSettings()) for node in range(len(versions))]
    facts = {}
    for node, version in enumerate(versions):
        answer = {
            **asdict(Facts(node, address=f"10.0.0.{node + 1}", root="/r", boot_id=str(node), disk_free=1 << 40)),
            "busy": [],
        }
        answer = {name: list(value) if isinstance(value, tuple) else value for name, value in answer.items()}
        facts[node] = facts_of(node, {**answer, "mpirun": version, "mpi_daemons": ["orted"]}, 29500)
    return plan_of(join, cluster_of(join, arrivals, 29500), arrivals, facts, Seen()), arrivals


def test_a_machine_asks_itself_for_its_mpi() -> None:
    own = OwnSettings(root_dir="/r", env=(("C", "own"),), first_path="/opt/bin")
    asked = probe_of(join_file(), own, "10.0.0.1")["mpi"]
    assert asked["env"] == {"A": "conf", "B": "toml", "C": "own"} and asked["prelude"] == "module load openmpi"
    assert (asked["first_path"], asked["engine"]) == ("/opt/bin", "slurm") and "orted" in asked["packages"]
    other = probe_of(join_file(), replace(own, prelude="module load mpich", interface="ib0"), "10.0.0.1")
    assert (other["mpi"]["prelude"], other["nic"]) == ("module load mpich", "ib0")
    assert "mpi" not in probe_of(join_file("collective"), own, "10.0.0.1")


def test_the_coordinator_plans_mpirun() -> None:
    made, arrivals = planned(OPEN_MPI, OPEN_MPI)
    assert {(process.role, process.node) for process in made.processes if process.launches} == {
        *[("mpirun", 0), ("mpidaemon", 0), ("mpidaemon", 1)]
    }
    found = specs(made, arrivals, "slurm")
    assert found[0]["hostfile"] == "240.0.0.1 slots=1\n240.0.0.2 slots=1\n" and found[1]["launcher"] == "mpirun"


def test_different_versions_end_the_joining() -> None:
    with pytest.raises(ClustertoolError, match="Open MPI 4.1.6, node 0 has Open MPI 4.1.4"):
        planned(OPEN_MPI, "mpirun (Open MPI) 4.1.6")
