"""A real torchrun next to the tool on the same unmodified scripts: the same environment, the same results.

The differences of the environments are those that a table in docs/frameworks.md lists, and no other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli import USER, Done, LoopSite
from tests.differences import TORCHRUN, listed
from tests.frameworks.examples import TIMEOUT, activate
from tests.free_ports import free_port

PROGRAMS = Path(__file__).with_name("programs")
SIMULATED = {"PYTHONPATH": str(PROGRAMS / "simulated")}
DEVICES = ["4", "6"]

Reports = dict[int, dict[str, Any]]


@pytest.mark.parametrize(
    "nodes, each, meet",
    [(1, 2, False), *(pytest.param(*one, marks=pytest.mark.frameworks) for one in ((1, 2, True), (2, 1, True)))],
)
def test_a_rank_finds_what_torchrun_gives_it(site, venv, scratch, nodes, each, meet):
    """meet: the ranks import torch and meet there; test_torch.py has ranks that meet, too."""
    torch, more = venv("digits-torch"), {"MEET": "1"} if meet else {}
    ours = site(nodes).conf(PRELUDE=activate(torch), ENV=more)
    there = reports_of(outs(torchrun(torch, "environ.py", nodes, each, scratch, more, address=ours.name(0))))
    here = reports_of(ranks_of(run(ours, "environ.py", each).ends(0)))
    not_of_torchrun = {*launched({}, scratch), "LC_CTYPE"}  # which Python sets where LANG is not set
    found = set()
    for rank in range(nodes * each):
        mine, theirs = here[rank]["env"], there[rank]["env"]
        names = theirs.keys() - not_of_torchrun
        assert {"RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"} <= names
        assert ("OMP_NUM_THREADS" in names) == ("OMP_NUM_THREADS" in mine) == (each > 1)
        assert mine["NODE_RANK"] == theirs["GROUP_RANK"]
        found |= {name for name in names if mine.get(name) != theirs[name]}
    assert found == listed(TORCHRUN) - {"CUDA_VISIBLE_DEVICES"}, "there are no devices here"
    for reports in (here, there):  # MASTER_ADDR and MASTER_PORT mean one thing: where all ranks meet
        assert len({(its["env"]["MASTER_ADDR"], its["env"]["MASTER_PORT"]) for its in reports.values()}) == 1
        if not meet:
            continue
        assert {its["first"] for its in reports.values()} == {reports[0]["pid"]}
        assert all(its["ranks"] == [1.0] * nodes * each for its in reports.values())


@pytest.mark.frameworks
def test_data_parallel_training_on_the_device_of_local_rank(site, venv, scratch):
    """Devices are simulated; tests/gpu has real ones."""
    torch = venv("digits-torch")
    shell = {**SIMULATED, "CUDA_VISIBLE_DEVICES": ",".join(DEVICES)}
    there = results(outs(torchrun(torch, "ddp.py", 1, 2, scratch, shell)))
    assert [line.split()[:4] for line in there] == [["rank", str(at), "device", DEVICES[at]] for at in range(2)]
    one = site(1)
    node = {"host": one.servers[0].address, "port": one.servers[0].port, "user": USER, "devices": ",".join(DEVICES)}
    keys = {"HOSTS": [node], "DEVICE_KIND": "gpu", "PRELUDE": activate(torch), "ENV": SIMULATED}
    assert results(ranks_of(run(one.conf(**keys), "ddp.py").ends(0))) == there
    own = run(one.conf(**keys, DEVICE_VISIBILITY="own"), "ddp.py").ends(0)
    assert list(ranks_of(own)) == ["needs 2 GPUs, found 1"] * 2, "it ends without training, as programs of tutorials do"


@pytest.mark.frameworks
@pytest.mark.parametrize("nodes, each", [(1, 2), (2, 1)])
def test_fully_sharded_training(site, venv, scratch, nodes, each):
    torch = venv("digits-torch")
    there = results(outs(torchrun(torch, "fsdp.py", nodes, each, scratch)))
    assert len(there) == 5
    assert results(ranks_of(run(site(nodes).conf(PRELUDE=activate(torch)), "fsdp.py", each).ends(0))) == there


@pytest.mark.frameworks
def test_a_recorded_exception(site, venv, scratch):
    """torchrun shows it in its table of failures, the tool in its verdict and in status."""
    torch = venv("digits-torch")
    [theirs] = torchrun(torch, "recorded.py", 1, 2, scratch)
    assert theirs.returncode == 1
    assert "ValueError: bad shard of rank 1" in theirs.stderr
    one = site(1).conf(PRELUDE=activate(torch))
    ours = run(one, "recorded.py", 2).ends(1)
    assert f"trainer 1 on {one.name(0)} ended with exit code 1: ValueError: bad shard of rank 1\n" in ours.err
    processes = one.inv("status", "--json").ends(0).json["processes"]
    assert [process["note"] for process in processes] == ["", "ValueError: bad shard of rank 1"]


# -- both launchers -------------------------------------------------------------------------------------------------------


def run(site: LoopSite, program: str, each: int | None = None) -> Done:
    folder = site.workspace()
    shutil.copy(PROGRAMS / program, folder / "train.py")
    number = ["--nproc-per-node", each] if each else []
    return site.inv("run", "-w", folder, *number, "--all-ranks", timeout=TIMEOUT)


def ranks_of(done: Done) -> Iterable[str]:
    return (line.partition("] ")[2] for line in done.lines("[trainer "))


def launched(shell: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The environment of torchrun."""
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TMPDIR": str(scratch)}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", **shell}


def torchrun(
    venv: Path,
    program: str,
    nodes: int,
    each: int,
    scratch: Path,
    shell: Mapping[str, str] | None = None,
    address: str = "127.0.0.1",
) -> list[subprocess.CompletedProcess[str]]:
    """One torchrun on each node, as its users start it by hand."""
    port = free_port()
    options = ["--nproc-per-node", each, "--nnodes", nodes, "--master-addr", address, "--master-port", port]
    argv = [str(venv / "bin" / "torchrun"), *map(str, options)]
    launchers = [
        subprocess.Popen(
            [*argv, "--node-rank", str(node), str(PROGRAMS / program)],
            env=launched(shell or {}, scratch),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for node in range(nodes)
    ]
    try:
        texts = [launcher.communicate(timeout=TIMEOUT) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # it ends its ranks, if it has not ended
            launcher.wait(TIMEOUT)
    return [subprocess.CompletedProcess(argv, one.returncode, *text) for one, text in zip(launchers, texts)]


def outs(launchers: list[subprocess.CompletedProcess[str]]) -> list[str]:
    assert [one.returncode for one in launchers] == [0] * len(launchers), [one.stderr for one in launchers]
    return [line for one in launchers for line in one.stdout.splitlines()]


def results(lines: Iterable[str]) -> list[str]:
    return sorted(line for line in lines if " loss " in line)


def reports_of(lines: Iterable[str]) -> Reports:
    """rank -> what environ.py has reported."""
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    return {int(its["env"]["RANK"]): its for its in reports}
