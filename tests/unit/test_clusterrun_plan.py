"""What plans know for clusterrun: words that stay as they are, processes by what a node has, the roles of the old tool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

from clustertool.errors import UsageError
from clustertool.fleet.this_machine import visible
from clustertool.model.config.hostfile import pick
from clustertool.model.planning.environment import fill, literal
from clustertool.model.planning.plan import needs_probe
from clustertool.model.planning.requests import spec as spec_of
from clustertool.node.supervisor.rank_process import environment as environment_of
from clustertool.node.supervisor.rank_process import inherited

CLUSTER = cluster_of(hosts(2))

# -- commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["{port}", "{{port}}", '{"a": {"b": 1}}', "{", "{{", "}", "", "a{rank}b{{", "{}"])
def test_a_literal_word_is_filled_with_nothing(word: str) -> None:
    assert fill([literal(word)], {"port": "1", "rank": "2"}) == (word,)


def test_a_command_is_for_all_roles_and_beats_job_toml() -> None:
    toml = {"trainer": {"command": ["a"]}, "pserver": {"command": ["b"]}}
    made = plan_of(CLUSTER, toml, command=("python3", "x.py", literal("{rank}")), server_num="1", files=())
    assert {process.argv for process in made.processes} == {("python3", "x.py", "{rank}")}


# -- --nproc-per-node in words --------------------------------------------------------------------------------------------


def counts(word: str, have: dict[int, tuple[int, ...]], **options: str) -> list[int]:
    facts = facts_of(CLUSTER, device_kind="gpu", cpus=3)
    facts = {node: replace(fact, devices=have.get(node, ()), cpus=fact.cpus + node) for node, fact in facts.items()}
    made = plan_of(CLUSTER, facts=facts, nproc_per_node=word, **options)
    return [sum(process.node == node for process in made.processes) for node in (0, 1)]


def test_processes_by_what_each_node_has() -> None:
    cards = {0: (0, 1), 1: (2, 5, 7, 8, 9)}
    assert counts("gpu", cards) == [2, 5]
    assert counts("auto", cards) == [2, 5]
    assert counts("cpu", cards) == [3, 4]
    assert counts("auto", {0: (0, 1)}) == [2, 4]
    assert counts("gpu", cards, devices="1") == [1, 1]
    with pytest.raises(UsageError, match=r"10\.0\.0\.2 has none"):
        counts("gpu", {0: (0, 1)})


def test_a_word_that_is_no_count() -> None:
    with pytest.raises(UsageError) as caught:
        job_of(CLUSTER, nproc_per_node="gpus")
    assert "gpu, xpu, npu, cpu, auto" in caught.value.fix


def test_processors_have_to_be_counted() -> None:
    known = cluster_of(hosts(2), ROOT_DIR="/jobs", DEVICE_KIND="cpu", START_PORT=7000, LEAD_PORT=7500)
    assert not needs_probe(known, job_of(known))
    assert not needs_probe(known, job_of(known, nproc_per_node="4"))
    assert needs_probe(known, job_of(known, nproc_per_node="cpu"))


# -- the old paddle.py ------------------------------------------------------------------------------------------------------


def test_roles_of_the_old_tool() -> None:
    cluster = cluster_of(hosts(2), PADDLE_PORT=7164, PADDLE_PORTS_NUM=2, PADDLE_PORTS_NUM_FOR_SPARSE=3)
    made = plan_of(cluster, v2=True, v2_args=("--local=0", "--config", "c.py"), files=())
    assert (made.mode, len(of_role(made, "pserver")), len(of_role(made, "trainer"))) == ("ps", 2, 2)
    assert one(made, "pserver", 1).argv == (
        "paddle",
        "pserver",
        "--num_gradient_servers=2",
        "--nics=eth0",
        "--port=7164",
        "--ports_num=2",
        "--ports_num_for_sparse=3",
    )
    assert one(made, "trainer", 1).argv == (
        "paddle",
        "train",
        "--num_gradient_servers=2",
        "--nics=eth0",
        "--port=7164",
        "--ports_num=2",
        "--pservers=10.0.0.1,10.0.0.2",
        "--local=0",
        "--config",
        "c.py",
        "--trainer_id=1",
    )


def test_job_toml_has_its_say_in_the_old_tools_jobs() -> None:
    toml = {"mode": "collective", "trainer": {"command": ["prog", "{rank}"]}}
    made = plan_of(CLUSTER, toml, v2=True, v2_args=("--x",), files=())
    assert made.mode == "collective"
    assert [process.argv for process in made.processes] == [("prog", "0", "--x"), ("prog", "1", "--x")]


# -- nodes of --ips -----------------------------------------------------------------------------------------------------------

KNOWN = cluster_of(
    [
        "ann@10.0.0.1:2201",
        "10.0.0.11",
        {"host": "gpu1", "address": "192.168.0.1", "devices": [1]},
        "node[1-3]",
        "10.0.0.5:1",
        "10.0.0.5:2",
    ]
).hosts


def picked(*words: str) -> list[str]:
    return [f"{host.user}@{host.host}:{host.port}" for host in pick(KNOWN, words)]


def test_ips_are_entries_of_hosts_where_they_can_be() -> None:
    assert picked("10.0.0.11", "10.0.0.1") == ["@10.0.0.11:0", "ann@10.0.0.1:2201"]
    (host,) = pick(KNOWN, ["192.168.0.1"])
    assert (host.host, host.devices, host.index) == ("gpu1", (1,), 0)
    assert picked("node[2-3]", "node1") == ["@node2:0", "@node3:0", "@node1:0"]
    assert picked("10.0.0.5", "10.0.0.5") == ["@10.0.0.5:1", "@10.0.0.5:2"]
    assert picked("10.0.0.5:2") == ["@10.0.0.5:2"]
    assert [host.name for host in pick(KNOWN, ["10.0.0.5:2", "10.0.0.5:1"])] == ["10.0.0.5:2", "10.0.0.5:1"]


def test_ips_that_hosts_does_not_have_are_hosts_of_their_own() -> None:
    assert picked("bob@10.0.0.1", "10.0.0.1:22", "10.0.0.12") == ["bob@10.0.0.1:0", "@10.0.0.1:22", "@10.0.0.12:0"]
    with pytest.raises(UsageError, match="--ips has '10.0.0.300'"):
        pick(KNOWN, ["10.0.0.300"])


# -- this machine -------------------------------------------------------------------------------------------------------------


def test_devices_that_the_shell_shows() -> None:
    assert visible({}) == ("", None)
    assert visible({"CUDA_VISIBLE_DEVICES": "all"}) == ("", None)
    assert visible({"CUDA_VISIBLE_DEVICES": " 4, 5"}) == ("gpu", (4, 5))
    assert visible({"XPU_VISIBLE_DEVICES": "1"}) == ("xpu", (1,))
    assert visible({"HIP_VISIBLE_DEVICES": "0"}) == ("dcu", (0,))
    assert visible({"ASCEND_RT_VISIBLE_DEVICES": "3"}) == ("npu", (3,))
    assert visible({"CUDA_VISIBLE_DEVICES": "", "XPU_VISIBLE_DEVICES": "1"}) == ("xpu", (1,))
    assert visible({"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == ("gpu", (1,))
    for none in ("", "-1", " "):
        assert visible({"CUDA_VISIBLE_DEVICES": none}) == ("cpu", None)
    with pytest.raises(UsageError, match="MIG-1"):
        visible({"CUDA_VISIBLE_DEVICES": "MIG-1"})


def test_what_a_process_inherits_on_this_machine() -> None:
    kept = dict.fromkeys(
        "HOME PATH VIRTUAL_ENV NCCL_DEBUG FLAGS_x HTTPS_PROXY CUDA_VISIBLE_DEVICES MY_RANK RANKS".split(), "x"
    )
    dropped = dict.fromkeys(
        """PADDLE_TRAINER_ID PADDLE_X TRAINING_ROLE POD_IP DISTRIBUTED_TRAINER_ENDPOINTS TRAINER_PORTS_NUM http_proxy no_proxy
        RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR OMPI_COMM_WORLD_RANK CLUSTERTOOL_MARK TORCHELASTIC_RUN_ID FLAGS_selected_gpus
        FLAGS_START_PORT HETER_DEVICE_TYPE STAGE_ID""".split(),
        "x",
    )
    assert inherited({**kept, **dropped}) == kept


def test_only_a_job_on_this_machine_inherits() -> None:
    cluster = cluster_of(hosts(1))
    (node,) = plan_of(cluster).nodes
    host = replace(cluster.hosts[0], here=True)
    (mine,) = plan_of(replace(cluster, hosts=(host,))).nodes
    assert (node.here, mine.here) == (False, True)
    made = plan_of(replace(cluster, hosts=(host,)))
    spec = spec_of(made, made.nodes[0], [], [])
    shell = {"HOME": "/home/ann", "MINE": "1", "RANK": "7"}
    env = environment_of(spec, spec["processes"][0], 0, shell)
    assert (env["MINE"], env["RANK"]) == ("1", env_of(made, "trainer", 0)["RANK"])
    assert "MINE" not in environment_of({**spec, "here": False}, spec["processes"][0], 0, shell)
