"""Elastic jobs whose command is typed on each machine, and engines that do not have such jobs."""

from __future__ import annotations

import json
import os
import re
import signal

from tests.cli import until
from tests.free_ports import free_port
from tests.here.test_clusterrun_here import starts

TRAIN = """
    import os, time
    epoch = os.environ["CLUSTERTOOL_ATTEMPT"]
    print("epoch", epoch, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    while not os.path.exists("over"):
        time.sleep(0.05)
"""


def typed(folders, nodes="1:2"):
    """The same command in two folders, on which both have begun epoch 0."""
    meet = ("--master", f"127.0.0.1:{free_port()}", "--nnodes", nodes)
    for site in folders:
        site.workspace(".", train_py=TRAIN)
        (site.folder / "conf.py").write_text("LOSS_TIMEOUT = 3\nGRACE = 2\n")
    running = [starts(site, *meet, "--rank", rank, "train.py") for rank, site in enumerate(folders)]
    for rank, site in enumerate(folders):
        trains(site, 0, rank, 2)
    return running


def trains(site, epoch, rank, world):
    log = site.folder / "log" / (f"attempt{epoch}" if epoch else "") / f"workerlog.{rank}"
    until(
        lambda: log.exists() and f"epoch {epoch} rank {rank} of {world}" in log.read_text(),
        40,
        lambda: f"{log} {[running.err for running in site.running]}",
    )


def member(site):
    """The process of a folder that joins the job."""
    found = [process.pid for process in site.living() if process.name in ("ct-join", "ct-supervisor")]
    assert found, site.living()
    return found[0]


def test_ctrl_c_in_one_of_the_terminals_ends_the_part_of_this_machine(folders):
    """The other one goes on, and its Ctrl+C ends the job: it coordinates."""
    first, second = typed(folders)
    second.signal(signal.SIGINT)
    done = second.wait().ends(130)
    assert "clean" in done.err and "may still run" not in done.err
    folders[1].gone()
    trains(folders[0], 1, 0, 1)
    first.signal(signal.SIGINT)
    first.wait().ends(130)
    folders[0].gone()


def test_ctrl_c_in_one_of_the_terminals_ends_a_job_of_which_too_little_is_left(folders):
    running = typed(folders, "2:2")
    running[1].signal(signal.SIGINT)
    for one, folder in zip(reversed(running), reversed(folders), strict=True):
        assert "Ctrl+C" in one.wait().ends(130).last
        folder.gone()


def test_a_typed_command_that_is_killed_lets_the_other_one_go_on(folders):
    """Its whole process group, as when its terminal or its machine is killed. The other one ends with 0."""
    first, second = typed(folders)
    os.killpg(os.getpgid(second.process.pid), signal.SIGKILL)
    os.killpg(os.getpgid(member(folders[1])), signal.SIGKILL)
    trains(folders[0], 1, 0, 1)
    (folders[0].folder / "over").touch()
    done = first.wait().ends(0)
    assert done.last == "clustertool: exit 0 (job): all trainers are done"
    status = json.loads(folders[0].clustertool("status", "--json").out)
    assert [epoch["nodes"] for epoch in status["epochs"]] == [[0, 1], [0]]
    second.wait()
    for site in folders:
        site.gone()


def test_an_engine_without_elastic_jobs_refuses_a_range_of_nodes(here):
    here.workspace("job", train_py=TRAIN)
    (here.folder / "conf.py").write_text('ENGINE = "kubernetes"\nKUBERNETES = {"image": "example.org/train:1"}\n')
    done = here.clustertool("run", "--workspace", "job", "--nnodes", "2:3", "--dry").ends(64)
    assert "an elastic job (2:3 nodes) is not possible with the engine kubernetes" in done.err
    assert re.search(r"--nnodes 3; the engines ssh and slurm have elastic jobs", done.err)
    here.workspace("job", job_toml="[elastic]\nmin = 1\nmax = 2\n")
    assert "an elastic job (1:2 nodes)" in here.clustertool("run", "--workspace", "job", "--dry").ends(64).err
