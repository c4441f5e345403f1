"""Jobs of a user without root in containers of podman: no failure leaves a container or a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import containers
from tests.cli import LabSite, Running
from tests.lab.lab import Lab

USER = "ann"
WAITS = """\
trap '' TERM
setsid sleep 1000 &
echo ready $CLUSTERTOOL_RANK $(id -u) $(pwd)
while ! [ -e what$CLUSTERTOOL_RANK ]; do sleep 0.05; done
. ./what$CLUSTERTOOL_RANK
"""


@pytest.fixture(scope="module")
def cluster(
    module_lab: Callable[..., Lab], tmp_path_factory: pytest.TempPathFactory, container_image: Path
) -> Iterator[LabSite]:
    etc = tmp_path_factory.mktemp("etc")
    nodes = {node: containers.container_node(etc / str(node), users=(USER,)) for node in range(2)}
    made = LabSite(etc / "site", module_lab(2, nodes=nodes))
    containers.put_image(made, container_image, users=(USER,), nodes=[0])
    containers.copy_image(made, users=(USER,))
    made.conf(USER=USER, CONTAINER=containers.settings(), GRACE=2, LOSS_TIMEOUT=3, CONNECT_TIMEOUT=5)
    made.workspace(train_sh=WAITS)
    yield made
    made.close()


def start(site: LabSite) -> Running:
    command = site.start("run", "-w", "job", "--script", "sh train.sh", "--all-ranks")
    for rank in range(2):
        command.says(rf"\bready {rank} 4001 /run/home/ann/clustertool/JOB")
    return command


def gone(site: LabSite) -> None:
    """No process of a job is left, and no container. The processes that keep the user's namespaces are one for each node."""
    site.gone(60.0)
    containers.no_containers(site, users=(USER,))
    names = [(process.node, process.name, process.argv[-1:]) for process in site.all_processes()]
    pauses = [node for node, name, last in names if last == ("-P",) or name == "podman pause"]
    assert sorted(pauses) == [0, 1]


def strike(site: LabSite, name: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to that process on node1. rank: the program; client: `podman run`."""
    if name == "rank":
        found = [process for process in site.processes(1) if process.argv == ("sh", "train.sh")]
    elif name == "client":
        found = [process for process in site.processes(1) if process.name == "podman" and "run" in process.argv]
    else:
        found = [process for process in site.processes(1) if process.name == name]
    assert found
    for process in found:
        os.kill(process.pid, number)


@pytest.mark.chaos
def test_a_rank_exits(cluster: LabSite) -> None:
    command = start(cluster)
    job = command.says(r"^job (\S+):")
    done = cluster.lab.exec(1, ["sh", "-c", f"echo exit 7 >/run/home/ann/clustertool/JOB{job}/what1"])
    assert done.returncode == 0, done.stderr
    ended = command.wait().ends(7)
    assert ended.last == "clustertool: exit 7 (job): trainer 1 on node1: exit code 7"
    gone(cluster)


def test_ctrl_c_and_ranks_that_ignore_term(cluster: LabSite) -> None:
    command = start(cluster)
    command.signal(signal.SIGINT)
    done = command.wait().ends(130)
    assert "node[0-1]: clean" in done.err
    gone(cluster)


RUNTIME = [pytest.param(name, 137, marks=pytest.mark.chaos) for name in ("client", "conmon")]


@pytest.mark.parametrize(
    ("name", "code"), [("rank", 137), *RUNTIME, pytest.param("ct-supervisor", 75, marks=pytest.mark.chaos)]
)
def test_a_process_is_killed(cluster: LabSite, name: str, code: int) -> None:
    command = start(cluster)
    strike(cluster, name)
    command.wait().ends(code)
    gone(cluster)


@pytest.mark.chaos  # test_container_failures.py has it with root
def test_stop_where_supervisor_and_guard_are_killed(cluster: LabSite) -> None:
    """The agent of `stop` finds the ranks and containers by itself."""
    command = start(cluster)
    strike(cluster, "ct-supervisor", signal.SIGSTOP)
    strike(cluster, "ct-guard")
    strike(cluster, "ct-supervisor")
    cluster.inv("stop").ends(0)
    assert command.wait().code in (75, 143), "the loss of node1, or the stop on node0, is known first"
    gone(cluster)
