"""The place of a pod in its job, from the variables of an Indexed Job, of a JobSet and of PaddleJob's operator."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.errors import UsageError
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.joining import join_file
from clustertool.model.joining.engine_place import join_timeout_of, with_engine_place
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint, OwnSettings
from clustertool.model.joining.join_plan import Arrival, cluster_of

NAMES = ("ct-x-trainer-0", "ct-x-trainer-1", "ct-x-pserver-0")


def file(**fields: Any) -> JoinFile:
    cluster = read_cluster({"HOSTS": ["none"]})
    known: dict[str, Any] = {
        "version": "1",
        "code": "c",
        "identity": Identity("x", 1.0, "me", "token", "certificate", "key"),
        "cluster": cluster,
        "job": read_job(cluster, {}, Options(script="python3 x.py")),
        "nnodes": 3,
        "coordinator": MeetingPoint("ct-x-trainer-0.ct-x", 7170),
        "engine": "kubernetes",
        "names": NAMES,
    }
    return JoinFile(**{**known, **fields})


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({"CLUSTERTOOL_FIRST_NODE": "0", "JOB_COMPLETION_INDEX": "1"}, 1),
        ({"CLUSTERTOOL_FIRST_NODE": "2", "JOB_COMPLETION_INDEX": "0"}, 2),
        ({"CLUSTERTOOL_FIRST_NODE": "0", "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS": "10.0.0.5,10.0.0.6"}, 1),
        ({"CLUSTERTOOL_FIRST_NODE": "2", "PADDLE_TRAINER_ID": "0", "TRAINING_ROLE": "PSERVER"}, 2),
        ({"CLUSTERTOOL_FIRST_NODE": "0", "JOB_COMPLETION_INDEX": "0", "PADDLE_TRAINER_ID": "7"}, 0),
    ],
)
def test_the_node_of_a_pod(environ: dict[str, str], node: int):
    join = with_engine_place(file(), environ)
    assert (join.index, join.own.name, join.names) == (node, NAMES[node], NAMES)
    assert join.coordinator == MeetingPoint("ct-x-trainer-0.ct-x", 7170)


def test_the_host_of_the_coordinator_comes_from_the_operator():
    environ = {"CLUSTERTOOL_FIRST_NODE": "0", "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS": "10.0.0.5,10.0.0.6"}
    assert with_engine_place(file(coordinator=MeetingPoint("", 7170)), environ).coordinator == MeetingPoint(
        "10.0.0.5", 7170
    )
    with pytest.raises(UsageError, match="PADDLE_TRAINERS is not set"):
        with_engine_place(file(coordinator=MeetingPoint("", 7170)), {**environ, "PADDLE_TRAINERS": ""})


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({}, "CLUSTERTOOL_FIRST_NODE is not set"),
        ({"CLUSTERTOOL_FIRST_NODE": "0"}, "PADDLE_TRAINER_ID is not set"),
        ({"CLUSTERTOOL_FIRST_NODE": "x", "JOB_COMPLETION_INDEX": "1"}, "CLUSTERTOOL_FIRST_NODE is 'x'"),
        ({"CLUSTERTOOL_FIRST_NODE": "0", "JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX is '-1'"),
        ({"CLUSTERTOOL_FIRST_NODE": "2", "JOB_COMPLETION_INDEX": "1"}, "kubernetes has started node 3 of 3"),
    ],
)
def test_variables_of_no_pod(environ: dict[str, str], what: str):
    with pytest.raises(UsageError, match=what):
        with_engine_place(file(), environ)


def test_each_node_plays_its_role():
    join = file(of_engine=EngineSettings(roles=("trainer", "trainer", "pserver")))
    again = join_file.from_json(join_file.to_json(join))
    assert again == join
    arrivals = [Arrival(name, f"10.0.0.{n}", OwnSettings()) for n, name in enumerate(NAMES)]
    hosts = cluster_of(again, arrivals, 7170).hosts
    assert [host.plays("pserver") for host in hosts] == [False, False, True]
    assert [host.plays("trainer") for host in hosts] == [True, True, False]
    assert all(host.plays("pserver") for host in cluster_of(file(), arrivals, 7170).hosts)
    with pytest.raises(UsageError, match="2 roles for 3 nodes"):
        join_file.check(file(of_engine=EngineSettings(roles=("trainer", "pserver"))))


def test_pods_have_more_time_to_join_than_tasks_of_slurm():
    """An image is pulled on each node; Slurm starts all tasks at once."""
    assert join_timeout_of(None, "kubernetes") == join_file.JOIN_TIMEOUT > join_timeout_of(None, "slurm")
    assert join_timeout_of(5.0, "kubernetes") == 5.0
