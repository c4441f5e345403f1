"""Variables of torchrun besides RANK and its like, and --master-port. tests/frameworks compares them with a real torchrun."""

from __future__ import annotations

import pytest
from cases import IDENTITY, cluster_of, env_of, facts_of, hosts, of_role, plan_of

from clustertool.errors import PreflightError, Several, UsageError
from clustertool.model.planning.plan import Plan
from clustertool.model.planning.requests import spec
from clustertool.node.supervisor.rank_process import environment, inherited_variables

PAIR = cluster_of(hosts(2))


def threads(made: Plan) -> list[str | None]:
    return [env_of(made, "trainer", p.rank).get("OMP_NUM_THREADS") for p in of_role(made, "trainer")]


def test_roles_and_groups() -> None:
    made = plan_of(cluster_of([{"host": "a", "nproc": 1}, {"host": "b", "nproc": 3}]), max_restarts="2")
    for process in of_role(made, "trainer"):
        env = dict(process.env)
        assert (env["ROLE_RANK"], env["ROLE_WORLD_SIZE"], env["ROLE_NAME"]) == (str(process.rank), "4", "default")
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == (str(process.node), "2")
        assert env["LOCAL_WORLD_SIZE"] == ("3" if process.node else "1")
        assert (env["TORCHELASTIC_MAX_RESTARTS"], env["TORCHELASTIC_RUN_ID"]) == ("2", IDENTITY.job_id)
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
        job_dir = made.nodes[process.node].job_dir
        assert env["TORCHELASTIC_ERROR_FILE"] == f"{job_dir}/.clustertool/error-trainer-{process.rank}.json"
    assert threads(made) == [None, "1", "1", "1"]


def test_the_number_of_restarts_is_that_of_the_attempt() -> None:
    made = plan_of(PAIR, max_restarts="2")
    own = spec(made, made.nodes[0], [], [])
    found = [environment(own, own["processes"][0], attempt, {})["TORCHELASTIC_RESTART_COUNT"] for attempt in range(3)]
    assert found == ["0", "1", "2"]
    served = plan_of(PAIR, mode="ps")
    assert not [name for name in env_of(served, "pserver", 0) if name.startswith(("TORCH", "ROLE_"))]


SETS = [
    {"ENV": {"OMP_NUM_THREADS": "7"}},
    {"HOSTS": [{"host": "a", "env": {"OMP_NUM_THREADS": "7"}}]},
    {"[env]": {"OMP_NUM_THREADS": "7"}},
    {"--env": ("OMP_NUM_THREADS=7",)},
    {"PASS_ENV": ["OMP_NUM_THREADS"]},
]


@pytest.mark.parametrize("given", SETS, ids=lambda given: next(iter(given)))
def test_a_number_of_threads_that_is_set_stays(given: dict[str, object]) -> None:
    keys = {key: value for key, value in given.items() if key in ("ENV", "PASS_ENV")}
    made = plan_of(
        cluster_of(given.get("HOSTS", ["a"]), **keys),
        {"env": given.get("[env]", {})},
        passed=[("OMP_NUM_THREADS", "7")] if "PASS_ENV" in keys else [],
        nproc_per_node="2",
        env=given.get("--env", ()),
    )
    assert threads(made) == ["7", "7"]


def test_one_thread_only_in_collective_jobs_with_several_ranks_on_a_node() -> None:
    assert threads(plan_of(PAIR)) == [None, None]
    assert threads(plan_of(PAIR, nproc_per_node="2")) == ["1"] * 4
    assert threads(plan_of(PAIR, mode="ps", worker_num="2")) == [None] * 4


# -- --master-port ------------------------------------------------------------------------------------------------------


def masters(made: Plan) -> set[tuple[str, str]]:
    found = [dict(process.env) for process in of_role(made, "trainer")]
    return {(env["MASTER_PORT"], env.get("PADDLE_MASTER", "")) for env in found}


