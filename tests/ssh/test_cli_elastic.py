"""Elastic jobs by the command line: nodes are lost, started again, added and released."""

from __future__ import annotations

import os
import re
import shutil
import signal
from typing import Any

import pytest

from tests.cli import LoopSite, until
from tests.node_code import CACHE

TRAIN = """
import os, time
env = os.environ
print("ready", env["CLUSTERTOOL_ATTEMPT"], env["RANK"], env["WORLD_SIZE"], flush=True)
while not os.path.exists("over"):
    time.sleep(0.05)
"""


def status(site: LoopSite) -> dict[str, Any]:
    found: dict[str, Any] = site.clustertool("status", "--json").json
    return found


def ready(site: LoopSite, attempt: int, world: int) -> None:
    """All ranks of an attempt run. It reads the files of the newest job, since a command takes more CPU."""
    wanted = {f"ready {attempt} {rank} {world}" for rank in range(world)}

    def printed() -> set[str]:
        logs = [log for node in range(site.count) for log in (site.jobs(node)[-1] / "log").rglob("*log.*")]
        return {line for log in logs for line in log.read_text().splitlines()}

    until(lambda: wanted <= printed(), 60)


def kill(site: LoopSite, node: int) -> None:
    """Its member, as a crash would."""
    (found,) = (process for process in site.processes(node) if process.name == "ct-supervisor")
    os.kill(found.pid, signal.SIGKILL)


def test_a_lost_node_is_started_again_by_the_attached_command(site):
    two = site(2, joining=True)
    two.workspace(train_py=TRAIN)
    two.conf(LOSS_TIMEOUT=3, GRACE=2)
    run = two.start("run", "-w", "job", "--nnodes", "1:2", "--all-ranks")
    for rank in range(2):
        run.says(rf"ready 0 {rank} 2")
    kill(two, 1)
    run.says("is lost: the supervisor died")
    for rank in range(2):
        run.says(rf"ready 1 {rank} 2", 60)
    found = status(two)
    assert [epoch["attempt"] for epoch in found["epochs"]] == [0, 1]
    assert found["epochs"][1]["seconds"] < 30 and "is lost" in found["epochs"][1]["cause"]
    assert "ready 0 1 2" in two.clustertool("logs", "--rank", "1", "--attempt", "0").ends(0).out
    table = two.clustertool("status").ends(0).out
    assert "epoch" in table and "cost" in table
    two.clustertool("report", "--to", "page.html").ends(0)
    assert "<h2>Epochs</h2>" in (two.folder / "page.html").read_text()
    run.signal(signal.SIGINT)
    run.wait().ends(130)
    two.gone()


def test_nodes_are_released_and_added_again(site):
    three = site(3, joining=True)
    three.workspace(train_py=TRAIN)
    three.conf(LOSS_TIMEOUT=3, GRACE=2)
    three.clustertool("run", "-w", "job", "--nnodes", "1:3", "--detach").ends(0)
    ready(three, 0, 3)
    host = three.servers[2].address
    gone = three.clustertool("shrink", "--host", host).ends(0)
    assert "has left" in gone.out
    ready(three, 1, 2)
    notes = dict(re.findall(r"^(\S+) +(?:running|ended) .* {2,}(\S.*)$", three.clustertool("status").ends(0).out, re.M))
    assert notes[host] == "released", notes
    refused = three.clustertool("shrink", "--host", three.servers[0].address).ends(64)
    assert "coordinates the job" in refused.err
    added = three.clustertool("grow", "--host", host, "--json").ends(0).json
    assert list(added["hosts"].values()) == ["has joined, and waits for the next epoch"]
    assert re.search(rf"^{host} +running .*on standby$", three.clustertool("status").ends(0).out, re.M)
    (shown,) = three.clustertool("top", "--json").ends(0).json["memberships"]
    names = [server.address for server in three.servers]
    assert (shown["epoch"], shown["nodes"], shown["standby"]) == (1, names[:2], [host])
    assert (shown["minimum"], shown["maximum"], shown["left"]) == (1, 3, [[host, "released"]])
    page = three.clustertool("top", "--count", "1").ends(0).out
    assert f"epoch 1, 2 of 1:3 nodes, on standby: {host}, since" in page
    assert f"{host} left (released): node {host} leaves: clustertool shrink" in page
    kill(three, 1)
    ready(three, 2, 2)
    (last,) = (epoch for epoch in status(three)["epochs"] if epoch["attempt"] == 2)
    assert (last["left"], last["joined"]) == ([[1, "lost"]], [2])
    three.clustertool("stop").ends(0)
    three.gone()


