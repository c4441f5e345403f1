"""Jobs of mode mpi on machines of their own: ranks, environment and losses equal those by ssh, without ssh between nodes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import mpi
from tests.cases import hello, small_word2vec
from tests.cli import HELLO, REPO, Done, LabSite
from tests.lab.lab import Node
from tests.mpi import MPICH, OPENMPI, Mpi

NO_SSH = Node(hide=("ssh", "rsh"))  # a launcher that needs one of them fails
NEWEST = [pytest.param(kind, id=kind.name, marks=pytest.mark.chaos) for kind in mpi.NEWEST]
WHOLE = r"^trained steps=\d+ loss=([0-9.]+)"  # of a whole training; the other lines of word2vec come by the clock
ENVIRONMENT = """
    import json, os, resource, sys
    about = {
        "env": dict(os.environ), "argv": sys.argv[1:], "cwd": os.getcwd(), "stdin": os.readlink("/proc/self/fd/0"),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "pgrp": os.getpgid(0), "umask": os.umask(0),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    }
    path = os.environ["CLUSTERTOOL_OUTPUT"]
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/{os.environ['CLUSTERTOOL_RANK']}.json", "w") as file:
        json.dump(about, file)
"""
LAUNCHERS_OWN = re.compile(
    "OMPI_|ORTE_|FI_|HFI_|PMIX_|PRTE_|PMI_|PMI2_|HYD|MPI|GFORTRAN|OPAL_|IPATH_|PSM|PWD|OLDPWD|SHLVL|_$"
)
DIFFERENT = re.compile(
    r"CLUSTERTOOL_JOB$|CLUSTERTOOL_MARK$|.*PORT|.*ENDPOINT|PADDLE_MASTER|.*_JOB_ID|TORCHELASTIC_RUN_ID|CLUSTERTOOL_OUTPUT|CLUSTERTOOL_SHARDS"
    r"|KUBEFLOW_TRAINER_|SSH_"
)


@pytest.fixture
def nodes(site: Callable[..., LabSite]) -> Callable[..., LabSite]:
    """nodes(MPICH) -> three machines without an ssh client, whose `mpirun` is MPICH's."""

    def make(kind: Mpi, count: int = 3, **options: Any) -> LabSite:
        keys = {name: options.pop(name) for name in list(options) if name.isupper() or name in ("python", "prelude")}
        special = dict.fromkeys(range(count), NO_SSH)
        return mpi.use(site(count, nodes=special, **options), kind, **keys)

    return make


def logs(site: LabSite, job: str) -> list[dict[str, str]]:
    """For each node, its logs by name."""
    folders = [next(path for path in site.jobs(node) if path.name == f"JOB{job}") for node in range(site.count)]
    return [{path.name: path.read_text() for path in sorted((folder / "log").glob("*log.*"))} for folder in folders]


def losses(site: LabSite, job: str, pattern: str = r"\bloss=([0-9.]+)") -> dict[str, list[str]]:
    """Of each trainer, in the order of its steps."""
    found = {name: text for its in logs(site, job) for name, text in its.items() if name.startswith("worker")}
    return {name: re.findall(pattern, text, re.M) for name, text in found.items()}


def nothing_else(site: LabSite, before: list[set[str]]) -> None:
    """No process is left, no file of a session, and no connection was made from a node to a node's sshd."""
    site.gone()
    mpi.no_new_files(site, before, range(site.count))
    assert not any(mpi.strangers(site, node) for node in range(site.count))


