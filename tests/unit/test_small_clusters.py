"""Every small cluster: ranks, endpoints, ports and the whole environment of each process, to the letter of the contract."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from cases import IDENTITY, cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

from clustertool.model.facts import Identity
from clustertool.model.planning.environment import Table
from clustertool.model.planning.plan import Plan, PlannedProcess, as_dict
from clustertool.model.planning.ports import choose
from clustertool.model.planning.ranks import assign

JOB = IDENTITY.job_id
SHAPES = [shape for nodes in range(1, 5) for shape in itertools.product(range(1, 5), repeat=nodes)]
LISTS = {
    "trainer": "PADDLE_TRAINER_ENDPOINTS",
    "pserver": "PADDLE_PSERVERS_IP_PORT_LIST",
    "heter": "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
}
MACHINES = [(0, 1, 2, 3), (0, 0, 0, 0), (0, 1, 0, 1)]


def collective(shape: Sequence[int], machines: Sequence[int] = (), **keys: Any) -> Plan:
    entries = [{"host": host, "nproc": size} for host, size in zip(hosts(len(shape)), shape)]
    cluster = cluster_of(entries, **keys)
    return plan_of(cluster, facts=facts_of(cluster, machines))


def ps(shape: Sequence[tuple[int, int]], machines: Sequence[int] = (), **keys: Any) -> Plan:
    """`shape`: (pservers, trainers) per node; 0 means that the host has not the role."""
    entries = []
    for host, (servers, trainers) in zip(hosts(len(shape)), shape):
        roles = {"pserver": servers, "trainer": trainers}
        entries.append({"host": host, "roles": {role: number for role, number in roles.items() if number}})
    cluster = cluster_of(entries, **keys)
    return plan_of(cluster, facts=facts_of(cluster, machines), mode="ps")


def piped(shape: Sequence[tuple[int, ...]], machines: Sequence[int] = (), **keys: Any) -> Plan:
    """`shape`: pservers, trainers and heter trainers per node, of each stage in a column of its own."""
    cluster = cluster_of(hosts(len(shape)), **keys)
    columns = list(zip(*shape))
    servers, workers, *stages = [
        ",".join(host for host, count in zip(hosts(len(shape)), column) for _ in range(count)) for column in columns
    ]
    options: dict[str, Any] = {"servers": (servers,), "workers": (workers,), "heter_workers": (";".join(stages),)}
    return plan_of(cluster, facts=facts_of(cluster, machines), **options)


def ps_shapes(nodes: int) -> Iterator[Sequence[tuple[int, int]]]:
    """All of so many nodes with 1 to 4 processes, pservers or trainers, and at least one of both in all."""
    counts = [(servers, total - servers) for total in range(1, 5) for servers in range(total + 1)]
    for shape in itertools.product(counts, repeat=nodes):
        if any(servers for servers, _ in shape) and any(trainers for _, trainers in shape):
            yield shape


# -- the laws -----------------------------------------------------------------------------------------------------------


def check_ranks(made: Plan, role: str, sizes: Sequence[int]) -> None:
    """Ranks count through the nodes in HOSTS order; local ranks count within one."""
    placed = [(node.host.index, p.local_rank, p.rank) for node in made.nodes for p in node.processes if p.role == role]
    expected = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    assert placed == [(*place, rank) for rank, place in enumerate(expected)]


def check_ports(made: Plan, machines: Sequence[int]) -> None:
    """No port twice on a machine, the coordinator's, the master's and gloo's included; none that the kernel gives away."""
    used = Counter((machines[p.node], port) for p in made.processes for port in p.ports)
    used.update((machines[node], port) for node, port in made.extra_ports)
    assert set(used.values()) == {1}
    assert all(1024 <= port < 32768 for _, port in used)


def check_endpoints(made: Plan) -> None:
    """Every endpoint once, the same lists everywhere, and each process's own in the list of its role."""
    for role, name in LISTS.items():
        own = [process.endpoint for process in of_role(made, role)]
        lists = {value for process in made.processes for key, value in process.env if key == name}
        assert len(set(own)) == len(own)
        assert lists == ({",".join(own)} if own else set())
    assert len({process.endpoint for process in made.processes}) == len(made.processes)
    for server in of_role(made, "pserver"):
        env = dict(server.env)
        assert f"{env['POD_IP']}:{env['PADDLE_PORT']}" in env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")


