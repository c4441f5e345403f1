"""What cannot work is refused before any connection: the right code, what is wrong, and what to do."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import textwrap

import pytest

from tests.cli import CLUSTERTOOL, HELLO, INV, LoopSite


@pytest.fixture
def lonely(tmp_path, laptop, ssh_keys):
    """A site whose hosts only listen. Nothing may connect; `lonely.conf_py(text)` writes conf.py."""
    site = LoopSite(tmp_path / "site", [], ssh_keys, laptop)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site.hosts = [f"127.0.0.1:{listener.getsockname()[1]}"]
        site.conf_py = lambda text: (site.folder / "conf.py").write_text(textwrap.dedent(text))
        site.conf_py(f"HOSTS = {site.hosts!r}\n")
        yield site
        assert not select.select([listener], [], [], 0)[0], "it connected"
    site.close()


RUN = ["run", "--workspace", HELLO]


def refused(site, code, *args, reported=(), program=CLUSTERTOOL, env=None):
    done = site.inv(*args, env=env, program=program).ends(code)
    for text in (reported,) if isinstance(reported, str) else reported:
        assert text in done.err, done.err
    assert "Traceback" not in done.err
    assert done.last.startswith(f"clustertool: exit {code} (tool): ")
    assert not done.out
    return done


@pytest.mark.parametrize(
    ("args", "code", "reported"),
    [
        ([], 64, ["run needs a workspace", "--workspace", "--job-workspace"]),
        (["--workspace", HELLO, "--job-workspace", "/srv/job"], 64, ["--workspace", "--job-workspace"]),
        (["--job-workspace", "job"], 64, ["--job-workspace 'job'", "relative"]),
        (["--workspace", "nowhere"], 65, ["nowhere", "fix: "]),
        (["--workspace", "conf.py"], 65, "'conf.py' is a file, not a folder"),
        ([*RUN[1:], "--nproc-per-node", "abc"], 64, ["--nproc-per-node 'abc'", "whole number"]),
        ([*RUN[1:], "--rank", "x"], 64, "--rank 'x'"),
        ([*RUN[1:], "--gpus", "0", "--devices", "1"], 64, ["--gpus 0", "--devices 1"]),
        (["--workspace", HELLO, "--job-dispatch-package", "."], 64, "--job-dispatch-package"),
        ([*RUN[1:], "--mode", "collective", "--server-num", "1"], 64, "--mode ps"),
        ([*RUN[1:], "--workers", "10.9.9.9:1"], 64, "10.9.9.9"),
        ([*RUN[1:], "--mode", "ps", "--heter-worker-num", "1"], 64, ["--heter-worker-num", "--mode ps-heter"]),
        ([*RUN[1:], "--heter-workers", "10.9.9.9:1;127.0.0.1"], 64, "--heter-workers '10.9.9.9:1'"),
        ([*RUN[1:], "--heter-devices", "gpu;tpu"], 64, ["--heter-devices 'tpu'", "cpu, gpu or xpu"]),
        (
            [*RUN[1:], "--heter-devices", "gpu;cpu", "--heter-workers", "127.0.0.1"],
            64,
            "--heter-workers names 1 of 2 stages",
        ),
        ([*RUN[1:], "--nnodes", "2"], 64, "--nnodes '2'"),
        ([*RUN[1:], "--job-id", "../up"], 64, "../up"),
        ([*RUN[1:], "--env", "A"], 64, "--env NAME=value"),
        ([*RUN[1:], "--env", "CLUSTERTOOL_RANK=1"], 64, "CLUSTERTOOL_RANK"),
        ([*RUN[1:], "--env", "RANK=1"], 64, ["RANK", "--force-env"]),
        ([*RUN[1:], "--grace", "-1"], 64, "--grace '-1'"),
        ([*RUN[1:], "--script", "train.py 'x"], 64, "--script"),
        ([*RUN[1:], "--only", "elsewhere"], 64, "elsewhere"),
        ([*RUN[1:], "--shards", "no-such-*"], 65, "no-such-*"),
        ([*RUN[1:], "--conf", "other.py"], 78, "other.py"),
    ],
)
def test_options(lonely, args, code, reported):
    refused(lonely, code, "run", *args, reported=reported)


def test_a_program_that_does_not_exist(lonely):
    refused(lonely, 65, "run", "./job", reported=["there is no ./job in ", "--workspace DIR"])


def test_other_verbs_options(lonely):
    refused(lonely, 64, "stop", "--all", "--job", "x", reported="--all")
    refused(lonely, 64, "stop", "--grace", "x", reported="--grace 'x'")
    refused(lonely, 64, "dispatch", reported="--workspace")
    refused(lonely, 64, "exec", reported="--command", program=INV)
    refused(lonely, 64, "exec", "--command", "true", "--timeout", "x", reported="--timeout 'x'")
    refused(lonely, 64, "clean", reported="--older-than")
    refused(lonely, 64, "clean", "--older-than", "1y", reported="1y")
    refused(lonely, 64, "attach", "--tail", "x", reported="--tail 'x'")
    for verb in ("logs", "fetch", "status"):
        refused(lonely, 64, verb, "--role", "boss", reported=["--role 'boss'", "pserver, trainer, heter"], program=INV)
    refused(lonely, 64, "cluster.up", "--nodes", "x", reported="--nodes 'x'")


def test_what_invokes_own_parser_refuses(lonely):
    done = lonely.inv("run", "--no-such-option").ends(1)
    assert "--no-such-option" in done.err
    done = lonely.clustertool("run", "--no-such-option").ends(64)
    assert "--no-such-option" in done.err
    assert done.last.startswith("clustertool: exit 64 (tool): ")
    assert "Traceback" not in done.err
    lonely.clustertool("fly").ends(64)


def test_dry_of_invoke_is_refused_where_the_verb_has_none(lonely):
    for verb in ("jobs", "check", "exec"):
        done = lonely.start("--dry", verb).wait().ends(64)
        assert f"{verb} has no --dry" in done.err


@pytest.mark.parametrize(
    ("conf", "reported"),
    [
        ("HOSTS = []", "HOSTS is empty"),
        ("ENV = {}", "no HOSTS"),
        ("x = 1", "sets no key"),
        ("HOSTS = ['us;er@127.0.0.1']", "us;er@127.0.0.1"),
        ("HOSTS = ['a']\nHOST = ['b']", ["HOST", "HOSTS"]),
        ("HOSTS = ['a']\nPADDLE_PORT = 'many'", ["PADDLE_PORT", "many"]),
        ("HOSTS = ['a']\nROOT_DIR = 'jobs'", "ROOT_DIR = 'jobs'"),
        ("HOSTS = ['a'", "line 1"),
        ("HOSTS = ['a']\n\nENV = {'A': 1 / 0}", ["line 3", "division by zero"]),
        ("import sys\nsys.exit(3)", "line 2"),
        ("HOSTS = ['a']\nSECRETS = ['NO_SUCH_SECRET']", ["NO_SUCH_SECRET", "export"]),
    ],
)
def test_conf(lonely, conf, reported):
    lonely.conf_py(conf)
    done = refused(lonely, 78, *RUN, reported=reported)
    assert "conf.py" in done.err
    assert "fix: " in done.err


@pytest.mark.parametrize(
    ("toml", "reported"),
    [
        ("mode = ", "job.toml"),
        ("[trainer]\ncommand = 'train.py'", "command"),
        ("[shards]\nfiles = ['/etc/*']", "/etc/*"),
        ("[outputs]\npath = '../up'", "../up"),
    ],
)
def test_job_toml(lonely, toml, reported):
    folder = lonely.workspace(train_py="")
    (folder / "job.toml").write_text(toml)
    refused(lonely, 65, "run", "-w", "job", reported=reported)


def test_a_workspace_with_nothing_to_run(lonely):
    lonely.workspace()
    refused(lonely, 65, "run", "-w", "job", reported=["train.py", "--script"])


@pytest.mark.parametrize("script", ["nope.py --lr 0.1", "python3 -W ignore -u sub/nope.py", "./nope.py"])
def test_a_script_that_the_workspace_does_not_have(lonely, script):
    lonely.workspace(train_py="")
    refused(lonely, 65, "run", "-w", "job", "--script", script, reported=["there is no ", "nope.py in job", "--script"])


def test_a_script_that_is_not_sent(lonely):
    folder = lonely.workspace(train_py="", mine_py="")
    (folder / ".clusterignore").write_text("mine.py\n")
    refused(lonely, 65, "run", "-w", "job", "--script", "mine.py", reported=["not sent", ".clusterignore"])


def test_no_conf(lonely):
    (lonely.folder / "conf.py").unlink()
    for verb in ("status", "stop", "attach"):
        refused(
            lonely, 78, verb, reported=["conf.py", "cluster.up"], env={"XDG_STATE_HOME": str(lonely.folder / "state")}
        )


def test_hostfiles(lonely):
    (lonely.folder / "hosts").write_text("node1 slots=0x\n")
    refused(lonely, 78, *RUN, "--hostfile", "hosts", reported="hosts")
    refused(lonely, 78, *RUN, "--hostfile", "missing", reported="missing")


def test_a_dry_run_with_everything_given_opens_no_connection(lonely):
    lonely.conf_py(f"""
        HOSTS = {lonely.hosts!r}
        ROOT_DIR = "/srv/jobs"
        DEVICE_KIND = "cpu"
        START_PORT = 6170
        LEAD_PORT = 6160
        SECRETS = ["TOKEN"]
    """)
    done = lonely.clustertool("run", "-w", HELLO, "--nproc-per-node", 2, "--dry", "--json").ends(0)
    (node,) = done.json["nodes"]
    assert [(p["rank"], p["endpoint"], p["env"]["TOKEN"]) for p in node["processes"]] == [
        (0, "127.0.0.1:6170", "***"),
        (1, "127.0.0.1:6171", "***"),
    ]
    assert node["dir"] == "/srv/jobs/JOBDRY"
    table = lonely.clustertool("run", "-w", HELLO, "--dry").ends(0)
    assert "python3 -u train.py" in table.out
    lonely.clustertool("dispatch", "-w", HELLO, "--dry").ends(0)


def test_several_failures_are_one_json_answer(site):
    pair = site(2)
    pair.conf(HOSTS=["127.0.0.250:1", "127.0.0.251:1"])
    done = pair.clustertool("exec", "--command", "true", "--json").ends(69)
    assert sorted(done.json["unreachable"]) == ["127.0.0.250", "127.0.0.251"]


def test_ctrl_c_after_the_last_line_changes_nothing(lonely):
    """While Python ends it gives the signal back to the system, which would kill it: the code would be another one."""
    for _ in range(5):
        running = lonely.start("run", "--nnodes", "0", "-w", HELLO)
        running.says("clustertool: exit 64")
        with contextlib.suppress(ProcessLookupError):
            running.signal(signal.SIGINT)
        assert running.wait().code in (64, 130)
