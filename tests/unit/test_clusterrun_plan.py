"""What plans know for clusterrun: words that stay as they are, processes by what a node has, the roles of the old tool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

from clustertool.errors import Several, UsageError
from clustertool.model.config.hostfile import entries_for, hosts_of
from clustertool.model.config.hosts import Host
from clustertool.model.launcher_variables import for_frameworks, of_task
from clustertool.model.planning import shell_variables
from clustertool.model.planning.environment import fill, literal
from clustertool.model.planning.plan import needs_probe
from clustertool.model.planning.requests import spec as spec_of
from clustertool.model.planning.shell_variables import visible
from clustertool.node.supervisor.rank_process import allocation_variables, inherited_variables, login_variables
from clustertool.node.supervisor.rank_process import environment as environment_of

CLUSTER = cluster_of(hosts(2))

# -- commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["{port}", "{{port}}", '{"a": {"b": 1}}', "{", "{{", "}", "", "a{rank}b{{", "{}"])
def test_a_literal_argument_is_filled_with_nothing(argument: str) -> None:
    assert fill([literal(argument)], {"port": "1", "rank": "2"}) == (argument,)


def test_a_command_is_for_all_roles_and_beats_job_toml() -> None:
    toml = {"trainer": {"command": ["a"]}, "pserver": {"command": ["b"]}}
    made = plan_of(CLUSTER, toml, command=("python3", "x.py", literal("{rank}")), server_num="1", files=())
    assert {process.argv for process in made.processes} == {("python3", "x.py", "{rank}")}


# -- --nproc-per-node in words --------------------------------------------------------------------------------------------


def counts(argument: str, have: dict[int, tuple[int, ...]], **options: str) -> list[int]:
    facts = facts_of(CLUSTER, device_kind="gpu", cpus=3)
    facts = {node: replace(fact, devices=have.get(node, ()), cpus=fact.cpus + node) for node, fact in facts.items()}
    made = plan_of(CLUSTER, facts=facts, nproc_per_node=argument, **options)
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


def test_a_value_that_is_no_count() -> None:
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
    assert (made.job.mode, len(of_role(made, "pserver")), len(of_role(made, "trainer"))) == ("ps", 2, 2)
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
    assert made.job.mode == "collective"
    assert [process.argv for process in made.processes] == [("prog", "0", "--x"), ("prog", "1", "--x")]


# -- rpc, and what PaddleCloud and elastic jobs give ---------------------------------------------------------------------------


def test_rpc_workers_have_an_endpoint_each_and_meet_at_the_master() -> None:
    made = plan_of(CLUSTER, mode="rpc", nproc_per_node="2")
    envs = [env_of(made, "trainer", rank) for rank in range(4)]
    assert len({env["PADDLE_WORKER_ENDPOINT"] for env in envs}) == 4
    assert [env["PADDLE_WORKER_ENDPOINT"] for env in envs] == [process.endpoint for process in made.processes]
    for rank, env in enumerate(envs):
        meet = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        assert env["PADDLE_MASTER_ENDPOINT"] == meet and meet not in env["PADDLE_TRAINER_ENDPOINTS"]
        assert (env["PADDLE_TRAINER_ID"], env["PADDLE_TRAINERS_NUM"], env["RANK"]) == (str(rank), "4", str(rank))
        assert env["TP_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "PADDLE_MASTER" not in env and "PADDLE_PSERVERS_IP_PORT_LIST" not in env
    with pytest.raises(UsageError, match="--servers is for parameter servers"):
        plan_of(CLUSTER, mode="rpc", servers=("10.0.0.1:1",))


def test_rpc_workers_are_counted_and_get_devices_as_trainers_of_a_collective_job() -> None:
    facts = facts_of(CLUSTER, device_kind="gpu", devices=(0, 1))
    for mode in ("collective", "rpc"):
        made = plan_of(CLUSTER, facts=facts, mode=mode)
        assert [process.devices for process in made.processes] == [(0,), (1,), (0,), (1,)]
        assert env_of(made, "trainer", 3)["CUDA_VISIBLE_DEVICES"] == "0,1"
    known = cluster_of(hosts(2), ROOT_DIR="/jobs", DEVICE_KIND="cpu", LEAD_PORT=7500)
    assert needs_probe(known, job_of(known, mode="rpc"))
    assert not needs_probe(replace(known, start_port=7000), job_of(known, mode="rpc"))


def test_what_paddlecloud_gives() -> None:
    """As paddle.distributed.cloud_utils reads it: its own address is in the list, and its endpoint at its rank."""
    made = plan_of(cluster_of(hosts(2), START_PORT=6170), nproc_per_node="2", max_restarts="1")
    for rank in range(4):
        env = env_of(made, "trainer", rank)
        endpoints = env["DISTRIBUTED_TRAINER_ENDPOINTS"].split(",")
        assert endpoints[rank] == env["PADDLE_CURRENT_ENDPOINT"]
        assert len(endpoints) == int(env["TRAINER_PORTS_NUM"]) * len(env["PADDLE_TRAINERS"].split(","))
        assert env["POD_IP"] in env["PADDLE_TRAINERS"].split(",")
        assert f"{env['POD_IP']}:{env['PADDLE_PORT']}" == env["PADDLE_CURRENT_ENDPOINT"]
        assert env["TRAINING_ROLE"] == "TRAINER"
        assert (env["PADDLE_ELASTIC_NP"], env["PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"]) == ("2", "1")
        assert env["PADDLE_ELASTIC_JOB_ID"] == env["PADDLE_JOB_ID"]
        assert not {"PADDLE_ELASTIC_SERVER", "PADDLE_LOCAL_DEVICE_IDS", "PADDLE_RUNNING_PLATFORM"} & set(env)
    facts = facts_of(CLUSTER, device_kind="gpu", devices=(4, 5, 6))
    env = env_of(plan_of(CLUSTER, facts=facts, nproc_per_node="2"), "trainer", 1)
    assert (env["PADDLE_LOCAL_DEVICE_IDS"], env["PADDLE_WORLD_DEVICE_IDS"]) == ("6", "4:5,6,4:5,6")
    served = env_of(plan_of(CLUSTER, server_num="1", worker_num="2"), "pserver", 0)
    assert (served["PADDLE_TRAINERS"], served["TRAINER_PORTS_NUM"]) == ("10.0.0.1,10.0.0.1,10.0.0.2,10.0.0.2", "1")


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


def of_ips(*entries: str) -> tuple[Host, ...]:
    return entries_for(KNOWN, hosts_of(entries, "--ips"))


def picked(*entries: str) -> list[str]:
    return [f"{host.user}@{host.host}:{host.port}" for host in of_ips(*entries)]


def test_ips_are_entries_of_hosts_where_they_can_be() -> None:
    assert picked("10.0.0.11", "10.0.0.1") == ["@10.0.0.11:0", "ann@10.0.0.1:2201"]
    (host,) = of_ips("192.168.0.1")
    assert (host.host, host.devices, host.index) == ("gpu1", (1,), 0)
    assert picked("node[2-3]", "node1") == ["@node2:0", "@node3:0", "@node1:0"]
    assert picked("10.0.0.5", "10.0.0.5") == ["@10.0.0.5:1", "@10.0.0.5:2"]
    assert picked("10.0.0.5:2") == ["@10.0.0.5:2"]
    assert [host.name for host in of_ips("10.0.0.5:2", "10.0.0.5:1")] == ["10.0.0.5:2", "10.0.0.5:1"]


def test_ips_that_hosts_does_not_have_are_hosts_of_their_own() -> None:
    assert picked("bob@10.0.0.1", "10.0.0.1:22", "10.0.0.12") == ["bob@10.0.0.1:0", "@10.0.0.1:22", "@10.0.0.12:0"]
    with pytest.raises(UsageError, match="--ips has '10.0.0.300'"):
        of_ips("10.0.0.300")


# -- this machine -------------------------------------------------------------------------------------------------------------


def test_devices_that_the_shell_shows() -> None:
    assert visible({}) is None
    assert visible({"CUDA_VISIBLE_DEVICES": "all"}) is None
    assert visible({"CUDA_VISIBLE_DEVICES": " 4, 5,4"}) == ("CUDA_VISIBLE_DEVICES", "gpu", (4, 5))
    assert visible({"XPU_VISIBLE_DEVICES": "1"}) == ("XPU_VISIBLE_DEVICES", "xpu", (1,))
    assert visible({"HIP_VISIBLE_DEVICES": "0"}) == ("HIP_VISIBLE_DEVICES", "dcu", (0,))
    assert visible({"ASCEND_RT_VISIBLE_DEVICES": "3"}) == ("ASCEND_RT_VISIBLE_DEVICES", "npu", (3,))
    assert visible({"CUDA_VISIBLE_DEVICES": "", "XPU_VISIBLE_DEVICES": "1"}) == ("XPU_VISIBLE_DEVICES", "xpu", (1,))
    assert visible({"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == ("CUDA_VISIBLE_DEVICES", "gpu", (1,))
    for none in ("-1", "NoDevFiles", "-1,0", "", " , "):
        assert visible({"CUDA_VISIBLE_DEVICES": none}) == ("CUDA_VISIBLE_DEVICES", "cpu", ())
    assert visible({"CUDA_VISIBLE_DEVICES": ""}, strict=False) is None, "the command line names devices, as in fleetrun"


@pytest.mark.parametrize(
    ("value", "what", "fix"),
    [
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "is a UUID", "nvidia-smi -L"),
        ("0,MIG-GPU-8932f937/1/2", "'MIG-GPU-8932f937/1/2' is a MIG instance", "--devices 0,1"),
        ("first", "'first' is no number", "env -u CUDA_VISIBLE_DEVICES"),
    ],
)
def test_devices_of_the_shell_that_mean_nothing_here(value: str, what: str, fix: str) -> None:
    """Where the command line names devices, such a value does not count."""
    environ = {"CUDA_VISIBLE_DEVICES": value}
    with pytest.raises(UsageError) as caught:
        visible(environ)
    assert what in caught.value.what and fix in caught.value.fix
    assert visible(environ, strict=False) is None
    assert shell_variables.apply_to(CLUSTER, environ, chosen=True) == CLUSTER


SHELL = {
    "CUDA_VISIBLE_DEVICES": "2,3",
    "PADDLE_PG_TIMEOUT": "9",
    "PADDLE_LAUNCH_LOG": "x",
    "FLAGS_cudnn_deterministic": "1",
    "FLAGS_selected_gpus": "7",
    "PADDLE_TRAINER_ID": "7",
    "PADDLE_NNODES": "7",
    "RANK": "7",
    "MINE": "7",
}


def test_the_shell_of_clusterrun_counts_on_nodes() -> None:
    cluster = cluster_of(hosts(2), ENV={"PADDLE_LAUNCH_LOG": "conf"})
    shown = shell_variables.apply_to(cluster, SHELL, chosen=False)
    facts = facts_of(shown, device_kind="gpu", devices=(0, 1, 2, 3), devices_seen=True)
    made = plan_of(shown, facts=facts)
    assert [process.devices for process in of_role(made, "trainer")] == [(2,), (3,)] * 2
    env = env_of(made, "trainer", 3)
    assert (env["PADDLE_PG_TIMEOUT"], env["FLAGS_cudnn_deterministic"]) == ("9", "1")
    assert env["PADDLE_LAUNCH_LOG"] == "conf", "conf.py has priority over the shell"
    assert (env["FLAGS_selected_gpus"], env["PADDLE_TRAINER_ID"], env["PADDLE_NNODES"]) == ("1", "3", "2")
    assert "MINE" not in env
    note = shell_variables.describe(shown, SHELL)
    assert note.startswith("from this shell: CUDA_VISIBLE_DEVICES=2,3 is for every node (env -u CUDA_VISIBLE_DEVICES: ")
    assert note.endswith("; FLAGS_cudnn_deterministic, PADDLE_PG_TIMEOUT are passed on")
    assert shell_variables.describe(shell_variables.apply_to(CLUSTER, {"MINE": "7"}, chosen=False), {"MINE": "7"}) == ""


def test_a_device_of_the_shell_that_a_node_lacks() -> None:
    shown = shell_variables.apply_to(CLUSTER, {"CUDA_VISIBLE_DEVICES": "9"}, chosen=False)
    facts = facts_of(shown, device_kind="gpu", devices=(0, 1), devices_seen=True)
    with pytest.raises(Several, match=r"there is no device 9 \(CUDA_VISIBLE_DEVICES of this shell\)"):
        plan_of(shown, facts=facts)


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["-1", "NoDevFiles", ""])
def test_a_shell_that_shows_no_device_hides_those_of_nodes(variable: str, value: str) -> None:
    """Of every process: no other variable keeps it from the devices of its node."""
    shown = shell_variables.apply_to(CLUSTER, {variable: value}, chosen=False)
    facts = facts_of(shown, device_kind="gpu", devices=(0, 1), devices_seen=True)
    for options in ({}, {"mode": "ps"}, {"mode": "rpc"}):
        for process in plan_of(shown, facts=facts, **options).processes:
            assert (process.devices, dict(process.env)[variable]) == ((), "-1")


def test_what_the_plan_computes_is_no_setting_of_the_shell() -> None:
    """Of every mode, so that a shell in which a launcher has run breaks nothing."""
    for options in ({}, {"server_num": "1"}, {"heter_worker_num": "1"}, {"mode": "rpc"}):
        for process in plan_of(CLUSTER, **options).processes:
            names = [name for name, _ in process.env if name.startswith(("PADDLE_", "FLAGS_"))]
            assert names and not [name for name in names if for_frameworks(name)]


def test_what_a_process_inherits_on_this_machine() -> None:
    kept = dict.fromkeys(
        "HOME PATH VIRTUAL_ENV NCCL_DEBUG FLAGS_x HTTPS_PROXY CUDA_VISIBLE_DEVICES MY_RANK RANKS PADDLE_PG_TIMEOUT".split(),
        "x",
    )
    dropped = dict.fromkeys(
        """PADDLE_TRAINER_ID PADDLE_GLOO_X TRAINING_ROLE POD_IP DISTRIBUTED_TRAINER_ENDPOINTS TRAINER_PORTS_NUM http_proxy
        no_proxy PADDLE_ELASTIC_X PADDLE_INIT_X
        RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR OMPI_COMM_WORLD_RANK CLUSTERTOOL_MARK TORCHELASTIC_RUN_ID FLAGS_selected_gpus
        FLAGS_START_PORT HETER_DEVICE_TYPE STAGE_ID""".split(),
        "x",
    )
    assert inherited_variables({**kept, **dropped}) == kept


def test_only_a_job_on_this_machine_inherits() -> None:
    cluster = cluster_of(hosts(1))
    (node,) = plan_of(cluster).nodes
    host = replace(cluster.hosts[0], here=True)
    (mine,) = plan_of(replace(cluster, hosts=(host,))).nodes
    assert (node.host.here, mine.host.here) == (False, True)
    made = plan_of(replace(cluster, hosts=(host,)))
    spec = spec_of(made, made.nodes[0], [], [])
    shell = {"HOME": "/home/ann", "MINE": "1", "RANK": "7"}
    env = environment_of(spec, spec["processes"][0], 0, shell)
    assert (env["MINE"], env["RANK"]) == ("1", env_of(made, "trainer", 0)["RANK"])


def test_what_a_process_has_of_the_login() -> None:
    """All that `ssh host command` has, less what launchers compute, Paddle's variables, and proxies; see the contract."""
    kept = dict.fromkeys(
        """HOME PATH MINE LD_LIBRARY_PATH HF_HOME LC_ALL SSH_CONNECTION XDG_SESSION_ID HTTPS_PROXY SLURM_CONF OMPI_MCA_btl
        OMPI_ALLOW_RUN_AS_ROOT BASH_FUNC_module%% odd.name FLAGS_x""".split(),
        "\udcff",
    )
    dropped = dict.fromkeys(
        """PADDLE_TRAINER_ID PADDLE_ANYTHING PADDLE_PG_TIMEOUT TRAINING_ROLE POD_IP DISTRIBUTED_TRAINER_ENDPOINTS
        TRAINER_PORTS_NUM http_proxy no_proxy my_proxy CLUSTERTOOL_SECRET CLUSTERTOOL_MARK TORCHELASTIC_X PET_NNODES
        OMPI_COMM_WORLD_RANK""".split(),
        "x",
    )
    assert login_variables({**kept, **dropped}) == kept
    made = plan_of(cluster_of(hosts(1)))
    spec = spec_of(made, made.nodes[0], [], [])
    process = spec["processes"][0]
    own = {**kept, **dropped, "PWD": "/home/ann", "RANK": "7", "SLURM_PROCID": "3"}
    env = environment_of({**spec, "ld_library_path": "/conf"}, process, 0, own)
    assert {name: env[name] for name in kept} == {**kept, "LD_LIBRARY_PATH": "/conf:\udcff"}
    assert (env["RANK"], env["PADDLE_TRAINER_ID"], "PADDLE_PG_TIMEOUT" in env) == ("0", "0", False)
    for of_mpi in ({**spec, "launcher": "mpirun"}, spec):
        apart = {**process, "apart": of_mpi is spec}
        env = environment_of(of_mpi, apart, 0, own)  # type: ignore[arg-type]
        assert "HF_HOME" in env and "OMPI_MCA_btl" not in env, "mpirun would send it to all nodes"
        assert ("SLURM_PROCID" in env) != apart["apart"]


