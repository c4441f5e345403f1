"""What --dry shows of a job in Slurm: the plan on nodes that stand for those that Slurm chooses."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.engines.job_request import RunRequest, RunWish
from clustertool.engines.queued_request import expected_plan
from clustertool.engines.slurm.slurm_start import nodes_of_slurm
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Facts, Identity
from clustertool.model.planning.plan import Plan
from clustertool.model.slurm.slurm_settings import SlurmSettings

LOGIN = Facts(0, root="/shared/ct", home="/shared", listing=("train.py",))


def planned(settings: SlurmSettings, **options: Any) -> Plan:
    given = Options(**options)
    cluster = Cluster(())
    spec = read_job(cluster, {}, given)
    request = RunRequest(cluster, given, RunWish(), spec, None, "", {}, ())
    return expected_plan(request, nodes_of_slurm(settings, LOGIN), Identity("J"))


def test_nodes_have_placeholders_and_a_folder_each() -> None:
    made = planned(SlurmSettings(nodes=2), nproc_per_node="2")
    assert [(node.host.name, node.job_dir) for node in made.nodes] == [
        ("node0", "/shared/ct/node0/JOBJ"),
        ("node1", "/shared/ct/node1/JOBJ"),
    ]
    assert [(one.rank, one.node, dict(one.env)["WORLD_SIZE"]) for one in made.processes] == [
        (0, 0, "4"),
        (1, 0, "4"),
        (2, 1, "4"),
        (3, 1, "4"),
    ]
    assert dict(made.processes[3].env)["MASTER_ADDR"] == "node0"
    (one,) = planned(SlurmSettings()).nodes
    assert one.job_dir == "/shared/ct/JOBJ"


@pytest.mark.parametrize(
    ("settings", "options", "devices"),
    [
        (SlurmSettings(gpus_per_node="2"), {}, [(0,), (1,)]),
        (SlurmSettings(gpus_per_node="a100:1,v100:2"), {}, [(0,), (1,), (2,)]),
        (SlurmSettings(gpus_per_node="a100:2"), {"nproc_per_node": "gpu"}, [(0,), (1,)]),
        (SlurmSettings(), {"nproc_per_node": "gpu"}, [()]),
        (SlurmSettings(cpus_per_node=3), {"nproc_per_node": "cpu"}, [()] * 3),
    ],
)
def test_ranks_by_what_is_asked_of_slurm(
    settings: SlurmSettings, options: dict[str, Any], devices: list[tuple[int, ...]]
) -> None:
    assert [one.devices for one in planned(settings, **options).processes] == devices