def expected_env(made: Plan, process: PlannedProcess, sizes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Section 5 of the contract, written out once more."""
    addresses = [node.facts.address for node in made.nodes]
    trainers = [p.endpoint for p in of_role(made, "trainer")]
    servers = [p.endpoint for p in of_role(made, "pserver")]
    world, local = str(sum(sizes[process.role])), str(sizes[process.role][process.node])
    rank, local_rank, node = str(process.rank), str(process.local_rank), str(process.node)
    directory = f"/jobs/JOB{JOB}"
    (master_node, master), _, *gloo = made.extra_ports
    env = {
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CLUSTERTOOL_JOB": JOB,
        "CLUSTERTOOL_ROLE": process.role,
        "CLUSTERTOOL_RANK": rank,
        "CLUSTERTOOL_WORLD_SIZE": world,
        "CLUSTERTOOL_LOCAL_RANK": local_rank,
        "CLUSTERTOOL_LOCAL_WORLD_SIZE": local,
        "CLUSTERTOOL_NODE_RANK": node,
        "CLUSTERTOOL_NNODES": str(len(addresses)),
        "CLUSTERTOOL_HOSTS": ",".join(addresses),
        "CLUSTERTOOL_SHARDS": f"{directory}/.clustertool/shards-{process.role}-{rank}",
        "CLUSTERTOOL_OUTPUT": f"{directory}/output",
        "CLUSTERTOOL_ATTEMPT": "0",
        "CLUSTERTOOL_MARK": f"{JOB}/{node}/the-token",
    }
    if process.role == "trainer":
        env.update(
            {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": local,
                "NODE_RANK": node,
                "GROUP_RANK": node,
                "MASTER_ADDR": addresses[master_node],
                "MASTER_PORT": str(master),
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_SIZE": world,
                "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
                "OMPI_COMM_WORLD_LOCAL_SIZE": local,
                "GROUP_WORLD_SIZE": str(len(addresses)),
                "ROLE_NAME": "default",
                "ROLE_RANK": rank,
                "ROLE_WORLD_SIZE": world,
                "TORCHELASTIC_RUN_ID": JOB,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_ERROR_FILE": f"{directory}/.clustertool/error-trainer-{rank}.json",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            }
        )
        if made.job.mode == "collective" and int(local) > 1:
            env["OMP_NUM_THREADS"] = "1"
        if len(addresses) > 1 and set(sizes["trainer"]) == {1}:
            env["NNODES"] = str(len(addresses))
    env.update(
        {
            "PADDLE_NNODES": str(len(addresses)),
            "PADDLE_TRAINERS_NUM": str(len(trainers)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(trainers),
            "POD_IP": addresses[process.node],
            "POD_NAME": f"node{process.node}",
        }
    )
    if made.job.mode == "collective":
        env.update(
            {
                "PADDLE_MASTER": f"{addresses[master_node]}:{master}",
                "PADDLE_GLOBAL_SIZE": world,
                "PADDLE_LOCAL_SIZE": local,
                "PADDLE_GLOBAL_RANK": rank,
                "PADDLE_LOCAL_RANK": local_rank,
                "PADDLE_CURRENT_ENDPOINT": process.endpoint,
                "PADDLE_TRAINER_ID": rank,
                "PADDLE_RANK_IN_NODE": local_rank,
                "PADDLE_JOB_ID": JOB,
                "PADDLE_TRAINERS": ",".join(addresses),
                "PADDLE_DISTRI_BACKEND": "gloo",
                "TRAINING_ROLE": "TRAINER",
                "TRAINER_PORTS_NUM": local,
                "DISTRIBUTED_TRAINER_ENDPOINTS": ",".join(trainers),
                "PADDLE_PORT": process.endpoint.split(":")[1],
                "PADDLE_ELASTIC_JOB_ID": JOB,
                "PADDLE_ELASTIC_NP": str(len(addresses)),
                "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "0",
            }
        )
        return env
    number, role = str(len(trainers)), {"heter": "HETER_TRAINER"}.get(process.role, process.role.upper())
    first_server = of_role(made, "pserver")[0]
    env.update(
        {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers),
            "PADDLE_PORT": process.endpoint.split(":")[1],
            "PADDLE_ROLE": role,
            "TRAINING_ROLE": role,
            "PADDLE_TRAINERS": ",".join(trainer.split(":")[0] for trainer in trainers),
            "TRAINER_PORTS_NUM": "1",
            "PADDLE_WITH_GLOO": "1",
            "PADDLE_GLOO_RENDEZVOUS": "3",
            "PADDLE_GLOO_FS_PATH": f"{directory}/.clustertool/gloo",
            "PADDLE_GLOO_HTTP_ENDPOINT": f"{addresses[first_server.node]}:{gloo[0][1]}",
            "PADDLE_INIT_USE_GPU": "False",
            "PADDLE_INIT_TRAINER_COUNT": "1",
            "PADDLE_INIT_PORT": str((process if role == "PSERVER" else first_server).ports[0]),
            "PADDLE_INIT_PORTS_NUM": "1",
            "PADDLE_INIT_PORTS_NUM_FOR_SPARSE": "1",
            "PADDLE_INIT_NUM_GRADIENT_SERVERS": number,
            "PADDLE_INIT_PSERVERS": ",".join(dict.fromkeys(server.split(":")[0] for server in servers)),
            "PADDLE_CLUSTER_TRAIN": "True",
        }
    )
    if process.role == "trainer":
        env.update({"PADDLE_TRAINER_ID": rank, "PADDLE_INIT_TRAINER_ID": rank})
    return env


def expected_stages(made: Plan, process: PlannedProcess, stages: Sequence[int]) -> dict[str, str]:
    """What a ps-heter job has next to it; `stages`: how many heter trainers are in each."""
    heter = [p.endpoint for p in of_role(made, "heter")]
    env = {"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": ",".join(heter)}
    if process.role == "pserver":
        return env
    ends = list(itertools.accumulate(stages))
    lists = [",".join(heter[end - size : end]) for size, end in zip(stages, ends)]
    lists = [
        "",
        ",".join(p.endpoint for p in of_role(made, "trainer")),
        *lists,
        "",
    ]  # none before 1, none after the last
    stage = 1 if process.role == "trainer" else 2 + next(n for n, end in enumerate(ends) if process.rank < end)
    return {
        **env,
        "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": lists[stage - 1],
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": lists[stage + 1],
        "PADDLE_STAGE_TRAINERS_NUM": f"[{', '.join(map(str, [len(of_role(made, 'trainer')), *stages]))}]",
        "STAGE_ID": str(stage),
        "STAGE_NUM": str(1 + len(stages)),
        "HETER_DEVICE_TYPE": "cpu",
    }


def check(made: Plan, sizes: Mapping[str, Sequence[int]], machines: Sequence[int]) -> None:
    for role, counts in sizes.items():
        check_ranks(made, role, counts)
    check_ports(made, machines)
    check_endpoints(made)
    for process in made.processes:
        assert dict(process.env) == expected_env(made, process, sizes)


# -- all of them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", MACHINES)
def test_every_small_collective_cluster(machines: Sequence[int]) -> None:
    """Where nodes share machines, of those with four nodes only the ones with one or two processes on a node."""
    for shape in SHAPES:
        if machines != MACHINES[0] and len(shape) == 4 and max(shape) > 2:
            continue
        check(collective(shape, machines), {"trainer": shape}, machines)


@pytest.mark.parametrize("machines", MACHINES[:2])  # of two nodes the third is the first
def test_every_small_cluster_of_parameter_servers(machines: Sequence[int]) -> None:
    for nodes in (1, 2):
        for shape in ps_shapes(nodes):
            sizes = {"pserver": [servers for servers, _ in shape], "trainer": [trainers for _, trainers in shape]}
            check(ps(shape, machines), sizes, machines)


@pytest.mark.parametrize("nodes", [3, pytest.param(4, marks=pytest.mark.chaos)])
def test_every_cluster_of_three_and_four_nodes_of_parameter_servers(nodes: int) -> None:
    """40,000 shapes, so only what a plan's environments are made from: seats, their ports, the table of all endpoints."""
    cluster = cluster_of(hosts(nodes))
    job, facts, cards = job_of(cluster, mode="ps"), facts_of(cluster), dict.fromkeys(range(nodes), ())
    for shape in ps_shapes(nodes):
        playing = [
            replace(host, roles=tuple((role, count) for role, count in zip(("pserver", "trainer"), counts) if count))
            for host, counts in zip(cluster.hosts, shape)
        ]
        seats = assign(playing, job, facts, cards)
        ports = choose(seats, cluster, job, facts, JOB)
        table = Table(Identity(JOB), cluster, job, facts, seats, ports, ("cpu",) * nodes)
        used = Counter((seat.node, port) for seat in seats for port in table.ports.of[seat.role, seat.rank])
        used.update([(0, table.ports.coordinator), (table.roles["trainer"][0].node, table.ports.master)])
        used.update([(table.roles["pserver"][0].node, table.ports.gloo)])
        assert set(used.values()) == {1}
        for role, column in zip(("pserver", "trainer"), zip(*shape)):
            places = [(node, local) for node, count in enumerate(column) for local in range(count)]
            assert [(seat.node, seat.local_rank, seat.rank) for seat in table.roles[role]] == [
                (*place, rank) for rank, place in enumerate(places)
            ]
            listed = table.endpoints[role].split(",")
            assert [endpoint.split(":")[0] for endpoint in listed] == [facts[node].address for node, _ in places]
            assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("most_of_two", [1, pytest.param(2, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("machines", MACHINES[:2])  # of two nodes the third is the first
def test_every_small_cluster_of_heter_trainers(machines: Sequence[int], most_of_two: int) -> None:
    """One or two nodes with one or two stages, up to two of each role and stage on one node, `most_of_two` on each of two."""
    for nodes, stages, most in ((1, 1, 2), (1, 2, 2), (2, 1, most_of_two), (2, 2, 1)):
        for shape in itertools.product(itertools.product(range(most + 1), repeat=2 + stages), repeat=nodes):
            columns = list(zip(*shape))
            if not all(map(any, columns)):
                continue
            made = piped(shape, machines)
            sizes = {"pserver": columns[0], "trainer": columns[1], "heter": [sum(row[2:]) for row in shape]}
            check_ranks(made, "pserver", columns[0])
            check_ranks(made, "trainer", columns[1])
            placed = [(p.node, p.rank) for p in of_role(made, "heter")]
            by_stage = [node for column in columns[2:] for node, count in enumerate(column) for _ in range(count)]
            assert placed == [(node, rank) for rank, node in enumerate(by_stage)]
            check_ports(made, machines)
            check_endpoints(made)
            for process in made.processes:
                more = expected_stages(made, process, [sum(column) for column in columns[2:]])
                assert dict(process.env) == {**expected_env(made, process, sizes), **more}


def test_nodes_of_1_3_and_2_processes_have_ranks_0_then_1_2_3_then_4_5() -> None:
    made = collective((1, 3, 2))
    assert [[p.rank for p in node.processes] for node in made.nodes] == [[0], [1, 2, 3], [4, 5]]
    assert [[p.local_rank for p in node.processes] for node in made.nodes] == [[0], [0, 1, 2], [0, 1]]


def test_n_processes_each_have_rank_node_times_n_plus_local() -> None:
    made = collective((3, 3, 3))
    assert all(process.rank == process.node * 3 + process.local_rank for process in made.processes)


def test_ports_of_a_collective_job_count_from_start_port_on_each_machine() -> None:
    made = collective((2, 2), START_PORT=6170)
    assert [p.endpoint for p in made.processes] == ["10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.2:6171"]
    assert env_of(made, "trainer", 0)["PADDLE_MASTER"] == "10.0.0.1:6172"
    shared = collective((2, 2), (0, 0), START_PORT=6170)
    assert [p.ports for p in shared.processes] == [(6170,), (6171,), (6172,), (6173,)]


def test_pservers_take_consecutive_blocks_from_paddle_port_on_each_machine() -> None:
    made = ps([(2, 1), (1, 1)], PADDLE_PORT=7164, PADDLE_PORTS_NUM=2, PADDLE_PORTS_NUM_FOR_SPARSE=1)
    assert [p.ports for p in of_role(made, "pserver")] == [(7164, 7165, 7166), (7167, 7168, 7169), (7164, 7165, 7166)]
    shared = ps([(2, 1), (1, 1)], (0, 0), PADDLE_PORT=7164)
    assert [p.ports for p in of_role(shared, "pserver")] == [(7164, 7165), (7166, 7167), (7164, 7165)]  # two addresses
    chosen = ps([(2, 1), (1, 1)], (0, 0))
    assert [p.ports for p in of_role(chosen, "pserver")] == [(7164, 7165), (7166, 7167), (7168, 7169)]


def test_the_master_is_where_trainer_0_is() -> None:
    made = ps([(1, 0), (0, 2)])
    env = env_of(made, "trainer", 1)
    assert env["MASTER_ADDR"] == "10.0.0.2"
    assert (1, int(env["MASTER_PORT"])) in made.extra_ports


def test_logs_are_named_by_the_global_rank() -> None:
    made = ps([(1, 2), (1, 2)])
    assert [p.log for p in made.nodes[1].processes] == ["log/serverlog.1", "log/workerlog.2", "log/workerlog.3"]


def test_servers_start_before_trainers() -> None:
    assert as_dict(ps([(1, 1)]))["phases"] == ["pserver", "trainer"]
    assert as_dict(piped([(1, 1, 1)]))["phases"] == ["pserver", "trainer", "heter"]
    assert as_dict(collective((1,)))["phases"] == ["trainer"]


def test_the_coordinator_is_on_the_first_node() -> None:
    made = collective((1, 1), LEAD_PORT=6160)
    assert made.coordinator == ("10.0.0.1", 6160)
    assert (0, 6160) in made.extra_ports


def test_outputs_path_moves_the_output_folder() -> None:
    cluster = cluster_of(hosts(1))
    made = plan_of(cluster, {"outputs": {"path": "./model/"}})
    assert env_of(made, "trainer", 0)["CLUSTERTOOL_OUTPUT"] == f"/jobs/JOB{JOB}/model"
    assert made.job.output == "model"


def test_nodes_with_one_root_dir_work_in_folders_of_their_own() -> None:
    cluster = cluster_of(hosts(3))
    facts = facts_of(cluster)
    facts[2] = facts_of(cluster, root_id="root0", root="/shared")[2]
    made = plan_of(cluster, facts=facts)
    assert [node.job_dir for node in made.nodes] == [
        f"/jobs/node0/JOB{JOB}",
        f"/jobs/JOB{JOB}",
        f"/shared/node2/JOB{JOB}",
    ]


@pytest.mark.parametrize(
    "given, there",
    [("/data/job", "/data/job"), ("~/job", "/home/ann/job"), ("~", "/home/ann"), ("job/", "/home/ann/job")],
)
def test_a_job_workspace_is_the_working_directory_and_the_rest_lies_in_the_job_directory(
    given: str, there: str
) -> None:
    made = plan_of(cluster_of(hosts(1)), job_workspace=given)
    assert made.nodes[0].work_dir == there
    assert made.nodes[0].job_dir == f"/jobs/JOB{JOB}"
    assert env_of(made, "trainer", 0)["CLUSTERTOOL_OUTPUT"] == f"/jobs/JOB{JOB}/output"


def test_a_node_without_an_interface_sets_none() -> None:
    cluster = cluster_of(hosts(1))
    made = plan_of(cluster, facts=facts_of(cluster, nic=""))
    assert not {name for name in env_of(made, "trainer", 0) if name.endswith("_IFNAME")}


def test_a_paddle_job_on_ipv6_is_warned_of() -> None:
    made = plan_of(cluster_of(["[fe80::1]:22"]))
    assert any("IPv6" in warning for warning in made.warnings)
    assert one(made, "trainer", 0).endpoint.startswith("[fe80::1]:")


def test_equal_inputs_give_an_equal_plan() -> None:
    assert ps([(1, 2), (2, 1)]) == ps([(1, 2), (2, 1)])
