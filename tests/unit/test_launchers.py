"""The table of launchers' options: how each is read, what it becomes, and that the documents say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clustertool.cli.launchers.foreign_options import meeting, named_nodes, on_each_node, read, values_for_run
from clustertool.cli.launchers.launcher_flags import FLAGS, LAUNCHERS, Flag, Launch
from clustertool.errors import UsageError
from clustertool.model.config.job import started_by
from clustertool.verbs.clusterrun import OWN

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/coming-from-fleetrun.md"
# A value that each option which does something takes, and one that it refuses.
GOOD = {
    "--backend": "nccl",
    "--run-mode": "ps",
    "--elastic-level": "1",
    "--scale": "0",
    "--auto-cluster-config": "false",
    "--enable-auto-mapping": "False",
    "--rank": "0",
    "--node-rank": "0",
    "--with-gloo": "1",
    "--log-level": "debug",
    "--local-ranks-filter": "0,1",
    "--tee": "3",
    "--ips": "a,b",
    "--nnodes": "1:4",
    "--np": "2",
    "--hosts": "a:2,b",
    "--sort-ip": "0",
}
BAD = {
    "--nnodes": "2:1",
    "--np": "x",
    "-H": "a:x",
    "-np": "0",
    "--hosts": "a:0",
    "--host": "a:x",
    "--num-nodes": "0",
    "--sort-ip": "1",
    "--start-port": "0",
    "--backend": "heter",
    "--scale": "2",
    "--auto-cluster-config": "1",
    "--enable-auto-mapping": "True",
    "--tee": "9",
}


def launch(line: str) -> Launch:
    return read(line.split(), OWN)


def refusal(line: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        launch(line)
    assert caught.value.fix
    return caught.value


def spellings(flag: Flag) -> list[str]:
    long = [name for name in flag.names.split() if name.startswith("--")]
    return [*flag.names.split(), *(name.replace("-", "_").replace("__", "--", 1) for name in long)]


def tokens(flag: Flag, name: str, value: str) -> list[list[str]]:
    """The ways to write an option."""
    if not flag.value:
        return [[name]]
    return [[name, value], [f"{name}{value}" if len(name) in (2, 3) else f"{name}={value}"]]


# -- every row ----------------------------------------------------------------------------------------------------------


def test_no_two_rows_have_a_name_in_common() -> None:
    names = [name for flag in FLAGS for name in flag.names.split()]
    assert len(names) == len(set(names))
    assert all(set(flag.of) <= set(LAUNCHERS) and flag.of for flag in FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_option_is_meant_mapped_or_answered(flag: Flag) -> None:
    """In every spelling, and what comes after the script is never examined."""
    if flag.of == "O":
        return
    value = GOOD.get(flag.name, "7")
    nothing, seen = read(["train.py"], OWN), set()
    for name in spellings(flag):
        for given in tokens(flag, name, value):
            line = [*given, "train.py", *given]
            if flag.here.startswith("refused: "):
                with pytest.raises(UsageError):
                    read(line, OWN)
                continue
            found = read(line, OWN)
            assert found.arguments == ("train.py", *given)
            assert found.typed == {flag.name[2:].replace("-", "_"): value if flag.value else "True"}
            found.typed, found.arguments = {}, nothing.arguments
            seen.add(repr(found))
            assert bool(found.notes) == ("not needed: " in flag.here)
            assert bool(found.join.notes) == ("typed once it is not needed: " in flag.here)
            off = ("--scale", "--auto-cluster-config", "--enable-auto-mapping", "--sort-ip")
            does_nothing = flag.name in off
            assert (found != nothing) != does_nothing, "an option says something, or is answered"
    assert len(seen) == (0 if flag.here.startswith("refused: ") else 1)


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_what_cannot_be_honoured_is_refused(name: str, value: str) -> None:
    assert refusal(f"{name}={value} train.py").what


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.value and flag.of != "O"], ids=lambda flag: flag.name)
def test_an_empty_value_says_nothing(flag: Flag) -> None:
    found = launch(f"{flag.name}= train.py")
    assert (found.arguments, found.listed, found.nodes, found.notes) == (("train.py",), (), None, [])
    assert not any(found.options.values())


def test_options_that_map_arrive_under_runs_names() -> None:
    mapped = [flag.effect or flag.name[2:] for flag in FLAGS if isinstance(flag.effect, str)]
    assert set(mapped) <= {option.name for option in OWN}
    given = values_for_run(
        launch("--gpus=0,1 --nproc_per_node 2 --max-restarts 3 --grace 4 --env A=1 --env B=2 --detach t.py"), OWN
    )
    assert (given.gpus, given.nproc_per_node, given.max_restarts, given.grace) == ("0,1", "2", "3", "4")
    assert (given.env, given.detach, given.dry, given.servers, given.mode) == (("A=1", "B=2"), True, False, (), "")


# -- meanings -----------------------------------------------------------------------------------------------------------

MEANT: list[tuple[str, dict[str, Any]]] = [
    ("--ips=10.0.0.1,10.0.0.2", {"listed": ("10.0.0.1", "10.0.0.2")}),
    ("--ips ann@node[1-2,4]:22,b", {"listed": ("ann@node[1-2,4]:22", "b"), "listed_by": "--ips"}),
    ("-H a:2,b", {"listed": ({"host": "a", "slots": 2}, {"host": "b"}), "listed_by": "-H"}),
    ("-Hann@node[1,3]:4", {"listed": ({"host": "ann@node[1,3]", "slots": 4},)}),
    ("--hosts a:2,b", {"listed": ({"host": "a", "slots": 2}, {"host": "b"}), "listed_by": "-H"}),
    ("-host a,b", {"listed": ({"host": "a"}, {"host": "b"}), "by_slots": True, "own_address": ""}),
    ("--host a:2,b:2 -np 4", {"listed": ({"host": "a", "slots": 2}, {"host": "b", "slots": 2}), "total": 4}),
    ("--host a,b", {"listed": ({"host": "a"}, {"host": "b"}), "by_slots": True}),
    ("--host=a:4", {"listed": ({"host": "a", "slots": 4},), "listed_by": "--host"}),
    ("-np 2 --host a", {"listed": ({"host": "a"},), "total": 2}),
    ("--host a -n 2", {"listed": ({"host": "a"},), "own_address": ""}),
    ("--host [fe80::1]:4", {"listed": ({"host": "[fe80::1]", "slots": 4},)}),
    ("--host 10.0.0.1", {"listed": (), "own_address": "10.0.0.1", "own_address_by": "--host"}),
    ("--host fe80::1", {"listed": (), "own_address": "fe80::1"}),
    ("--host node[1]", {"listed": (), "own_address": "node[1]"}),
    ("--local-addr 10.0.0.1 -np 2", {"listed": (), "own_address": "10.0.0.1", "total": 2}),
    ("--include a:0,1@b -i c", {"included": ("a:0,1@b", "c"), "listed": ()}),
    ("--num_nodes 2", {"nodes": (2, 2)}),
    ("-np 4", {"total": 4}),
    ("-n 4", {"total": 4}),
    ("--num_proc=4", {"total": 4}),
    ("--nnodes 2", {"nodes": (2, 2)}),
    ("--nnodes=1:4", {"nodes": (1, 4)}),
    ("--np 3", {"nodes": (3, 3)}),
    ("--standalone", {"alone": True}),
    ("--start_port 6070", {"start_port": "6070"}),
    ("--log_dir=mylog", {"log_dir": "mylog"}),
    ("--log_level warning", {"quiet": True}),
    ("--log_level INFO", {"quiet": False}),
    ("--backend gloo", {"device_kind": "cpu"}),
    ("--run_mode=cpuonly", {"device_kind": "cpu"}),
    ("--nproc_per_node 2", {"implied": ""}),
    *((f"--{name} 2", {"implied": "ps"}) for name in ("workers", "trainers", "worker_num", "trainer_num", "http_port")),
]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("--run_mode ps", {"mode": "ps"}),
    ("--server_num 2 --worker_num 4", {"server-num": "2", "worker-num": "4"}),
    ("--trainer_num=2", {"trainer-num": "2"}),
    ("--workers a:1 --trainers=b", {"workers": ("a:1",), "trainers": ("b",)}),
    ("--heter_workers b:1;c:1 --heter_devices gpu;cpu", {"heter-workers": ("b:1;c:1",), "heter-devices": "gpu;cpu"}),
    ("--heter_worker_num 2;1", {"heter-worker-num": "2;1"}),
    ("--gloo_port 7000 --server_num 1", {"http-port": "7000"}),
    ("--servers a:1 --servers b:1,c:1", {"servers": ("b:1,c:1",)}),
    ("--with_gloo 0", {"env": ("PADDLE_WITH_GLOO=0",)}),
    ("--backend=bkcl --env A=1", {"env": ("PADDLE_DISTRI_BACKEND=bkcl", "A=1")}),
    ("--elastic_level 1", {"max-restarts": "3"}),
    ("--elastic_level 1 --max_restart 5", {"max-restarts": "5"}),
    ("--max_restart 5 --elastic_level 1", {"max-restarts": "5"}),
    ("--elastic_level=-1", {"max-restarts": None}),
    ("--job_id job1", {"job-id": "job1"}),
    ("--resume", {"resume": "@newest"}),
    ("--resume=job1", {"resume": "job1"}),
    ("--job_id default", {"job-id": None}),
    ("-hostfile machines -n 3", {"hostfile": "machines"}),
    ("-machinefile machines", {"hostfile": "machines"}),
    ("-f machines", {"hostfile": "machines"}),
    ("--include a:0 --only b --exclude c:1", {"only": ("a:0", "b"), "skip": ("c:1",)}),
    ("--num_gpus=2", {"nproc-per-node": "2"}),
    ("--master etcd://e:2379 --nnodes 2:4 --ips a,b,c,d", {"elastic-server": ("etcd://e:2379",)}),
    ("--master etcd://e:1,f:1 --np 2:4 --ips a,b,c,d", {"elastic-server": ("etcd://e:1", "etcd://f:1")}),
    ("--master etcd://e:1 --elastic_server f:1 --np 2:4", {"elastic-server": ("etcd://f:1",)}),
    ("--rdzv-backend etcd-v2 --rdzv-endpoint e:2379 --nnodes 2:4", {"elastic-server": ("etcd://e:2379",)}),
    ("--master etcd://e:2379 --nnodes 4 --ips a,b,c,d", {"elastic-server": None}),
    ("--master e:2379 --nnodes 2:4 --ips a,b,c,d", {"elastic-server": None}),
    ("-t 3", {"all-ranks": True}),
    ("--tee 0", {"all-ranks": False}),
    ("-t 0:3,1:0,2:1", {"rank": "0,2"}),
    ("--local-ranks-filter=1,3", {"rank": "1,3"}),
    ("--virtual-local-rank", {"env": ("LOCAL_RANK=0",), "force-env": True}),
    ("--shutdown-timeout 3", {"grace": "3"}),
    ("--nproc-per-node gpu", {"nproc-per-node": "gpu"}),
    ("--nproc_per_node 2 --nproc-per-node=4", {"nproc-per-node": "4"}),
    ("-w job", {"workspace": "job"}),
]


@pytest.mark.parametrize(("line", "fields"), MEANT)
def test_what_is_meant(line: str, fields: dict[str, Any]) -> None:
    found = launch(line + " train.py")
    assert {name: getattr(found, name) for name in fields} == fields
    assert not found.notes


@pytest.mark.parametrize(("line", "options"), ASKED)
def test_what_run_is_asked_for(line: str, options: dict[str, Any]) -> None:
    found = launch(line + " train.py")
    assert {name: found.options.get(name) for name in options} == options


def test_options_that_contradict_each_other() -> None:
    assert "--ips" in refusal("--standalone --ips a,b train.py").what
    assert "takes no value" in refusal("--standalone=1 train.py").what
    assert "-H and --ips both name the nodes" in refusal("-H a:2 --ips b t.py").what
    assert "--nproc-per-node and -np" in refusal("-np 4 --nproc-per-node 2 t.py").what
    assert "--nproc-per-node and -H" in refusal("-H a:2 --nproc-per-node 2 t.py").what
    assert "--nproc-per-node and --host" in refusal("--host a:2 --nproc-per-node 2 t.py").what
    assert "--ips and --host both name the nodes" in refusal("--ips b --host a:2,b t.py").what
    assert "--hostfile names nodes" in refusal("--standalone -hostfile F t.py").what
    assert "--no-python starts the program itself" in refusal("--no-python --module pkg").what
    assert "--no-python starts the program itself" in refusal("-m --no-python pkg").what
    assert "-np 'roc'" in refusal("-nproc t.py").what
    assert refusal("--host a:x t.py").fix == 'write --host "host1:4,host2:4"'
    assert "needs a value" in refusal("--gpus").what
    assert "needs a value" in refusal("--gpus --ips=a train.py").what
    assert "did you mean '--nproc-per-node'" in refusal("--nprocs_per_node 2 train.py").what
    assert "--lr is no option" in refusal("--lr 0.1 train.py").what


def test_nodes_that_lists_name() -> None:
    found = launch(
        "--servers 10.0.0.2:1,10.0.0.1:1 --workers 10.0.0.1:2,10.0.0.3,node4:9 --heter_workers a:3;[fe80::1]:4 t.py"
    )
    assert named_nodes(found) == ("10.0.0.2", "10.0.0.1", "10.0.0.3", "node4", "a", "[fe80::1]")
    assert named_nodes(launch("--servers 127.0.0.1:1,localhost:2 t.py")) == ("127.0.0.1",)
    assert named_nodes(launch("--workers fe80::1 t.py")) == ("fe80::1",)


# -- the script -----------------------------------------------------------------------------------------------------------

STARTED = [
    ("train.py --ips=x -m", ("python3", "-u", "train.py", "--ips=x", "-m")),
    ("-m pkg.train --x", ("python3", "-u", "-m", "pkg.train", "--x")),
    ("--module pkg.train", ("python3", "-u", "-m", "pkg.train")),
    ("--no-python ./prog a", ("./prog", "a")),
    ("--no_python train.py", ("train.py",)),
    ("./prog a", ("./prog", "a")),
    ("--run-path script a", ("python3", "-u", "script", "a")),
    ("--no-python --run-path script", ("python3", "-u", "script")),
    ("--run-path --no-python script", ("python3", "-u", "script")),
    ("--run-path -m script", ("python3", "-u", "script")),
    ("-- train.py -x", ("python3", "-u", "train.py", "-x")),
    ("--rank -1 train.py", ("python3", "-u", "train.py")),
    ("--nproc_per_node 2", ()),
]


@pytest.mark.parametrize(("line", "argv"), STARTED)
def test_what_is_started(line: str, argv: tuple[str, ...]) -> None:
    found = launch(line)
    assert started_by(found.how, found.arguments) == argv


# -- the old paddle.py -----------------------------------------------------------------------------------------------------


def test_what_the_old_tool_did_not_know_goes_to_the_trainer() -> None:
    for package in ("--job_dispatch_package=W", "--job-dispatch-package W", "-p W", "-pW"):
        found = launch(f"--dot_period=10 {package} --conf C --log_dir=x --config ./c.py --role=a --use_gpu=0 x.py")
        assert found.old
        assert (found.options["workspace"], found.options["conf"]) == ("W", "C")
        assert found.arguments == tuple("--dot_period=10 --log_dir=x --config ./c.py --role=a --use_gpu=0 x.py".split())
        assert not found.log_dir
    found = launch("-j /there --local=0")
    assert (found.old, found.options["job-workspace"], found.arguments) == (True, "/there", ("--local=0",))


def test_a_script_makes_it_fleetruns_again() -> None:
    found = launch("--job_dispatch_package=W --gpus 0 train.py --job_workspace=x")
    assert (found.old, found.options["workspace"], found.arguments) == (False, "W", ("train.py", "--job_workspace=x"))


# -- the document -----------------------------------------------------------------------------------------------------------


def rows(section: str) -> dict[str, str]:
    """Option with dashes -> what the document says of it."""
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.replace(r"\|", "\0").strip("|").split("|")]
        if line.startswith("| `-"):
            names = [name for name in re.split(r"[`, ]+", cells[0]) if name.startswith("-")]
            name = next((name for name in names if name.startswith("--")), names[0])
            found["--" + name[2:].replace("_", "-") if name.startswith("--") else name] = cells[1].replace("\0", "|")
    return found


@pytest.mark.parametrize("key", LAUNCHERS)
def test_the_document_has_a_row_for_every_option_and_says_what_the_table_says(key: str) -> None:
    _, heading, rest = DOCUMENT.read_text().partition(f"\n## {LAUNCHERS[key]}\n")
    assert heading, f"no section {LAUNCHERS[key]!r}"
    assert rows(rest.partition("\n## ")[0]) == {flag.name: flag.here for flag in FLAGS if key in flag.of}


# What each launcher's own parser knows: paddle.distributed.launch 2.6.2 and 3.3.1, the fleetrun of 2.2 and of --legacy in
# 2.6.2, torchrun and torch.distributed.launch of torch 2.13.0, paddle.py of Paddle 0.9 to 0.11.
KNOWN = {
    "P": """master legacy rank log_level log_overwrite sort_ip enable_gpu_log nnodes nproc_per_node log_dir run_mode job_id
        devices gpus npus xpus host ips start_port auto_parallel_config auto_cluster_config auto_tuner_json servers
        trainers trainer_num server_num gloo_port with_gloo max_restart elastic_level elastic_timeout""",
    "L": """log_dir backend nproc_per_node run_mode gpus selected_gpus xpus selected_xpus npus selected_npus ips
        cluster_topo_path rank_mapping_path enable_auto_mapping servers workers coordinators heter_workers heter_devices
        worker_num coordinator_num server_num heter_worker_num http_port elastic_server elastic_pre_hook job_id np scale
        host force""",
    "T": """nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts monitor_interval
        start_method event_log_handler role module no_python run_path log_dir redirects tee local_ranks_filter
        duplicate_stdout_filters duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs
        numa_binding signals_to_handle shutdown_timeout virtual_local_rank use_env""",
    "O": "job_workspace job_dispatch_package",
    "M": "num_proc host hosts include exclude num_nodes num_gpus machinefile",  # what says where, and how many
}


@pytest.mark.parametrize("key", LAUNCHERS)
def test_no_option_of_a_launcher_is_missing(key: str) -> None:
    names = [name for flag in FLAGS if key in flag.of for name in flag.names.split()]
    ours = {name[2:].replace("-", "_") for name in names if name.startswith("--")}
    known = set(KNOWN[key].split())
    assert known <= ours
    assert ours - known <= {"selected_gpus", "selected_xpus", "selected_npus"}


@pytest.mark.parametrize(
    ("line", "each"),
    [
        ("--ips=a,b --gpus=0,1 train.py --ips x", "--gpus=0,1 train.py --ips x"),
        ("--ips a,b --nnodes 2 --host 10.0.0.2 --rank 1 --detach -m pkg", "--detach -m pkg"),
        ("-H a:2,b:2 -t 3 --env A=b --env C=d train.py", "-t 3 --env=A=b --env=C=d train.py"),
        ("--conf ./c.py --only a --nproc-per-node gpu train.py", "--nproc-per-node=gpu train.py"),
    ],
)
def test_the_command_for_each_node(line: str, each: str) -> None:
    found = on_each_node(line.split(), OWN, "10.0.0.1", 2)
    assert " ".join(found) == f"clusterrun --master 10.0.0.1:8090 --nnodes 2 {each}"
    assert meeting(read(found[1:], OWN), False) is not None