def test_a_requested_master_port_is_used() -> None:
    made = plan_of(PAIR, master_port="29500")
    assert masters(made) == {("29500", "10.0.0.1:29500")}
    assert (0, 29500) in made.extra_ports, "it is claimed like any other"
    fixed = cluster_of(hosts(2), START_PORT=29500)
    others = plan_of(fixed, master_port="29600", nproc_per_node="2")
    assert masters(others) == {("29600", "10.0.0.1:29600")}
    assert [process.ports for process in of_role(others, "trainer")][:2] == [(29500,), (29501,)]
    served = plan_of(PAIR, mode="ps", master_port="29500")
    assert {port for port, _ in masters(served)} == {"29500"}


def test_it_is_on_the_node_of_the_first_trainer() -> None:
    facts = facts_of(PAIR)
    taken = facts_of(PAIR, busy=frozenset({29500}), listeners=((29500, "nginx (pid 7, user www)"),))
    plan_of(PAIR, facts={0: facts[0], 1: taken[1]}, master_port="29500")
    with pytest.raises((PreflightError, Several)) as caught:
        plan_of(PAIR, facts={0: taken[0], 1: facts[1]}, master_port="29500")
    assert "10.0.0.1" in str(caught.value)
    assert "port 29500 (--master-port) is in use by nginx (pid 7, user www)" in str(caught.value)


@pytest.mark.parametrize("text", ["0", "65536", "http", "-1", "1.5"])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(UsageError, match="--master-port") as caught:
        plan_of(PAIR, master_port=text)
    assert caught.value.fix == "a port from 1 to 65535"


def test_a_port_is_not_given_twice() -> None:
    fixed = cluster_of(hosts(1), START_PORT=29500)
    with pytest.raises((PreflightError, Several), match="29500"):
        plan_of(fixed, master_port="29500", workers=("10.0.0.1:29500",))
    made = plan_of(fixed, master_port="29501", nproc_per_node="3")
    assert [process.ports for process in of_role(made, "trainer")] == [(29500,), (29502,), (29503,)]


# -- what front ends pass on to torchrun


def front_end(made: Plan) -> list[tuple[str | None, ...]]:
    names = ("NNODES", "NODE_RANK", "NPROC_PER_NODE")
    return [tuple(env_of(made, "trainer", one.rank).get(name) for name in names) for one in of_role(made, "trainer")]


def test_a_launcher_on_each_node_has_all_devices() -> None:
    devices = facts_of(PAIR, devices=(0, 1, 2, 3), device_kind="gpu")
    made = plan_of(PAIR, facts=devices, nested=True)
    assert front_end(made) == [("2", "0", "4"), ("2", "1", "4")]
    assert env_of(made, "trainer", 1)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    chosen = plan_of(PAIR, facts=devices, nested=True, devices="1,3", env=("NPROC_PER_NODE=1",))
    assert front_end(chosen) == [("2", "0", "1"), ("2", "1", "1")]
    assert front_end(plan_of(PAIR, nested=True)) == [("2", "0", "1"), ("2", "1", "1")]
    assert front_end(plan_of(cluster_of(hosts(1)), nested=True)) == [("1", "0", "1")]


def test_front_ends_that_run_in_each_rank_start_no_launcher() -> None:
    """ms-swift starts torchrun where NNODES or NPROC_PER_NODE is set."""
    devices = facts_of(PAIR, devices=(0, 1), device_kind="gpu")
    assert front_end(plan_of(PAIR, facts=devices)) == [(None, str(rank // 2), None) for rank in range(4)]
    assert front_end(plan_of(PAIR, facts=devices, nested=True, nproc_per_node="2"))[0] == (None, "0", None)
    assert front_end(plan_of(cluster_of(hosts(1)))) == [(None, "0", None)]
    assert front_end(plan_of(PAIR)) == [("2", "0", None), ("2", "1", None)]
    reverse = plan_of(PAIR, workers=("10.0.0.2", "10.0.0.1"))
    assert [one[0] for one in front_end(reverse)] == [None, None], "the first rank is not on node 0"


@pytest.mark.parametrize("name", ["NNODES", "NPROC_PER_NODE"])
def test_those_of_a_shell_are_not_inherited(name: str) -> None:
    assert inherited_variables({name: "2", "MINE": "1"}) == {"MINE": "1"}
