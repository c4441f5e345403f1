"""The place of a machine that an engine has started: its index and the coordinator, from variables of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.model.config.job import Options, read_job
from clustertool.model.joining.engine_place import with_engine_place
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint, check, from_json, to_json
from clustertool.model.launcher_variables import cpus_of_task
from clustertool.model.slurm.slurm_answers import read_node_list
from clustertool.node.supervisor.rank_process import allocation_variables
from tests.unit.test_join_file import made

# As srun of Slurm 22.05 sets them for a task on the third of three nodes.
TASK = {
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03,07-08]",
    "SLURM_STEP_NUM_TASKS": "3",
}
JOIN = made(index=None, coordinator=MeetingPoint("", 7000), engine="slurm", of_engine=EngineSettings(True))


@pytest.mark.parametrize(
    "text, names",
    [
        ("", []),
        ("node1", ["node1"]),
        ("gpu[03,07-08]", ["gpu03", "gpu07", "gpu08"]),
        ("a[1-2]b[8-9],login.site", ["a1b8", "a1b9", "a2b8", "a2b9", "login.site"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_node_list(text: str, names: list[str]) -> None:
    assert read_node_list(text) == names


@pytest.mark.parametrize("text", ["n[1-x]", "n[1-", "a,,b", "a b", ",", "n[]", "n]1"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(DataError, match="is no list of nodes"):
        read_node_list(text)


@pytest.mark.parametrize("text", ["n[3-1]", "n[1--2]", "n[1-99999999]"])
def test_a_range_that_is_not_right(text: str) -> None:
    with pytest.raises(ConfigError):
        read_node_list(text)


def test_the_place_is_that_of_slurm() -> None:
    """The join file has neither the index nor the host: all machines have the same one."""
    join = from_json(to_json(JOIN))
    assert join == JOIN and (join.engine, join.of_engine.keep_bundle) == ("slurm", True)
    found = check(with_engine_place(join, TASK))
    names = ("gpu03", "gpu07", "gpu08")
    assert found == replace(join, index=2, coordinator=MeetingPoint("gpu03", 7000), own=found.own, names=names)
    assert found.own == replace(join.own, name="gpu08")


def test_without_an_engine_its_variables_do_not_count() -> None:
    join = made(index=None)
    assert with_engine_place(join, TASK) == join and (join.engine, join.of_engine.keep_bundle) == ("", False)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"SLURM_NODEID": ""}, "SLURM_NODEID is not set"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x', no number"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),  # the batch script itself, without srun
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST cannot be read"),
        ({"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_NUM_TASKS": "4"}, "node 2 of 4, and the job has 3 nodes"),
        ({"SLURM_NODEID": "3"}, "node 3 of 3, and the job has 3 nodes"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "srun has started 6 tasks on 3 nodes"),
    ],
)
def test_what_is_no_place(changed: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        with_engine_place(JOIN, {**TASK, **changed})


def elastic(nnodes: str) -> JoinFile:
    job = read_job(JOIN.cluster, {"trainer": {"command": ["true"]}}, Options(nnodes=nnodes))
    return replace(JOIN, job=job, nnodes=job.elastic.maximum)


def test_an_elastic_job_has_the_nodes_that_slurm_has_found() -> None:
    found = check(with_engine_place(elastic("2:4"), TASK))
    assert (found.index, found.nnodes, found.names[2]) == (2, 3, "gpu08")
    for range_of_nodes in ("4:5", "1:2"):
        with pytest.raises(UsageError, match=f"node 2 of 3, and the job has {range_of_nodes} nodes"):
            with_engine_place(elastic(range_of_nodes), TASK)


def test_an_engine_that_is_not_known() -> None:
    with pytest.raises(DataError, match="the engine 'later'"):
        with_engine_place(replace(JOIN, engine="later"), TASK)


def test_ranks_get_no_variable_of_a_task() -> None:
    kept = {"SLURM_JOB_ID": "7", "HOME": "/h"}
    assert (
        allocation_variables(
            {**kept, "SLURMD_NODENAME": "n1", "SLURM_PROCID": "0", "SRUN_DEBUG": "3", "PMIX_RANK": "0"}
        )
        == kept
    )


def test_the_cpus_of_a_task() -> None:
    assert cpus_of_task({"SLURM_CPUS_ON_NODE": "4"}) == 4
    for text in ("", "0", "x", "4(x2)"):
        assert cpus_of_task({"SLURM_CPUS_ON_NODE": text}) is None
    assert cpus_of_task({}) is None