def test_an_elastic_job_continues_from_the_output_of_an_earlier_one(site):
    """The second node of it has none."""
    two = site(2, joining=True)
    script = """
        import os
        mark = "output/mark" + os.environ["RANK"]
        print("before:", *sorted(os.listdir("output")), flush=True)
        open(mark, "w").close()
    """
    two.workspace(train_py=script)
    run = ("run", "-w", "job", "--nnodes", "1:2", "--all-ranks")
    first = two.clustertool(*run, "--only", two.name(0), "--job-id", "first").ends(0)
    assert [line.rpartition("] ")[2] for line in first.lines()] == ["before:"]
    again = two.clustertool(*run, "--resume").ends(0)
    assert sorted(line.rpartition("] ")[2] for line in again.lines()) == ["before:", "before: mark0"]


def test_a_plan_is_shown_and_wrong_numbers_are_refused(site):
    three = site(3)
    three.workspace(train_py=TRAIN)
    shown = three.clustertool("run", "-w", "job", "--nnodes", "1:2", "--dry").ends(0)
    assert "each epoch" in shown.out + shown.err and "standby" in shown.out + shown.err
    assert "'3:2' is no number of nodes" in three.clustertool("run", "-w", "job", "--nnodes", "3:2").ends(64).err
    three.clustertool("run", "-w", "job", "--nnodes", "2:3", "--mode", "rpc").ends(64)
    three.clustertool("run", "-w", "job", "--elastic-server", "http://127.0.0.1:1").ends(64)


@pytest.mark.chaos
def test_a_node_is_released_although_the_job_waits_for_its_next_epoch(site):
    three = site(3, joining=True)
    three.workspace(train_py=TRAIN)
    three.conf(LOSS_TIMEOUT=3, GRACE=2)
    three.clustertool("run", "-w", "job", "--nnodes", "3:3", "--detach").ends(0)
    ready(three, 0, 3)
    kill(three, 1)
    until(lambda: all(one["state"] != "running" for one in status(three)["processes"]), 30)
    assert "has left" in three.clustertool("shrink", "--host", three.servers[2].address).ends(0).out
    until(lambda: not [one for one in three.living() if one.node == 2], 10)
    three.clustertool("grow", "--host", ",".join(server.address for server in three.servers[1:])).ends(0)
    ready(three, 1, 3)
    three.clustertool("stop").ends(0)
    three.gone()


@pytest.mark.parametrize("sent", [True, False])
def test_the_coordinator_is_the_named_host(site, sent, node_code):
    """Also where job.toml is on the nodes, and is read only when these have answered.

    A node of the first gets the code of joining processes; those of other tests have it already (tests/node_code.py): in the
    same place with the same name, or it is installed again.
    """
    two = site(2, joining=not sent)
    if sent:
        node_code.put_joining_into(two.home(1))
    script = 'import os\nprint("runs", os.environ["RANK"], os.environ["HOME"], flush=True)\n'
    job = two.workspace(train_py=script)
    two.conf(COORDINATOR=two.servers[1].address)
    given = ["-w", "job"]
    if not sent:
        for node in range(2):
            shutil.copytree(job, two.home(node) / "work")
            (two.home(node) / "work/job.toml").write_text("[elastic]\nmin = 2\nmax = 2\n")
        given = ["--job-workspace", "~/work"]
    run = two.clustertool("run", *given, *(["--nnodes", "2:2"] if sent else []), "--all-ranks").ends(0)
    assert f"runs 0 {two.home(1)}" in run.out and f"runs 1 {two.home(0)}" in run.out
    for node in range(2):
        assert {path.name for path in (two.home(node) / CACHE).iterdir()} == {node_code.name, node_code.joining.name}
