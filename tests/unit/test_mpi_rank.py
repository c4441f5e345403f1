"""clusterrun --under mpi: each rank computes the same job, and gets what `run` would give it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.errors import ClustertoolError, UsageError
from clustertool.model.planning.launched_rank import RankOptions
from clustertool.model.planning.mpi_rank import mpi_rank_environment
from tests.node.harness import python_cases, pythons
from tests.unit.cases import cluster_of, plan_of

TOP = Path(__file__).parents[2]
HOSTS = "a slots=4\nb slots=2\nc slots=1\n"
SHAPE = {"a": 4, "b": 2, "c": 1}
# What belongs to the directory and the id of a job that the tool has started, and the interface that a probe has found.
NOT_HERE = {
    *(f"CLUSTERTOOL_{name}" for name in ("JOB", "MARK", "OUTPUT", "SHARDS")),
    *("TORCHELASTIC_ERROR_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PADDLE_GLOO_FS_PATH"),
}


def numbers(rank: int, counts: list[int]) -> tuple[int, int, int, int]:
    """rank, size, local rank and local size of a rank, where the nodes have so many."""
    node = next(node for node in range(len(counts)) if rank < sum(counts[: node + 1]))
    return rank, sum(counts), rank - sum(counts[:node]), counts[node]


def open_mpi(rank: int, counts: list[int], **more: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {**{f"OMPI_COMM_WORLD_{name}": str(n) for name, n in zip(names, numbers(rank, counts))}, **more}


def mpich(rank: int, counts: list[int], **more: str) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return {**{name: str(n) for name, n in zip(names, numbers(rank, counts))}, **more}


@pytest.mark.parametrize("variables", [open_mpi, mpich])
def test_every_rank_has_the_environment_that_run_gives_it(variables: type) -> None:
    cluster = cluster_of([{"host": name, "address": name, "nproc": n} for name, n in SHAPE.items()])
    made = plan_of(replace(cluster, start_port=7000, device_kind="cpu"))
    for process in made.processes:
        expected = {name: value for name, value in process.env if name not in NOT_HERE and not name.startswith("OMPI_")}
        place = variables(process.rank, list(SHAPE.values()))
        found = mpi_rank_environment(place, RankOptions(7000, hosts=HOSTS))
        for name, value in expected.items():
            assert found[name] == value or made.job_id in value, name
        assert place.items() <= found.items() and "CLUSTERTOOL_JOB" not in found
    assert [process.endpoint for process in made.processes][:5] == [*(f"a:{7000 + n}" for n in range(4)), "b:7000"]


@pytest.mark.parametrize("alone", [False, True])
def test_every_rank_has_the_role_that_run_gives_it(alone: bool) -> None:
    """One pserver and two trainers on each node. alone: the ranks are the trainers, a script has started the pservers."""
    cluster = cluster_of([{"host": name, "address": name} for name in "abc"])
    spec = replace(cluster, device_kind="cpu")
    made = plan_of(spec, server_num="1", worker_num="2")
    placed = {f"{process.role} {process.rank}": process for process in made.processes}
    seen = []
    for rank in range(6 if alone else 9):
        counts = [2] * 3 if alone else [3] * 3
        hosts = "".join(f"{name} slots={counts[0]}\n" for name in "abc")
        found = mpi_rank_environment(open_mpi(rank, counts), RankOptions(hosts=hosts, server_num=1, worker_num=2))
        name = f"{found['CLUSTERTOOL_ROLE']} {found['CLUSTERTOOL_RANK']}"
        seen.append(name)
        process = placed[name]
        # The ports of trainers are those behind the pservers here, and any free ones in a job of run.
        same = {
            name: value
            for name, value in process.env
            if name not in NOT_HERE and not name.startswith("OMPI_") and "PORT" not in name and "ENDPOINT" not in name
        }
        for name, value in same.items():
            assert found[name] == value or made.job_id in value, name
        assert found["PADDLE_PSERVERS_IP_PORT_LIST"] == "a:7164,b:7164,c:7164"
        assert found["PADDLE_TRAINER_ENDPOINTS"] == "a:7165,a:7166,b:7165,b:7166,c:7165,c:7166"
        assert int(found["PADDLE_PORT"]) == 7164 + (rank % counts[0]) + alone
        assert (found["PADDLE_INIT_PORT"], found["PADDLE_INIT_PSERVERS"]) == ("7164", "a,b,c")
        assert found["PADDLE_INIT_NUM_GRADIENT_SERVERS"] == "6"
    trainers = [f"trainer {n}" for n in range(6)]
    assert seen == (
        trainers if alone else ["pserver 0", *trainers[:2], "pserver 1", *trainers[2:4], "pserver 2", *trainers[4:]]
    )


def test_pservers_have_the_ports_from_the_start_port_on() -> None:
    options = RankOptions(9000, hosts="a slots=3\nb slots=3\n", server_num=2)
    found = mpi_rank_environment(mpich(5, [3, 3]), options)
    assert found["PADDLE_PSERVERS_IP_PORT_LIST"] == "a:9000,a:9001,b:9000,b:9001"
    assert found["POD_IP"] + ":" + found["PADDLE_PORT"] == "b:9002" and found["PADDLE_TRAINER_ID"] == "1"


def test_ports_depend_on_the_launch_only() -> None:
    shape = list(SHAPE.values())
    options = RankOptions(hosts=HOSTS)
    ports = {mpi_rank_environment(open_mpi(r, shape, PMIX_NAMESPACE="77"), options)["PADDLE_MASTER"] for r in range(7)}
    assert len(ports) == 1
    other = mpi_rank_environment(open_mpi(0, shape, PMIX_NAMESPACE="prterun-a-78@1"), options)["PADDLE_MASTER"]
    assert other not in ports
    assert mpi_rank_environment(mpich(0, shape), options)["PADDLE_MASTER"] == "a:10004"
    for launch in ("0", "4294967295", "prterun-a-4194304@1"):
        found = mpi_rank_environment(open_mpi(0, shape, PMIX_NAMESPACE=launch), options)
        assert 10000 <= int(found["MASTER_PORT"]) < 32768  # below the kernel's own ports


@pytest.mark.parametrize(
    "hosts", ["a\nb\n", "a:2\nb:2", "a slots=2\nb slots=4", "a\na\nb\nb\n", "x@a slots=2\nb max-slots=3 slots=3 # c"]
)
def test_hosts_are_filled_in_the_order_of_the_file(hosts: str) -> None:
    found = [mpi_rank_environment(mpich(rank, [2, 2]), RankOptions(hosts=hosts))["POD_IP"] for rank in range(4)]
    assert found == ["a", "a", "b", "b"]


def test_hosts_without_ranks_are_no_nodes() -> None:
    found = mpi_rank_environment(open_mpi(1, [2]), RankOptions(hosts=HOSTS))
    assert (found["CLUSTERTOOL_NNODES"], found["CLUSTERTOOL_HOSTS"]) == ("1", "a")


@pytest.mark.parametrize("variables", [open_mpi, mpich])
def test_with_a_master_torch_has_its_variables_only(variables: type) -> None:
    found = mpi_rank_environment(variables(3, [2, 2], MASTER_ADDR="old"), RankOptions(7000, master="a"))
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    assert {**expected, "MASTER_ADDR": "a", "MASTER_PORT": "7000", "GROUP_WORLD_SIZE": "2"}.items() <= found.items()
    assert not any(name.startswith(("PADDLE_", "POD_")) for name in found)
    by_hosts = mpi_rank_environment(variables(3, [2, 2]), RankOptions(7000, hosts="a\nb"))
    names = {name for name in by_hosts if not name.startswith(("PADDLE_", "POD_", "DISTRIBUTED_"))}
    assert names - set(found) == {"CLUSTERTOOL_HOSTS", "CLUSTERTOOL_ATTEMPT", "TRAINER_PORTS_NUM", "TRAINING_ROLE"}
    assert {name: by_hosts[name] for name in set(found) & names - {"MASTER_PORT"}} == {
        name: found[name] for name in set(found) & names - {"MASTER_PORT"}
    }


def test_ranks_in_any_order_are_possible_with_a_master() -> None:
    across = {**open_mpi(1, [2, 2]), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # mpirun --map-by node
    found = mpi_rank_environment(across, RankOptions(master="a"))
    assert (found["RANK"], found["LOCAL_RANK"]) == ("1", "0") and "NODE_RANK" not in found


def test_the_launchers_own_variables_stay_and_others_do_not() -> None:
    launchers = {"OMPI_MCA_btl": "self", "PMIX_RANK": "0", "PMI_FD": "6", "HYDI_CONTROL_FD": "7", "SLURM_JOB_ID": "8"}
    users = {"PADDLE_PG_TIMEOUT": "9", "FLAGS_x": "1", "HOME": "/h"}
    stale = {"PADDLE_MASTER": "old:1", "MASTER_ADDR": "old", "SLURM_PROCID": "0", "CLUSTERTOOL_JOB": "old"}
    for options in (RankOptions(hosts="a"), RankOptions(master="a")):
        found = mpi_rank_environment(open_mpi(0, [1], **launchers, **users, **stale), options)
        assert {**launchers, **users}.items() <= found.items() and not stale.items() & found.items()


@pytest.mark.parametrize(
    ("variables", "devices", "selected"),
    [
        ({}, ("cpu", ()), {}),
        ({}, ("gpu", (0, 1)), {"FLAGS_selected_gpus": "1"}),
        ({}, ("npu", (0, 1, 2, 3)), {"FLAGS_selected_npus": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ("gpu", (0, 1)), {"FLAGS_selected_gpus": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ("gpu", (0, 1)), {"FLAGS_selected_gpus": "0"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("gpu", (0, 1)), {}),
    ],
)
def test_a_rank_has_a_device_of_its_node(
    variables: dict[str, str], devices: tuple[str, tuple[int, ...]], selected: dict[str, str]
) -> None:
    found = mpi_rank_environment(open_mpi(3, [4], **variables), RankOptions(hosts="a", devices=devices))
    about = {name: value for name, value in found.items() if "FLAGS" in name or "VISIBLE" in name}
    assert about == {**variables, **selected}
    assert ("PADDLE_DISTRI_BACKEND" in found) == (not selected) and found["LOCAL_RANK"] == "3"
    own = mpi_rank_environment(open_mpi(3, [4]), RankOptions(hosts="a", own_device=True))
    assert own["LOCAL_RANK"] == "0" and own["RANK"] == "3"


@pytest.mark.parametrize(
    ("environ", "options", "what"),
    [
        ({}, RankOptions(hosts="a"), "no mpirun has started this process"),
        (open_mpi(0, [1]), RankOptions(), "--under mpi needs the addresses of the ranks"),
        (open_mpi(0, [1]), RankOptions(hosts="a", master="a"), "--hosts and --master both"),
        ({"PMIX_RANK": "0"}, RankOptions(hosts="a"), "PMIx states the rank, but not the number of ranks"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, RankOptions(master="a"), "MPICH states no rank on the node"),
        (open_mpi(0, [1]), RankOptions(master="a", server_num=1), "--server-num and --worker-num need the addresses"),
        (open_mpi(0, [3]), RankOptions(hosts="a\nb:1"), "mpirun has started 3 ranks, and --hosts has 2 slots"),
        # Open MPI fills all processors of the first host where the file has no slots.
        (
            open_mpi(1, [2, 1]),
            RankOptions(hosts="a\nb\nc"),
            "mpirun has put rank 1 in place 1 of 2 on its node; by --hosts it has place 0 of 1 on b",
        ),
        # MPICH begins again with the first host.
        (
            {**mpich(2, [2, 2]), "MPI_LOCALRANKID": "1"},
            RankOptions(hosts="a\nb"),
            "by --hosts it has place 0 of 2 on b",
        ),
        (
            open_mpi(0, [4, 4]),
            RankOptions(hosts="a:4\nb:4", server_num=1, worker_num=2),
            "mpirun has started 4 on a, 4 on b: each node needs 1 pserver and 2 trainers",
        ),
        (open_mpi(0, [2, 1]), RankOptions(hosts="a:2\nb:1", worker_num=1), "mpirun has started 2 on a, 1 on b"),
    ],
)
def test_wrong_variables_and_options_are_an_error(environ: dict[str, str], options: RankOptions, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        mpi_rank_environment(environ, options)
    assert what in caught.value.what and caught.value.fix


@pytest.mark.parametrize(
    ("hosts", "kind"), [("", ClustertoolError), ("a color=red", ClustertoolError), ("a;b", ClustertoolError)]
)
def test_a_wrong_hostfile_is_an_error(hosts: str, kind: type) -> None:
    with pytest.raises(kind) as caught:
        mpi_rank_environment(open_mpi(0, [1]), RankOptions(hosts=hosts))
    assert "--hosts" in caught.value.what


def test_ports_above_the_highest_are_an_error() -> None:
    with pytest.raises(ClustertoolError, match="65536"):
        mpi_rank_environment(open_mpi(0, [2]), RankOptions(65535, hosts="a"))


@pytest.mark.parametrize("python", python_cases())
def test_a_rank_of_mpirun_needs_the_standard_library_only(python: str, tmp_path: Path) -> None:
    """As a real process, without the packages of this environment, with each Python from 3.8 on.

    Errors with the oldest and the newest one, which lack the most of what the others have.
    """
    program = [python, "-S", "-m", "clustertool.cli.launchers.rank_program", "--under", "mpi"]
    environ = {**open_mpi(1, [2]), "PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin"}
    environ["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")  # so that only the first of the commands compiles

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*program, *arguments], env={**environ, **more}, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    (tmp_path / "H").write_text("127.0.0.1 slots=2\n")
    shown = ("--no-python", "sh", "-c", 'echo "$RANK $PADDLE_CURRENT_ENDPOINT $MASTER_PORT $0"; exit 7', "a b")
    done = run("--hosts", "H", "--start-port", "7000", *shown)
    assert (done.returncode, done.stdout) == (7, "1 127.0.0.1:7001 7002 a b\n"), done.stderr
    done = run("--master", "m", "--start-port", "7000", *shown)
    assert (done.returncode, done.stdout) == (7, "1  7000 a b\n"), done.stderr
    if python not in (pythons()[0], pythons()[-1]):
        return
    (tmp_path / "H").write_text("192.0.2.1 slots=2\n")  # of no machine
    done = run("--hosts", "H", *shown)
    assert done.returncode == 64 and "by --hosts this rank is on 192.0.2.1, but mpirun has put it on" in done.stderr
    done = run("--hosts", "none", *shown)
    assert done.returncode == 65 and "error: --hosts none: No such file or directory on " in done.stderr
    done = run(*shown)
    assert done.returncode == 64 and "--hosts FILE" in done.stderr and "--master HOST" in done.stderr


def test_a_rank_imports_nothing_that_runs_jobs() -> None:
    code = "import sys, clustertool.cli.launchers.rank_program as p; print(*sorted(sys.modules))"
    done = subprocess.run(
        ["python3", "-S", "-c", code],
        env={"PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    ours = [name for name in done.stdout.split() if name.startswith("clustertool.")]
    assert ours, done.stderr
    parts = {"verbs", "actions", "engines", "fleet", "ssh", "watch", "show", "api"}
    assert not [name for name in ours if name.split(".")[1] in parts]
    assert not [
        name
        for name in ours
        if name.startswith("clustertool.node.") and name.split(".")[2] not in ("devices", "system")
    ]
