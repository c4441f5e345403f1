"""clusterrun --under: the command line, and under slurm, each task gets what `run` would give its rank."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.cli.launchers.rank_program import RankOrder, read
from clustertool.errors import UsageError
from clustertool.model.planning.launched_rank import RankOptions
from clustertool.model.slurm import task_rank
from clustertool.model.slurm.task_rank import Task, read_task
from tests import forked
from tests.node.harness import python_cases, pythons
from tests.unit.cases import cluster_of, plan_of

TOP = Path(__file__).parents[2]
STEP = {"SLURM_JOB_ID": "812", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "n[1-2],gpu"}
SHAPE = (4, 2, 1)  # tasks of the three nodes
# What belongs to the directory and the id of a job that the tool has started, and the interface that a probe has found.
NOT_HERE = {
    *(f"CLUSTERTOOL_{name}" for name in ("JOB", "MARK", "OUTPUT", "SHARDS")),
    *("TORCHELASTIC_ERROR_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
}


def task(rank: int, **more: str) -> dict[str, str]:
    """The variables of one task of srun."""
    node = next(node for node in range(len(SHAPE)) if rank < sum(SHAPE[: node + 1]))
    numbers = {"PROCID": rank, "NTASKS": sum(SHAPE), "LOCALID": rank - sum(SHAPE[:node]), "NODEID": node}
    placed = {f"SLURM_{name}": str(number) for name, number in numbers.items()}
    return {**STEP, **placed, "SLURM_STEP_TASKS_PER_NODE": "4,2,1", **more}


def rank_environment(environ: dict[str, str], start_port: int = 0, own: bool = False) -> dict[str, str]:
    return task_rank.rank_environment(environ, RankOptions(start_port, own))


def test_every_task_has_the_environment_of_its_rank_in_a_job_of_run() -> None:
    cluster = cluster_of([{"host": name, "address": name, "nproc": n} for name, n in zip(("n1", "n2", "gpu"), SHAPE)])
    made = plan_of(replace(cluster, start_port=7000, device_kind="cpu"))
    for process in made.processes:
        expected = {name: value for name, value in process.env if name not in NOT_HERE}
        found = rank_environment(task(process.rank), start_port=7000)
        for name, value in expected.items():
            assert found[name] == value or made.job_id in value, name
        assert "CLUSTERTOOL_JOB" not in found and found["SLURM_PROCID"] == found["RANK"] == str(process.rank)
    ports = [process.endpoint for process in made.processes]
    assert ports == [*(f"n1:{7000 + n}" for n in range(4)), "n2:7000", "n2:7001", "gpu:7000"]
    assert found["MASTER_PORT"] == "7004"


def test_ports_depend_on_the_step_only() -> None:
    ports = {rank_environment(task(rank))["PADDLE_TRAINER_ENDPOINTS"] for rank in range(7)}
    assert len(ports) == 1
    other = rank_environment(task(0, SLURM_JOB_ID="813"))["PADDLE_TRAINER_ENDPOINTS"]
    second = rank_environment(task(0, SLURM_STEP_ID="2"))["PADDLE_TRAINER_ENDPOINTS"]
    assert other not in ports and second not in ports
    for job in (0, 299, 99999):
        master = int(rank_environment(task(0, SLURM_JOB_ID=str(job)))["MASTER_PORT"])
        assert 10000 <= master < 32768  # below the kernel's own ports


def test_variables_of_the_task_stay_but_for_those_that_launchers_compute() -> None:
    given = {"PADDLE_PG_TIMEOUT": "9", "FLAGS_x": "1", "HOME": "/h", "OMPI_MCA_btl": "self"}
    stale = {"PADDLE_MASTER": "old:1", "MASTER_ADDR": "old", "TRAINING_ROLE": "PSERVER", "OMPI_COMM_WORLD_RANK": "9"}
    found = rank_environment(task(5, **given, **stale))
    assert given.items() <= found.items() and not stale.items() & found.items()


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, "1"), ({"SLURM_CPUS_PER_TASK": "6"}, "6"), ({"SLURM_CPUS_PER_TASK": "6", "OMP_NUM_THREADS": "3"}, "3")],
)
def test_threads_are_the_processors_of_a_task(variables: dict[str, str], threads: str) -> None:
    assert rank_environment(task(0, **variables))["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("variables", "selected"),
    [
        ({}, {}),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"FLAGS_selected_gpus": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "2"}, {"FLAGS_selected_gpus": "0"}),  # one for each task
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"FLAGS_selected_gpus": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, {"CUDA_VISIBLE_DEVICES": "MIG-b", "FLAGS_selected_gpus": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, {"FLAGS_selected_gpus": "3"}),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, {"FLAGS_selected_npus": "3"}),
    ],
)
def test_a_rank_has_a_device_of_those_that_slurm_gave(variables: dict[str, str], selected: dict[str, str]) -> None:
    found = rank_environment(task(3, **variables))
    about = {name: value for name, value in found.items() if "FLAGS" in name or "VISIBLE" in name}
    assert about == {**variables, **selected}
    assert ("PADDLE_DISTRI_BACKEND" in found) == (not selected) and found["LOCAL_RANK"] == "3"
    assert rank_environment(task(3, **variables), own=True)["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    "name", ["PROCID", "NTASKS", "LOCALID", "NODEID", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "JOB_ID"]
)
def test_outside_of_a_step_the_error_names_srun(name: str) -> None:
    environ = task(0)
    del environ[f"SLURM_{name}"]
    with pytest.raises(UsageError) as caught:
        read_task(environ)
    assert caught.value.what == f"SLURM_{name} is not set: no step of Slurm has started this process"
    assert caught.value.fix.startswith("start it as a task of srun")


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', no number"),
        ({"SLURM_NTASKS": "8"}, "contradict each other"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, "contradict each other"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "SLURM_STEP_NODELIST cannot be read"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4;2"}, "SLURM_STEP_TASKS_PER_NODE is '4;2'"),
        ({"SLURM_NODEID": "3"}, "contradict each other"),
        ({"SLURM_PROCID": "4"}, "srun has numbered its tasks across the nodes"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "srun has numbered its tasks across the nodes"),
    ],
)
def test_wrong_variables_are_an_error(variables: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_task({**task(0), **variables})
    assert what in caught.value.what


def test_tasks_per_node_may_be_repeated() -> None:
    environ = {**task(3), "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
    assert read_task(environ) == Task(3, 1, 1, ("n1", "n2", "gpu"), (2, 2, 3), "812.1")


@pytest.mark.parametrize(
    ("line", "order"),
    [
        ("--under slurm t.py --under x -m", RankOrder("slurm", RankOptions(), "", "", ("t.py", "--under", "x", "-m"))),
        (
            "--start_port=7000 --under=slurm -m pkg.mod a",
            RankOrder("slurm", RankOptions(7000), "", "module", ("pkg.mod", "a")),
        ),
        (
            "--under slurm --virtual-local-rank --no_python -- ./prog -x",
            RankOrder("slurm", RankOptions(own_device=True), "", "no-python", ("./prog", "-x")),
        ),
        (
            "--hosts H --under mpi --server_num=1 --worker-num 2 t.py --hosts x",
            RankOrder("mpi", RankOptions(server_num=1, worker_num=2), "H", "", ("t.py", "--hosts", "x")),
        ),
        (
            "--under mpi --trainer-num 2 --master=a t.py",
            RankOrder("mpi", RankOptions(master="a", worker_num=2), "", "", ("t.py",)),
        ),
        ("t.py --under slurm", None),
        ("--ips a,b t.py", None),
        ("--start-port 7000 t.py", None),
        ("--master a:7000 --nnodes 2 t.py", None),
        ("--master", None),
        ("", None),
        ("--under", None),  # the verb's parser has the message
        ("--start-port", None),
    ],
)
def test_the_command_line_of_a_rank(line: str, order: RankOrder | None) -> None:
    assert read(line.split()) == order


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--under x t.py", "--under 'x' is not known"),
        ("--under slurm --hosts H t.py", "--hosts has no effect with --under slurm"),
        ("--under slurm --server-num 1 t.py", "--server-num has no effect with --under slurm"),
        ("--under mpi --hosts= t.py", "--hosts needs a value"),
        ("--under mpi --hosts", "--hosts needs a value"),
        ("--under mpi --worker-num 0 t.py", "--worker-num '0' is not a number of processes"),
        ("--under mpi --trainer-num x t.py", "--worker-num 'x' is not a number of processes"),
        ("--under slurm", "what is to be run?"),
        ("--under slurm --start-port 0 t.py", "--start-port '0'"),
        ("--under slurm --nnodes 2 t.py", "--nnodes has no effect with --under"),
        ("--under slurm -m --no-python pkg", "--no-python starts the program itself"),
    ],
)
def test_a_wrong_command_line_of_a_rank(line: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line.split())
    assert what in caught.value.what


@pytest.mark.parametrize("python", python_cases())
def test_a_rank_needs_the_standard_library_only(python: str, tmp_path: Path) -> None:
    """As a real process, without the packages of this environment, with each Python from 3.8 on.

    Errors with the oldest and the newest one, which lack the most of what the others have.
    """
    program = [python, "-S", "-m", "clustertool.cli.launchers.rank_program", "--under", "slurm"]
    environ = {**task(5), "PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin"}
    environ["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")  # so that only the first of the commands compiles

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*program, *arguments], env={**environ, **more}, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = run(
        "--start-port", "7000", "--no-python", "sh", "-c", 'echo "$RANK $PADDLE_CURRENT_ENDPOINT $0"; exit 7', "a b"
    )
    assert (done.returncode, done.stdout) == (7, "5 n2:7001 a b\n"), done.stderr
    if python not in (pythons()[0], pythons()[-1]):
        return
    none = run("--no-python", "./none")
    assert none.returncode == 127
    assert (
        none.stderr.splitlines()[-1]
        == "clustertool: exit 127 (job): ./none cannot be started: No such file or directory"
    )
    (tmp_path / "file").touch()
    assert run("--no-python", "./file").returncode == 126
    wrong = run("t.py", SLURM_PROCID="x")
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (64, "error: SLURM_PROCID is 'x', no number")


def test_the_installed_program_is_both() -> None:
    program = str(Path(sys.executable).with_name("clusterrun"))
    done = subprocess.run(
        [program, "--ips", "a", "--under", "slurm", "t.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 64 and "--under makes one rank of a job that runs" in done.stderr
    for line, what in (
        ("--under", "--under needs a value"),
        ("--under x t.py", "--under 'x' is not known"),
        ("--hosts a:x t.py", "slots 'x' is not valid"),
    ):
        done = forked.complete([program, *line.split()])
        assert done.returncode == 64 and what in done.stderr
