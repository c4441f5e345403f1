"""clusterrun over ssh: --ips, conf.py, lists of endpoints, and the command line of the old paddle.py."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.cases import POLITE, STUBBORN, old_paddle, the_old_tools_sample
from tests.cli import CLUSTERRUN, CLUSTERTOOL, lines_before
from tests.free_ports import free_port

TELLS = """
    import json, os, sys
    print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}), flush=True)
"""


def job_of(site, node):
    (job,) = site.jobs(node)
    return job


def output(site, node, rank):
    return json.loads((job_of(site, node) / f"log/workerlog.{rank}").read_text())


def without_conf(site, *ports):
    """No conf.py; what is needed to log in is in the user's own ssh configuration, with the nodes' ssh ports or without."""
    (site.folder / "conf.py").unlink()
    lines = [f"IdentityFile {site._keys.user}"]
    for server in site.servers if ports else ():
        lines += [f"Host {server.address}", f"    Port {server.port}"]
    (site.laptop / ".ssh/config").write_text("\n".join(lines) + "\n")


def test_ips_as_conf_py_knows_them(site):
    """The order is that of --ips; users, ssh ports and keys are those of conf.py."""
    three = site(3)
    three.workspace(".", train_py=TELLS)
    first, second = three.servers[2].address, three.servers[0].address
    done = three.clusterrun(
        f"--ips={first},{second}", "--nproc_per_node=2", "train.py", "--batch_size", "64", "a  b"
    ).ends(0)
    assert "4 trainers on 2 nodes" in done.err
    assert f"[trainer 0 {first}]" in done.out
    for node, ranks in ((2, (0, 1)), (0, (2, 3))):
        for rank in ranks:
            its = output(three, node, rank)
            assert its["argv"] == ["train.py", "--batch_size", "64", "a  b"]
            assert its["cwd"] == str(job_of(three, node))
            assert its["env"]["PADDLE_TRAINERS"] == f"{first},{second}"
    assert not three.jobs(1)
    assert f"logs: {job_of(three, 2)}/log on every node; clustertool logs --job {done.job}" in done.err
    assert "[trainer 3 " in three.clustertool("logs", "--rank", 3).ends(0).out
    assert not (three.folder / "log").exists()


def test_ips_without_conf_py(site):
    pair = site(2)
    without_conf(pair)
    pair.workspace(".", train_py=TELLS)
    tokens = [server.entry for server in pair.servers]
    shell = {"CUDA_VISIBLE_DEVICES": "-1", "PADDLE_PG_TIMEOUT": "9", "FLAGS_selected_gpus": "5"}
    done = pair.clusterrun("--ips", ",".join(tokens), "train.py", env=shell).ends(0)
    assert "conf: nodes of --ips (2 nodes)" in done.err
    assert "from this shell: CUDA_VISIBLE_DEVICES=-1 is for every node" in done.err
    assert output(pair, 1, 1)["env"]["PADDLE_PG_TIMEOUT"] == "9"
    assert "FLAGS_selected_gpus" not in output(pair, 1, 1)["env"]
    assert output(pair, 1, 1)["env"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert [output(pair, node, node)["env"]["POD_IP"] for node in (0, 1)] == [server.address for server in pair.servers]


def test_few_lines_are_printed_before_the_first_one_of_the_program(site):
    """Also with notes of each kind: options, variables of the shell, old logs, files that are left out, earlier output. They
    are one line; -v prints each of them."""
    one = site(1)
    without_conf(one, "ports")
    program = (
        "import os, time; open(os.environ['CLUSTERTOOL_OUTPUT'] + '/x', 'w'); print('1', flush=True); time.sleep(1)"
    )
    servers_toml = '[pserver]\nready = "started"\ncommand = ["sleep", "99"]'
    one.workspace(".", train_py=program, job_toml=servers_toml)
    (one.folder / "log").mkdir()
    (one.folder / "log/workerlog.0").write_text("of a job on this machine")
    shell = {"CUDA_VISIBLE_DEVICES": "-1", "PADDLE_PG_TIMEOUT": "9", "TERM": "dumb"}
    nodes = "--ips", ",".join(server.entry for server in one.servers)
    typed = *nodes, "--monitor-interval=5", "--elastic-timeout=9", "train.py", "--nnodes=2"
    servers = "--server-num=1", "--log-level=WARNING"
    kinds = "--monitor-interval", "--elastic-timeout", "--nnodes", "CUDA_VISIBLE_DEVICES", "earlier job", "left out"
    one.clusterrun(*nodes, "train.py", env=shell).ends(0)  # the keys of the hosts are stored, and there is output
    for more in ((), servers):
        done = one.clusterrun(*more, *typed, env=shell, terminal=True).ends(0)
        lines = lines_before(done.out)
        assert len(lines) <= 6, "\n".join(lines)
        (line,) = (line for line in lines if line.startswith("note: "))
        assert all(kind in line for kind in kinds), line
    assert "has left an output" in line
    verbose = one.clusterrun("-v", *typed, env=shell).ends(0).err.splitlines()
    assert len([line for line in verbose if line.startswith("note: ")]) == len(kinds) + 1
    one.conf()
    for more in ((), ("--mode=ps",)):
        done = one.start("run", "-w", ".", *more, "train.py", "--nnodes", env=shell, program=CLUSTERTOOL, terminal=True)
        lines = lines_before(done.wait().ends(0).out)
        assert len(lines) <= 6 and any("--nnodes" in line and "left out" in line for line in lines), lines


def test_conf_py_alone_gives_the_nodes(site):
    three = site(3, joining=True)
    three.workspace(".", train_py=TELLS)
    (three.folder / "log").mkdir()
    (three.folder / "log/workerlog.0").write_text("of a job on this machine")
    done = three.clusterrun("--nnodes=1:2", "--log_dir", "mine", "train.py").ends(0)
    assert "an earlier job" not in done.err
    assert "elastic, 1:2 nodes, on 3 nodes" in done.err  # the last one is a spare node, which ends with the others
    (second,) = (node for node in (1, 2) if (job_of(three, node) / "log/workerlog.1").exists())
    assert output(three, second, 1)["env"]["POD_IP"] == three.servers[second].address
    assert (three.folder / "mine/workerlog.0").read_text() == (job_of(three, 0) / "log/workerlog.0").read_text()
    assert (job_of(three, second) / "mine/workerlog.1").read_text() == (
        job_of(three, second) / "log/workerlog.1"
    ).read_text()
    assert "there are 3 nodes" in three.clusterrun("--nnodes", 4, "train.py").ends(64).err
    on_nodes = three.clusterrun("-v", "--nnodes", 1, "train.py").ends(0).err
    assert "note: log has the logs of an earlier job; write those of this one with --log_dir DIR" in on_nodes
    assert "log_dir: log, in the job's directory on every node" in on_nodes
    below = three.folder / "sub"
    below.mkdir()
    shutil.copy(three.folder / "train.py", below)
    assert "3 trainers on 3 nodes" in three.clusterrun("train.py", cwd=below).ends(0).err


def test_lists_of_endpoints_name_the_nodes(site):
    """fleetrun --servers=... --workers=... as its documents have it, in any order, trainers without ports."""
    pair = site(2)
    without_conf(pair, "ports")
    port = free_port()
    a, b = (server.address for server in pair.servers)
    pair.workspace(
        ".",
        train_py="""
            import os, socket, time
            print(os.environ["TRAINING_ROLE"], os.environ.get("PADDLE_TRAINER_ID"), os.environ["POD_IP"], flush=True)
            if os.environ["TRAINING_ROLE"] == "PSERVER":
                with socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"]))):
                    time.sleep(600)
        """,
    )
    done = pair.clusterrun(
        f"--servers={b}:{port}", f"--workers={a},{b},{a}", "--tee=3", "--job_id=lists", "train.py"
    ).ends(0)
    assert "1 pserver, 3 trainers on 2 nodes" in done.err
    assert set(re.findall(r"TRAINER (\d) (\S+)$", done.out, re.M)) == {("0", a), ("1", b), ("2", a)}
    assert f"PSERVER None {b}" in done.out
    pair.gone()


def test_ctrl_c_and_failure(site):
    pair = site(2)
    pair.workspace(
        ".", train_py=STUBBORN, bad_py="import os, sys; sys.exit(3 * int(os.environ['RANK']))", polite_py=POLITE
    )
    ips = ",".join(server.address for server in pair.servers)
    running = pair.start("--ips", ips, "--grace", 1, "--tee", 3, "train.py", program=CLUSTERRUN)
    for rank in (0, 1):
        running.says(f"ready {rank}$")
    running.signal()
    done = running.wait().ends(130)
    assert "127.0.0.[2-3]: clean" in done.err
    assert not pair.living()
    done = pair.clusterrun("--ips", ips, "bad.py").ends(3)
    assert "rank=[1] was aborted" in done.err
    other = pair.clusterrun("--ips", ips, "--detach", "polite.py").ends(0).job
    assert pair.clustertool("stop", "--job", other).ends(0).lines() == [f"job {other}: 127.0.0.[2-3]: clean"]


def test_secrets(site):
    pair = site(2).conf(SECRETS=["TOKEN"])
    pair.workspace(".", train_py="import os; print('it is', os.environ['TOKEN'], flush=True)")
    done = pair.clusterrun("--ips=127.0.0.2", "train.py", env={"TOKEN": "s3cr3t-v4lue"}).ends(0)
    assert "it is ***" in done.out
    assert "s3cr3t-v4lue" not in done.out + done.err
    for path in filter(Path.is_file, (job_of(pair, 0) / ".clustertool").iterdir()):
        assert b"s3cr3t-v4lue" not in path.read_bytes(), path


def test_after_a_job_here_its_traces_are_not_sent(site):
    pair = site(2)
    pair.workspace(".", train_py=TELLS)
    assert pair.clusterrun("--standalone", "train.py").ends(0)
    assert (pair.folder / "log").is_symlink()
    pair.clusterrun("--ips=127.0.0.3", str(pair.folder / "train.py"), "--x").ends(0)
    job = job_of(pair, 1)
    assert not (job / "log").is_symlink()
    assert {path.name for path in job.iterdir()} == {
        ".clustertool",
        "conf.py",
        "log",
        "nodefile",
        "output",
        "tasks.py",
        "train.py",
    }
    assert output(pair, 1, 0)["argv"] == ["train.py", "--x"], "a path of this machine becomes one of the workspace"
    (pair.folder.parent / "outside.py").write_text("")
    assert "outside of the workspace" in pair.clusterrun("--ips=127.0.0.3", "../outside.py").ends(65).err


@pytest.mark.chaos
def test_next_to_the_embedded_cluster(embedded):
    """Without conf.py, run's jobs are on the embedded cluster and clusterrun's are here: other verbs find both."""
    embedded.workspace(train_py=POLITE)
    shutil.copy(embedded.folder / "job/train.py", embedded.folder)
    there = embedded.clustertool("run", "-w", "job", "--detach").ends(0).job
    mine = embedded.clusterrun("--detach", "train.py").ends(0).job
    listed = embedded.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert {job["id"]: (job["state"], job["total"]) for job in listed} == {there: ("running", 3), mine: ("running", 1)}
    assert [job["id"] for job in embedded.clustertool("jobs", "--here", "--json").ends(0).json["jobs"]] == [mine]
    assert "ready 0" in embedded.clustertool("logs", "--job", mine).ends(0).out
    assert "ready 2" in embedded.clustertool("logs", "--job", there, "--rank", 2).ends(0).out
    done = embedded.clustertool("stop", "--all", "--json").ends(0).json["jobs"]
    assert done == {mine: {socket.gethostname(): "clean"}, there: {f"127.0.0.{n}": "clean" for n in (1, 2, 3)}}


def test_what_ips_cannot_be(site):
    pair = site(2)
    pair.workspace(".", train_py=TELLS)
    assert "--ips has" in pair.clusterrun("--ips=10.0.0.300", "train.py").ends(64).err
    assert pair.clusterrun("--ips=127.0.0.2:1", "train.py").ends(69)
    assert not pair.jobs(0) + pair.jobs(1)


# -- the old paddle.py ----------------------------------------------------------------------------------------------------


def test_the_old_tools_sample_command(site):
    pair = site(2)
    old_paddle(pair)
    the_old_tools_sample(pair, [server.address for server in pair.servers])


def test_the_old_tools_workspace_on_the_nodes(site):
    """--job_workspace: nothing is sent; log, nodefile and output are where the old tool had them."""
    pair = site(2)
    package = old_paddle(pair)
    for server in pair.servers:
        shutil.copytree(package, server.home / "there")
    pair.clusterrun("-j", "~/there", "--config", "./trainer_config.py", "--save_dir=./output", "--use_gpu=0").ends(0)
    for node, server in enumerate(pair.servers):
        there = server.home / "there"
        trainer = json.loads((there / "log/train.log").read_text())
        assert trainer["argv"][6:-1] == ["--config", "./trainer_config.py", "--save_dir=./output", "--use_gpu=0"]
        assert trainer["cwd"] == str(there)
        assert (there / "nodefile").read_text() == f"{node}\n"
        assert (there / "log/server.log").exists()
    assert (pair.servers[0].home / "there/output/pass-00000/w").exists()


def test_commands_of_job_toml_get_what_was_typed(site):
    pair = site(2)
    package = old_paddle(pair)
    (package / "job.toml").write_text(
        '[trainer]\ncommand = ["paddle", "train", "--trainer_id={rank}", "--save_dir=./output"]\n'
        '[pserver]\ncommand = ["paddle", "pserver", "--port={port}"]\n'
    )
    done = pair.clusterrun("--job_dispatch_package", package, "--config={port}", "--job-id=toml").ends(0)
    trainer = json.loads((job_of(pair, 1) / "log/train.log").read_text())
    assert trainer["argv"] == ["train", "--trainer_id=1", "--save_dir=./output", "--config={port}"]
    assert done.job == "toml"
    assert Path(job_of(pair, 0)).name == "JOBtoml"


def test_hosts_with_slots_and_a_total(site):
    """As mpirun and horovodrun have them; users, ssh ports and keys are those of conf.py."""
    pair = site(2)
    pair.workspace(".", train_py=TELLS)
    first, second = (server.address for server in pair.servers)
    done = pair.clusterrun("-np", 3, "-H", f"{second}:2,{first}:2", "train.py").ends(0)
    assert "conf: " in done.err and "nodes of -H (2 nodes)" in done.err
    assert [output(pair, 1, rank)["env"]["WORLD_SIZE"] for rank in (0, 1)] == ["3", "3"]
    assert output(pair, 0, 2)["env"]["PADDLE_TRAINERS"] == f"{second},{first}"