def test_what_a_process_inherits_in_an_allocation() -> None:
    """The shell that has submitted the job, less what describes the task of the scheduler and what launchers compute."""
    given_back = "SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_PARTITION SLURM_JOB_NODELIST SLURM_CLUSTER_NAME".split()
    kept = dict.fromkeys(["HOME", "PATH", "MINE", "BASH_FUNC_module%%", "PADDLE_PG_TIMEOUT", *given_back], "x")
    dropped = dict.fromkeys(
        """SLURM_PROCID SLURM_NTASKS SLURM_STEP_NODELIST SLURM_JOB_NUM_NODES SLURM_CONF SRUN_DEBUG PMI_RANK PMI2_FD PMIX_RANK
        OMPI_COMM_WORLD_SIZE RANK PADDLE_TRAINER_ID https_proxy""".split(),
        "x",
    )
    assert allocation_variables({**kept, **dropped}) == kept
    made = plan_of(cluster_of(hosts(1)))
    spec = spec_of(made, made.nodes[0], [], [])
    process = spec["processes"][0]
    env = environment_of({**spec, "engine": "slurm"}, process, 0, {**kept, **dropped})
    assert set(kept) <= set(env) and not [name for name in env if of_task(name)]
    assert (env["RANK"], env["OMPI_COMM_WORLD_SIZE"], env["PADDLE_TRAINER_ID"]) == ("0", "1", "0")
    for engine in ({"engine": ""}, {}):
        assert "SLURM_NTASKS" in environment_of({**spec, **engine}, process, 0, dropped)  # type: ignore[typeddict-item]


# -- PaddleCloud


@pytest.mark.parametrize(
    ("machines", "found"),
    [
        ("10.0.0.1,10.0.0.2", ("10.0.0.1", "10.0.0.2")),
        ("10.0.0.1 10.0.0.2", ("10.0.0.1", "10.0.0.2")),
        ("10.0.0.1", ()),
        ("", ()),
    ],
)
def test_machines_of_paddlecloud(machines: str, found: tuple[str, ...]) -> None:
    environ = {"PADDLE_TRAINERS": machines, "POD_IP": "10.0.0.1", "PADDLE_TRAINER_ID": "0"}
    assert shell_variables.cloud_machines(environ) == found
    for name in environ:
        assert shell_variables.cloud_machines({**environ, name: ""}) == ()
