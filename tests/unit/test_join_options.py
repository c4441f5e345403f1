"""Options of launchers that name where machines meet: the forms of torchrun, torch.distributed.launch and fleetrun."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.cli.launchers.foreign_options import begins_meeting, meeting, notes, options_of_shell, read
from clustertool.errors import UsageError
from clustertool.model.joining.typed_meeting import TypedMeeting
from clustertool.model.planning import shell_variables
from clustertool.verbs.clusterrun import OWN


def met(line: str, known: bool = False) -> TypedMeeting | None:
    return meeting(read([*line.split(), "train.py"], OWN), known)


MEETINGS: list[tuple[str, dict[str, Any]]] = [
    ("--master 10.0.0.1:8090 --nnodes 2", {"host": "10.0.0.1", "port": 8090, "nodes": 2, "index": None}),
    ("--master=http://10.0.0.1:8090 --nnodes=2 --rank=1", {"host": "10.0.0.1", "port": 8090, "index": 1}),
    ("--master Node0:8090 --nnodes 3 --rank -1", {"host": "node0", "nodes": 3, "index": None}),
    ("--master [fe80::1]:8090 --nnodes 2", {"host": "fe80::1", "port": 8090, "endpoint": "[fe80::1]:8090"}),
    ("--master a:1 --nnodes 1:4", {"nodes": 4}),
    ("--rdzv-endpoint=node0 --nnodes=2:2", {"host": "node0", "port": 29400}),
    ("--rdzv_endpoint fe80::1 --nnodes 2", {"host": "fe80::1", "port": 29400}),
    ("--rdzv-endpoint a:1 --rdzv-id 100 --rdzv-backend c10d --nnodes 2", {"run_id": "100", "salt": "100"}),
    ("--rdzv-endpoint a:1 --rdzv-id none --nnodes 2", {"run_id": "", "salt": "a:1"}),
    ("--rdzv-endpoint a:1 --nnodes 2 --rdzv-conf join_timeout=30,read_timeout=5", {"timeout": 30.0, "index": None}),
    ("--rdzv-endpoint a:1 --nnodes 2 --rdzv_conf is_host=True,join_timeout=2m", {"timeout": 120.0, "index": 0}),
    ("--rdzv-endpoint a:1 --nnodes 2 --rdzv_conf is_host=0", {"timeout": None, "index": None}),
    ("--nnodes=2 --node-rank=1 --master-addr 10.0.0.1 --master-port 1234", {"port": 1234, "index": 1}),
    ("--nnodes=2 --node_rank=0 --master_addr=10.0.0.1", {"port": 29500, "index": 0}),
    ("--rdzv-endpoint a:1 --master-addr b --master-port 9 --nnodes 2", {"host": "a", "port": 1}),
]


@pytest.mark.parametrize(("line", "fields"), MEETINGS)
def test_where_machines_meet(line: str, fields: dict[str, Any]) -> None:
    found = met(line)
    assert found is not None
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2",
        "--master 10.0.0.1:1",
        "--master 10.0.0.1:1 --nnodes 1",
        "--rdzv-endpoint localhost:0 --nnodes=1 --rdzv-backend=c10d",
        "--master a:1 --nnodes 2 --ips b,c",
        "--master a:1 --nnodes 2 -H b:2,c:2",
        "--master a:1 --nnodes 2 --servers b:1 --workers c:1",
        "--master-addr a --nnodes 2 --standalone",
        "--master a:1 --nnodes 2 --rank 0 --ips b,c",
    ],
)
def test_one_command_starts_all_nodes(line: str) -> None:
    assert met(line) is None


def test_a_conf_with_hosts_names_the_nodes() -> None:
    assert met("--master a:1 --nnodes 2", known=True) is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--master a:1 --nnodes 20000", "--nnodes 20000"),
        ("--master a --nnodes 2", "--master 'a'"),
        ("--master a:0 --nnodes 2", "--master 'a:0'"),
        ("--master a:99999 --nnodes 2", "--master 'a:99999'"),
        ("--master a:b:c --nnodes 2", "--master 'a:b:c'"),
        ("--master etcd://a:1 --nnodes 2", "without a server"),
        ("--rdzv-endpoint a:1 --rdzv-backend etcd-v2 --nnodes 2", "etcd://a:1 is no machine"),
        ("--rdzv-endpoint a:0 --nnodes 2", "--rdzv-endpoint 'a:0'"),
        ("--rdzv-endpoint a:1 --nnodes 2 --rdzv-id a/b", "--rdzv-id 'a/b'"),
        ("--rdzv-endpoint a:1 --nnodes 2 --rdzv-conf join_timeout", "--rdzv-conf 'join_timeout'"),
        ("--rdzv-endpoint a:1 --nnodes 2 --rdzv-conf join_timeout=soon", "join_timeout=soon"),
        ("--rdzv-endpoint a:1 --nnodes 2 --rdzv-conf join_timeout=0", "join_timeout=0"),
        ("--master a:1 --nnodes 2 --rank 2", "--rank '2'"),
        ("--master a:1 --nnodes 2 --rank x", "--rank 'x'"),
        ("--master-addr a:1 --nnodes 2", "--master-addr 'a:1'"),
        ("--master a:1 --nnodes 2 -np 4", "-np"),
        ("--rank 1 --ips a,b", "--rank '1': clusterrun is typed once"),
        ("--node-rank 2", "--rank '2': clusterrun is typed once"),
    ],
)
def test_what_cannot_be_a_meeting(line: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        met(line)
    assert what in caught.value.what
    assert caught.value.fix


def test_where_one_command_starts_all_the_notes_are_those_of_before() -> None:
    found = read("--master a:1 --node-rank 0 --rdzv-id 7 --ips a,b train.py".split(), OWN)
    assert found.notes == found.join.notes
    assert found.notes == [
        "--master is not needed: the first node is the master, at a port that is free (--start_port chooses)",
        "--node-rank is not needed: clusterrun is typed once and starts all nodes, in the order of --ips or HOSTS",
        "--rdzv-id is not needed: there is no rendezvous, every process gets its rank (--job-id names the job)",
    ]


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("--nnodes 2", True),
        ("--nnodes 2:2 --rank -1 --nproc-per-node 4", True),
        ("--np 2 --run_mode rpc", True),
        ("", False),
        ("--nnodes 1", False),
        ("--nnodes 2:4", False),
        ("--nnodes 20000", False),
        ("--nnodes 2 --rank 0", False),
        ("--nnodes 2 --rdzv-backend c10d", False),
        ("--nnodes 2 --rdzv-id 7", False),
        ("--nnodes 2 --master a:1", False),
        ("--nnodes 2 --ips a,b", False),
        ("--nnodes 2 --standalone", False),
        ("--nnodes 2 -np 4", False),
    ],
)
def test_the_first_machine_of_paddle_names_no_place(line: str, begins: bool) -> None:
    launch = read([*line.split(), "train.py"], OWN)
    assert begins_meeting(launch, False) is begins
    assert not begins_meeting(launch, True), "a conf.py names the nodes"


def test_a_master_without_a_number_of_machines_is_this_machine_alone() -> None:
    """As in Paddle, whose own documents have such an example for two machines."""
    launch = read("--devices=0,1 --master=192.168.0.16:8090 --host 10.0.0.1 train.py".split(), OWN)
    assert meeting(launch, False) is None
    found = notes(launch, False, joins=False)
    assert found == [
        "--master without --nnodes is this machine alone; --nnodes N joins N machines",
    ]
    assert notes(launch, True, joins=False) == launch.notes


def test_no_note_about_options_that_join_machines() -> None:
    launch = read("--nnodes 2 --master a:1 --rank 0 --host b train.py".split(), OWN)
    assert notes(launch, False, joins=True) == []
    assert launch.own_address == "b"


def test_an_etcd_that_is_used_has_no_note_and_one_without_effect_has() -> None:
    used = read("--master etcd://e:1 --nnodes 2:4 --ips a,b,c,d train.py".split(), OWN)
    assert notes(used, False, joins=False) == []
    fixed = read("--master etcd://e:1 --nnodes 4 --ips a,b,c,d train.py".split(), OWN)
    assert "--master is not needed" in notes(fixed, False, joins=False)[0]


# -- options in variables of the shell


PLACE = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "1234"}


def test_variables_of_torchrun_and_paddle_are_options() -> None:
    torch = options_of_shell(PLACE, read(["train.py"], OWN), OWN)
    assert torch["PET_MASTER_PORT"] == "--master-port=1234"
    assert meeting(read([*torch.values(), "train.py"], OWN), False) == TypedMeeting("10.0.0.1", 1234, 2, 1)
    paddle = {"PADDLE_MASTER": "10.0.0.1:8090", "PADDLE_NNODES": "2", "PADDLE_RANK": "0", "PADDLE_PG_TIMEOUT": "9"}
    found = options_of_shell({**paddle, "PADDLE_TRAINERS": "a,b", "PADDLE_PORT": "6170"}, read(["train.py"], OWN), OWN)
    assert found == {
        "PADDLE_MASTER": "--master=10.0.0.1:8090",
        "PADDLE_NNODES": "--nnodes=2",
        "PADDLE_RANK": "--rank=0",
    }
    assert options_of_shell({"PADDLE_TRAINERS_ENDPOINTS": "a:1,b:1"}, read(["train.py"], OWN), OWN) == {
        "PADDLE_TRAINERS_ENDPOINTS": "--trainers=a:1,b:1"
    }
    assert options_of_shell(
        {"PET_STANDALONE": "1", "PET_MODULE": "0", "PET_NOT_KNOWN": "1"}, read(["x"], OWN), OWN
    ) == {"PET_STANDALONE": "--standalone"}


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (["--nnodes", "3"], {"PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}),
        (["--np", "3", "--rank", "0"], {"PET_MASTER_ADDR", "PET_MASTER_PORT"}),
        (["--master", "10.0.0.9:1"], {"PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT"}),
        (["--nnodes", "1"], set()),
        (["--standalone"], set()),
        (["--ips", "a,b"], set()),
        (["-H", "a:2,b:2"], set()),
    ],
)
def test_the_command_line_has_priority(line: list[str], left: set[str]) -> None:
    assert set(options_of_shell(PLACE, read([*line, "train.py"], OWN), OWN)) == left


def test_counts_of_the_shell_are_replaced_by_any_name_of_theirs() -> None:
    environ = {"PET_NPROC_PER_NODE": "2", "PADDLE_DEVICES": "0,1"}
    assert not options_of_shell(environ, read(["--num-gpus", "4", "--gpus", "3", "train.py"], OWN), OWN)


def test_a_variable_that_is_wrong_is_named() -> None:
    with pytest.raises(UsageError, match="PET_NNODES of this shell: --nnodes 'two'"):
        options_of_shell({"PET_NNODES": "two"}, read(["train.py"], OWN), OWN)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"NNODES": "2"}, ("NNODES", 2)),
        ({"NNODES": "1"}, ("", 0)),
        ({"NNODES": "1:4"}, ("", 0)),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "job-master-0"}, ("WORLD_SIZE", 4)),
        ({"WORLD_SIZE": "4"}, ("", 0)),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, ("", 0)),
        ({"NNODES": "2", "CLUSTERTOOL_RANK": "0"}, ("", 0)),
    ],
)
def test_machines_that_front_ends_name(environ: dict[str, str], found: tuple[str, int]) -> None:
    assert shell_variables.front_end_machines(environ) == found


@pytest.mark.parametrize(
    "own", [{"CLUSTERTOOL_RANK": "1"}, {"RANK": "0", "LOCAL_RANK": "0"}, {"PADDLE_GLOBAL_RANK": "0"}]
)
def test_a_rank_has_the_variables_of_its_own_job(own: dict[str, str]) -> None:
    assert shell_variables.launch_options({**PLACE, **own}) == {}