@pytest.mark.parametrize("kind", [*mpi.each(OPENMPI), *NEWEST])
def test_all_reduce(nodes: Callable[..., LabSite], kind: Mpi) -> None:
    """Two ranks on each of two nodes: the sum of all, the losses of one process, and each rank where the plan has it."""
    two = nodes(kind, 2)
    before = [mpi.files(two, node) for node in range(2)]
    folder = REPO / "workspaces/mpi-allreduce"
    done = two.inv("run", "-w", folder, "--nproc-per-node", 2, "--all-ranks", "--rank", 3).ends(0)
    assert "mpi, 4 trainers on 2 nodes" in done.err
    found = logs(two, done.job)
    for node, its in enumerate(found):
        ranks = [2 * node, 2 * node + 1]
        assert [name for name in its if name.startswith("worker")] == [f"workerlog.{rank}" for rank in ranks]
        for rank in ranks:
            assert its[f"workerlog.{rank}"].startswith(f"rank={rank} size=4 sum=10 host=node{node}\n")
    nothing_else(two, before)
    one = two.inv("run", "-w", folder, "--only", "node0").ends(0)
    alone = re.findall(r"\bloss=([0-9.]+)", (two.job_dir(0, one.job) / "log/workerlog.0").read_text())
    curves = losses(two, done.job)
    assert one.err.count("1 trainer on 1 node") and len(alone) == 10
    assert curves == {f"workerlog.{rank}": alone for rank in range(4)}
    nothing_else(two, before)


def test_the_same_ranks_and_environment_as_by_ssh(nodes: Callable[..., LabSite]) -> None:
    """Nodes with 1 and 3 ranks. What differs is what the launcher adds, and what differs between two jobs."""
    two = nodes(OPENMPI, 2, python=False)
    hosts = [{"host": two.name(node), "nproc": size} for node, size in enumerate((1, 3))]
    two.conf(HOSTS=hosts, PRELUDE=OPENMPI.prelude(python=False))
    two.workspace(train_py=ENVIRONMENT)
    (two.folder / "job/data").mkdir()
    for number in range(4):
        (two.folder / f"job/data/part-{number}").write_text("x")
    options = ("--script", "train.py --lr 'a b' $HOME", "--shards", "data/part-*", "--env", "WORDS=two words; $HOME")
    found = {}
    for way in ("collective", "mpi"):
        done = two.inv("run", "-w", "job", "--mode", way, *options).ends(0)
        folders = [path for node in range(2) for path in two.jobs(node) if path.name == f"JOB{done.job}"]
        found[way] = {
            int(path.stem): json.loads(path.read_text().replace(done.job, "JOB")) | {"node": node}
            for node, folder in enumerate(folders)
            for path in (folder / "output").glob("*.json")
        }
    assert {rank: its["node"] for rank, its in found["mpi"].items()} == {0: 0, 1: 1, 2: 1, 3: 1}
    assert sorted(found["collective"]) == sorted(found["mpi"])
    for rank, by_ssh in found["collective"].items():
        by_mpi = found["mpi"][rank]
        for name in ("argv", "cwd", "stdin", "files", "umask", "node"):
            assert by_mpi[name] == by_ssh[name], (rank, name)
        assert by_mpi["env"][OPENMPI.rank] == str(rank)
        ours, theirs = by_ssh["env"], by_mpi["env"]
        names = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
        assert {name for name in names if not LAUNCHERS_OWN.match(name) and not DIFFERENT.match(name)} == set()
        assert set(ours) <= set(theirs), "the contract's environment, in addition to the launcher's"


@pytest.mark.chaos  # test_mpi_page.py has pservers of the tool, test_jobs_detached.py trains word2vec
@pytest.mark.parametrize("kind", mpi.each())
def test_word2vec_with_pservers_of_the_tool(nodes: Callable[..., LabSite], kind: Mpi) -> None:
    """Trainers wait for the pservers; these end after mpirun. All losses are those by ssh."""
    python = f"export PATH={Path(sys.executable).parent}:$PATH"
    two = nodes(kind, 2, python=False, prelude=(python, *kind.prelude(python=False)))
    before = [mpi.files(two, node) for node in range(2)]
    folder = small_word2vec(two.folder)
    options = ("--server-num", 1, "--worker-num", 1)
    by_ssh = two.inv("run", "-w", folder, "--mode", "ps", *options).ends(0)
    done = two.inv("run", "-w", folder, "--mode", "mpi", *options).ends(0)
    assert "2 pservers, 2 trainers on 2 nodes" in done.err
    assert "stopped by clustertool" not in done.err, "a pserver that is ended after training is no victim"
    curves = losses(two, done.job, WHOLE)
    assert curves == losses(two, by_ssh.job, WHOLE)
    assert sorted(curves) == [f"workerlog.{rank}" for rank in range(2)] and all(curves.values())
    assert [path.name for path in sorted((two.jobs(0)[-1] / "output").iterdir())] == ["model.npz", "word_dict.txt"]
    nothing_else(two, before)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", mpi.each())
