"""Failures of jobs in containers of a user without root: neither a process nor a container of the user is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import containers
from tests.cli import LabSite, Process

USER = "ann"
PROGRAM = """\
sleep 1000 &
echo ready $RANK
while :; do sleep 0.1; done
"""
STUBBORN = "trap '' TERM\n" + PROGRAM


@pytest.fixture
def two(site: Callable[..., LabSite], tmp_path: Path, container_image: Path) -> LabSite:
    nodes = {node: containers.container_node(tmp_path / f"etc{node}", users=(USER,)) for node in range(2)}
    made = site(2, nodes=nodes)
    containers.put_image(made, container_image, users=(USER,), nodes=[0])
    containers.copy_image(made, users=(USER,))
    made.conf(USER=USER, CONTAINER=containers.settings(), GRACE=2, LOSS_TIMEOUT=4)
    return made


def named(site: LabSite, name: str) -> list[Process]:
    return [process for process in site.processes(1) if process.name == name]


def pauses(site: LabSite) -> list[int]:
    """The processes that keep the user's namespaces: no part of a job."""
    return [process.pid for process in site.all_processes() if process.argv[-1:] == ("-P",)]


def kill(processes: list[Process], number: int = signal.SIGKILL) -> None:
    assert processes
    for process in processes:
        os.kill(process.pid, number)


@pytest.mark.parametrize("fault", ["rank", "client", "conmon", "supervisor", "stubborn", "caretakers"])
def test_failure(two: LabSite, fault: str) -> None:
    folder = two.workspace(train_sh=STUBBORN if fault == "stubborn" else PROGRAM)
    command = two.start("run", "-w", folder, "--script", "sh train.sh", "--all-ranks")
    for rank in range(2):
        command.says(rf"\bready {rank}$")
    before = pauses(two)
    if fault == "stubborn":
        command.signal(signal.SIGINT)
    elif fault == "rank":
        kill([process for process in two.processes(1) if process.argv == ("sh", "train.sh")])
    elif fault == "client":
        kill([process for process in named(two, "podman") if "run" in process.argv])
    elif fault == "caretakers":
        kill(named(two, "ct-supervisor"), signal.SIGSTOP)
        kill(named(two, "ct-guard"))
        kill(named(two, "ct-supervisor"))
        two.inv("stop").ends(0)
    else:
        kill(named(two, {"conmon": "conmon", "supervisor": "ct-supervisor"}[fault]))
    assert command.wait(60).code != 0
    two.gone(30.0)
    assert pauses(two) == before
    for node in range(2):
        assert containers.containers(two, node, USER) == []
