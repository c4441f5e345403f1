"""The same command typed twice on one machine, in two folders that meet on the loopback: two nodes without ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import stat

import pytest

from tests.cli import until
from tests.free_ports import free_port
from tests.here.test_clusterrun_here import WAITS, reported, starts

TELLS = """
    import json, os, sys
    print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}), flush=True)
"""


@pytest.fixture
def meet():
    return ("--master", f"127.0.0.1:{free_port()}", "--nnodes", 2)


def both(folders, meet, *args):
    return [starts(site, *meet, "--rank", rank, *args) for rank, site in enumerate(folders)]


def test_two_folders_are_two_nodes(folders, meet):
    for site in folders:
        site.workspace(".", train_py=TELLS)
    port = free_port()
    given = ("--nproc-per-node", 2, "--job-id", "mine", "--master-port", port)
    for running in both(folders, meet, *given, "train.py", "-x"):
        done = running.wait().ends(0)
        assert done.last == "clustertool: exit 0 (job): all trainers are done"
        assert "clustertool logs --job" in done.err
    for node, site in enumerate(folders):
        for rank, output in zip((2 * node, 2 * node + 1), reported(site, 2 * node, 2 * node + 1)):
            assert (output["argv"], output["cwd"]) == (["train.py", "-x"], str(site.folder))
            env = output["env"]
            assert (env["RANK"], env["WORLD_SIZE"], env["NODE_RANK"], env["CLUSTERTOOL_NNODES"]) == (
                str(rank),
                "4",
                str(node),
                "2",
            )
            assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", str(port))
            assert env["PADDLE_JOB_ID"] == "mine"
            assert env["CLUSTERTOOL_OUTPUT"].startswith(f"{site.folder}/.clustertool/JOB")
        job = json.loads(site.clustertool("jobs", "--json").ends(0).out)["jobs"]
        assert [(one["name"], one["state"]) for one in job] == [("mine", "succeeded")]
    own = folders[0].home(0) / ".local/state/clustertool/loopback-secret"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


def test_each_machine_has_its_own_log_dir_and_address(folders, meet):
    """--host, as in Paddle: the trainers have it, and the others connect to it. The first machine has that of --master."""
    for site in folders:
        site.workspace(".", train_py=TELLS)
    running = [
        starts(site, *meet, "--rank", rank, "--host", f"127.0.0.{address}", *log_dir, "train.py")
        for (rank, address, log_dir), site in zip(((0, 1, ("--log_dir", "mine")), (1, 9, ())), folders)
    ]
    for one in running:
        one.wait().ends(0)
    envs = [*reported(folders[0], 0, log="mine"), *reported(folders[1], 1)]
    envs = [output["env"] for output in envs]
    assert [env["RANK"] for env in envs] == ["0", "1"]
    assert not (folders[0].folder / "log").exists()
    assert not (folders[1].folder / "mine").exists()
    assert [env["POD_IP"] for env in envs] == ["127.0.0.1", "127.0.0.9"]
    assert envs[0]["PADDLE_TRAINERS"] == envs[1]["PADDLE_TRAINERS"] == "127.0.0.1,127.0.0.9"


def test_ctrl_c_while_it_waits_and_a_second_start(folders, meet):
    folders[0].workspace(".", train_py=TELLS)
    first = starts(folders[0], *meet, "--rank", 0, "train.py")
    first.says(r"1 of 2 machines is here \(missing: 1\)")
    second = folders[0].clusterrun(*meet, "--rank", 0, "train.py").ends(64)
    assert f"runs on this machine already: process {first.process.pid} (" in second.err
    sent = first.signal()
    done = first.wait().ends(130)
    assert done.last == "clustertool: exit 130 (tool): Ctrl+C"
    assert first.start + done.seconds - sent < 40
    assert not (folders[0].folder / ".clustertool").exists() or not folders[0].jobs(0)
    folders[0].gone()


@pytest.mark.parametrize(
    ("given", "code", "what"),
    [
        ((), 69, "#1: ROOT_DIR: .* is no directory"),
        pytest.param(("--nproc-per-node", "gpu"), 64, "--nproc-per-node gpu: .*#0 has none", marks=pytest.mark.chaos),
    ],
    ids=["on one machine", "on all"],
)
def test_a_job_that_fails_while_it_joins(folders, meet, given, code, what):
    """Both machines report the error, with its code."""
    for site in folders:
        site.workspace(".", train_py=TELLS)
    if not given:
        (folders[1].folder / ".clustertool").write_text("")
    for running in both(folders, meet, *given, "train.py"):
        done = running.wait().ends(code)
        assert re.search(f"^error: .*{what}$", done.err, re.M), done.err
        assert done.last.startswith(f"clustertool: exit {code} (tool): ")
    for site in folders:
        assert not list(site.folder.glob(".clustertool/JOB*"))
        site.gone()


def test_commands_in_a_folder_are_about_this_part_of_the_job(folders, meet):
    """Also where it has a conf.py without hosts: its other keys count for the start."""
    for site in folders:
        site.workspace(".", train_py=WAITS)
    site = folders[1]
    site.workspace(".", conf_py='GRACE = "2s"\n')
    for running in both(folders, meet, "--detach", "train.py"):
        running.wait().ends(0)
    log = site.folder / "log/workerlog.1"
    until(lambda: log.exists() and log.read_text() == "ready 1\n")
    status = site.clustertool("status", "--json").ends(69)
    found = {(one["rank"], one["state"]) for one in json.loads(status.out)["processes"]}
    assert found == {(0, "unknown"), (1, "running")}
    assert f"conf: {site.folder}/conf.py has no HOSTS, using {site.folder}/.clustertool (1 node)" in status.err
    assert "is another machine, on which the job was typed, too" in status.err
    (site.folder / "conf.py").unlink()
    assert site.clustertool("logs", "--rank", 1).ends(0).out.endswith("ready 1\n")
    stopped = site.clustertool("stop").ends(69)
    assert re.search(r"^job \S+: .*: clean$", stopped.out, re.M)
    assert "is another machine, on which the job was typed, too" in stopped.err
    for one in folders:
        one.gone()
    site.workspace(".", conf_py='GRACE = "2s"\n')
    assert "conf.py has no HOSTS" in site.clustertool("run", "--workspace", ".").ends(78).err


def test_dry_shows_the_plan_and_does_nothing(folders, meet):
    folders[0].workspace(".", train_py=TELLS)
    done = folders[0].clusterrun(*meet, "--nproc-per-node", 2, "--dry", "--json", "train.py").ends(0)
    join = done.json["join"]
    assert (join["coordinator"], join["nodes"], join["index"]) == (meet[1], 2, None)
    assert join["secret"].endswith("loopback-secret")
    assert [len(node["processes"]) for node in done.json["nodes"]] == [2, 2]
    assert done.json["lead"] == meet[1]
    assert not (folders[0].folder / ".clustertool").exists()
    assert not list(folders[0].home(0).rglob("*secret*")), "the secret is made at the first use"


@pytest.mark.parametrize(
    ("args", "code", "what"),
    [
        (("--master", "192.0.2.1:8090", "--nnodes", 2, "train.py"), 64, "need a common secret, and there is none here"),
        (("--master", "127.0.0.1:8090", "--nnodes", 2, "--resume=x", "train.py"), 64, "--resume is not possible"),
        (("--master", "127.0.0.1:8090", "--nnodes", 2, "other.py"), 65, "there is no other.py"),
        (("--master", "127.0.0.1:8090", "--nnodes", 2, "--only", "a", "train.py"), 64, "--only is not possible"),
        (
            ("--master", "127.0.0.1:8090", "--nnodes", 2, "--host", "127.0.0.2", "train.py"),
            64,
            "meet at 127.0.0.1, which",
        ),
        (("--nnodes", 2, "train.py"), 64, "type it on each machine with --master HOST:PORT and --nnodes N"),
    ],
)
def test_what_is_refused_before_any_connection(here, args, code, what):
    here.workspace(".", train_py=TELLS)
    assert what in here.clusterrun(*args).ends(code).err


def test_a_short_secret_and_one_that_others_can_read(here):
    here.workspace(".", train_py=TELLS)
    line = ("--master", "192.0.2.1:8090", "--nnodes", 2, "train.py")
    short = here.clusterrun(*line, env={"CLUSTERTOOL_SECRET": "abc123"}).ends(64)
    assert "the secret in CLUSTERTOOL_SECRET is too short" in short.err
    assert "abc123" not in short.err
    file = here.home(0) / ".config/clustertool/secret"
    here.clustertool("secret", "--to", file).ends(0)
    file.chmod(0o644)
    assert "chmod 600" in here.clusterrun(*line).ends(78).err


def test_the_command_that_makes_a_secret(here):
    printed = here.clustertool("secret").ends(0)
    assert re.fullmatch(r"[a-z2-7]{32}\n", printed.out)
    assert "CLUSTERTOOL_SECRET" in printed.err
    assert here.clustertool("secret", "--json").ends(0).json["secret"] != printed.out.strip()
    file = here.home(0) / ".config/clustertool/secret"
    assert "clusterrun reads it there" in here.clustertool("secret", "--to", file).ends(0).err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_text()
    assert "exists" in here.clustertool("secret", "--to", file).ends(64).err
    assert file.read_text() == before


def test_a_closed_terminal_before_and_after_the_start(folders, meet):
    """Before the start it ends the waiting, after it the job goes on."""
    for site in folders:
        site.workspace(".", train_py=WAITS)
    early = starts(folders[0], *meet, "--rank", 0, "train.py")
    early.says("1 of 2 machines")
    early.signal(signal.SIGHUP)
    early.wait().ends(143)
    folders[0].gone()
    running = both(folders, meet, "train.py")
    for rank, one in enumerate(running):
        one.says(f"ready {rank}")
    running[0].signal(signal.SIGHUP)
    running[0].wait().ends(0)
    again = folders[0].clusterrun(*meet, "--rank", 0, "train.py").ends(64)
    assert f"the command, process {running[0].process.pid}, has ended, and its job goes on" in again.err
    assert running[1].process.poll() is None
    assert any(process.name == "ct-supervisor" or "ct-join" in process.name for process in folders[0].living())
    os.kill(running[1].process.pid, signal.SIGINT)
    running[1].wait().ends(130)
    for site in folders:
        site.gone()


def test_a_command_that_is_killed_while_it_waits_leaves_nothing_behind(folders, meet):
    folders[0].workspace(".", train_py=TELLS)
    first = starts(folders[0], *meet, "--rank", 0, "train.py")
    first.says("1 of 2 machines")
    first.signal(signal.SIGKILL)
    first.wait()
    folders[0].gone()