def test_nodes_that_share_one_home(nodes: Callable[..., LabSite], kind: Mpi) -> None:
    three = nodes(kind, shared_home=True)
    before = [mpi.files(three, node) for node in range(3)]
    done = three.inv("run", "-w", REPO / "workspaces/mpi-allreduce", "--all-ranks", "--rank", 2).ends(0)
    assert sorted(re.findall(r"rank=(\d) size=3 sum=6 host=node(\d)", done.out)) == [("0", "0"), ("1", "1"), ("2", "2")]
    nothing_else(three, before)


@pytest.mark.chaos  # test_jobs_run.py has it without mpirun
def test_two_entries_of_one_machine_are_two_nodes(nodes: Callable[..., LabSite]) -> None:
    """One address and one home: each has a daemon of its own, and ranks are where the plan has them."""
    one = nodes(OPENMPI, 1)
    one.conf(HOSTS=["node0", "node0"], PRELUDE=OPENMPI.prelude())
    before = [mpi.files(one, 0)]
    done = one.inv(
        "run", "-w", REPO / "workspaces/mpi-allreduce", "--nproc-per-node", 2, "--all-ranks", "--rank", 3
    ).ends(0)
    assert sorted(re.findall(r"^\[trainer (\d) node0#(\d)\] rank=(\d) size=4 sum=10", done.out, re.M)) == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "2"),
        ("3", "1", "3"),
    ]
    nothing_else(one, before)


def test_different_implementations_are_found_before_the_start(nodes: Callable[..., LabSite]) -> None:
    two = nodes(OPENMPI, 2, python=False)
    for node in range(2):
        MPICH.put_into(two.home(node))
    other = f"[ $(hostname) = node1 ] && {MPICH.prelude(python=False)[0]}"
    two.conf(PRELUDE=[*OPENMPI.prelude(python=False), other, "true"])
    two.workspace(train_py="print('started')")
    done = two.inv("run", "-w", "job", "--mode", "mpi").ends(69)
    text = done.out + done.err
    assert "4.1.4" in text or "Open MPI" in text
    assert "MPICH" in text and "node1" in text
    assert not any(two.jobs(node) for node in range(2))


@pytest.mark.chaos
def test_nodes_without_mpirun(nodes: Callable[..., LabSite]) -> None:
    three = nodes(OPENMPI, python=False)
    (three.home(2) / "openmpi/mpirun").unlink()
    hidden = "export PATH=" + str(three.lab.dir)  # without /usr/bin, whose mpirun is there
    three.conf(PRELUDE=[*OPENMPI.prelude(python=False), f"[ $(hostname) = node2 ] && {hidden}", "true"])
    three.workspace(train_py="print('started')")
    done = three.inv("run", "-w", "job", "--mode", "mpi").ends(69)
    assert re.search(r"node2.*mpirun|mpirun.*node2", done.out + done.err, re.S)
    assert not any(three.jobs(node) for node in range(3))


@pytest.mark.chaos  # test_the_same_ranks_and_environment_as_by_ssh has it with Open MPI
def test_hello(nodes: Callable[..., LabSite]) -> None:
    """Programs that are not of MPI: the same lines by MPICH as by ssh."""
    two = nodes(MPICH, 2, python=False)

    def lines(mode: str) -> dict[int, dict[str, str]]:
        done: Done = two.inv("run", "-w", HELLO, "--mode", mode, "--nproc-per-node", 2, "--all-ranks").ends(0)
        found = hello(done)
        for its in found.values():
            for name in ("pid", "job", "endpoint"):
                del its[name]
        return found

    by_ssh = lines("collective")
    assert lines("mpi") == by_ssh and len(by_ssh) == 4
