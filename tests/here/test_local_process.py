"""The verbs with an engine that has a queue, and that is one file of the tests: no verb has its name."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli import CLUSTERTOOL as CLI
from tests.cli import until

IMPORT = f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport local_process\n\n"
WAITS = """
    import os, time
    print("ready", os.environ["RANK"], os.environ["NODE_NAME"], flush=True)
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.05)
    open("output/done", "w").close()
"""

API = """
    from clustertool.api import Cluster
    cluster = Cluster.from_conf()
    job = cluster.run("job", name="second")
    print(job.status().state, flush=True)
    outcome = job.wait()
    print(outcome.state, [one.id for one in cluster.jobs()] == [job.id])
"""


@pytest.fixture
def queue(here):
    """A folder whose conf.py names the engine; its jobs end when `go` is there."""
    conf = f"{IMPORT}ENGINE = 'local-process'\n"
    settings = {"spool": str(here.folder / "spool"), "nodes": 2}
    conf += f"LOCAL_PROCESS = {settings!r}\nENV = {{'GO': {str(here.folder / 'go')!r}}}\nGRACE = 1\n"
    (here.folder / "conf.py").write_text(conf)
    here.workspace(train_py=WAITS)
    return here


def submitted(queue, *args):
    done = queue.clustertool("run", "-w", "job", "--detach", "--json", *args).ends(0)
    return done.json["job"]


def state(queue, job):
    found = queue.clustertool("jobs", "--json").ends(0).json["jobs"]
    return {one["id"]: one["state"] for one in found}.get(job)


def go(queue):
    (queue.folder / "go").touch()


def test_a_job_is_followed_from_the_queue_to_its_end(queue):
    first = submitted(queue)
    running = queue.start("run", "-w", "job", "--all-ranks", "--job-id", "X", program=CLI)
    running.says(rf"job X: queued since \S+ \S+: job {first} has its turn; the start is expected at")

    until(lambda: '"running"' in (queue.folder / f"spool/{first}/state").read_text())  # each command costs more
    until(lambda: len([*queue.folder.glob("spool/root*/JOB*/log/workerlog.*")]) == 2)
    until(lambda: state(queue, first) == "running")
    listed = queue.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert [(one["id"], one["state"]) for one in listed] == [("X", "queued"), (first, "running")]
    assert listed[0]["reason"] == f"job {first} has its turn"
    assert listed[0]["queue"]["since"] < listed[0]["queue"]["expected"]
    assert "queue" not in listed[1]
    assert "job X: queued since" in queue.clustertool("jobs").ends(0).err
    about = queue.clustertool("status", "--job", "X").ends(0).out
    assert "job X: queued" in about and f"job {first} has its turn" in about
    about = queue.clustertool("status", "--job", "X", "--json").ends(0).json
    assert (about["job"], about["state"], about["processes"]) == ("X", "queued", [])
    assert about["queue"]["reason"] == f"job {first} has its turn"
    assert "job X: no node has a record of it (queued since" in queue.clustertool("logs", "--job", "X").ends(66).err

    assert "exec --job J COMMAND" in queue.clustertool("exec", "hostname").ends(64).err
    done = queue.clustertool("exec", "--job", first, "--command", "echo $NODE_NAME; echo odd >&2; exit 3").ends(3)
    assert done.lines() == [line for n in (0, 1) for line in (f"--- local{n} (exit code 3)", f"local{n}", "odd")]
    late = queue.clustertool("exec", "--job", first, "--timeout", "0.5", "--command", "/bin/sleep 77").ends(124)
    assert "did not end within 0.5 s and was ended" in late.err
    assert "no node has a record of it" in queue.clustertool("exec", "--job", "X", "hostname").ends(66).err

    go(queue)
    done = running.wait().ends(0)
    assert "[trainer 0 local0] ready 0 local0" in done.out and "[trainer 1 local1] ready 1 local1" in done.out
    assert state(queue, first) == "succeeded"


@pytest.mark.chaos
def test_dry_shows_what_is_submitted_and_a_job_starts_without_a_command(queue):
    dry = queue.clustertool("run", "-w", "job", "--dry", "--json", "--job-id", "X").ends(0).json
    assert not (queue.folder / "spool/X").exists()
    text = queue.clustertool("run", "-w", "job", "--dry", "--job-id", "X").ends(0).out
    assert "--- order.json" in text and dry["documents"]["order.json"] in text
    go(queue)
    assert submitted(queue, "--job-id", "X") == "X"
    assert (queue.folder / "spool/X/order.json").read_text() == dry["documents"]["order.json"]
    until(lambda: '"ended"' in (queue.folder / "spool/X/state").read_text())
    assert queue.clustertool("logs", "--job", "X").ends(0).lines() == ["[trainer 0 local0] ready 0 local0"]

    away = queue.folder.with_name("away")  # by what was stored at the start
    away.mkdir()
    lost = queue.clustertool("status", cwd=away).ends(78).err
    assert "the engine 'local-process' is not known" in lost and "one of ssh" in lost
    (away / "conf.py").write_text(f"{IMPORT}HOSTS = ['10.0.0.1']\n")
    other = submitted(queue)
    until(lambda: state(queue, other) == "succeeded")
    assert f"job {other}: succeeded" in queue.clustertool("status", "--job", other, cwd=away).ends(0).out


@pytest.mark.chaos
def test_a_queued_job_is_stopped_and_never_cleaned(queue):
    first, second, third = submitted(queue), submitted(queue), submitted(queue)
    until(lambda: state(queue, first) == "running")
    refused = queue.clustertool("clean", "--job", second).ends(64)
    assert f"job {second} is queued since" in refused.err and f"clustertool stop --job {second} first" in refused.err
    assert f"job {first} runs" in queue.clustertool("clean", "--job", first).ends(64).err
    kept = queue.clustertool("clean", "--older-than", "0s", "--json").ends(0)
    assert f"kept: job {second}: queued since" in kept.err
    assert set(kept.json["not_ended"]) == {second, third}
    assert (kept.json["removed"], kept.json["running"]) == ([], [first])

    assert "several jobs run" in queue.clustertool("stop").ends(64).err
    assert f"would stop: {second}" in queue.clustertool("stop", "--job", second, "--dry").ends(0).out
    assert queue.clustertool("stop", "--job", second).ends(0).lines() == [f"job {second}: cancelled"]
    assert state(queue, second) is None
    stopped = queue.clustertool("stop", "--all", "--json").ends(0).json
    assert stopped["jobs"] == {first: {"local0": "clean", "local1": "clean"}, third: {"engine": "cancelled"}}
    until(lambda: state(queue, first) == "stopped")
    until(lambda: '"ended"' in (queue.folder / f"spool/{first}/state").read_text())
    cleaned = queue.clustertool("clean", "--older-than", "0s").ends(0).lines("  ")
    assert sorted(cleaned) == sorted(f"  {job}" for job in (first, second, third))  # and what the engine keeps of them
    assert "removed 0 jobs" in queue.clustertool("clean", "--older-than", "0s").ends(0).out


@pytest.mark.chaos
def test_ctrl_c_cancels_a_job_that_waits_and_ctrl_d_leaves_it(queue):
    first = submitted(queue)
    running = queue.start("run", "-w", "job", "--job-id", "X", program=CLI)
    running.says("job X: queued")
    running.signal(signal.SIGINT)
    assert "job X was cancelled before its start" in running.wait().ends(130).err
    assert json.loads((queue.folder / "spool/X/state").read_text())["reason"] == "cancelled"

    running = queue.start("run", "-w", "job", "--job-id", "Y", program=CLI, terminal=True)
    running.says("job Y: queued")
    running.type("\x04")
    assert "job Y is queued: clustertool status --job Y" in running.wait().ends(0).out
    running = queue.start("attach", "--job", "Y", program=CLI)
    running.says("job Y: queued")
    assert state(queue, first) == "running"
    go(queue)
    assert "[trainer 0 local0] ready 0 local0" in running.wait().ends(0).out


def test_the_python_api_and_clusterrun_with_a_queue(queue):
    """And settings that the engine refuses."""
    (queue.folder / "spool").mkdir()
    with (queue.folder / "spool/turn").open("a") as turn:  # as of a job that runs
        fcntl.flock(turn, fcntl.LOCK_EX)
        running = queue.start("-c", textwrap.dedent(API), program=[sys.executable])
        running.says("queued")
    go(queue)
    assert running.wait().ends(0).out.split() == ["queued", "succeeded", "True"]

    done = queue.clusterrun("-v", "--nproc_per_node", 2, "train.py", cwd=queue.folder / "job").ends(0)
    assert "[trainer 0 local0] ready 0 local0" in done.out
    assert "nproc_per_node: 2" in done.err and "nnodes" not in done.err and "ips" not in done.err

    conf = (queue.folder / "conf.py").read_text()
    (queue.folder / "conf.py").write_text(conf.replace("'spool'", "'pool'"))
    assert "LOCAL_PROCESS has no spool" in queue.clustertool("run", "-w", "job").ends(78).err
