"""What must hold on every kind of cluster alike; the tests of each kind call it with a site of theirs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cli import HELLO, REPO, Done, Site

WORD2VEC = REPO / "workspaces" / "word2vec"

POLITE = """
    import os, time
    print("ready", os.environ["CLUSTERTOOL_RANK"], flush=True)
    time.sleep(600)
"""

# Ignores TERM, and so do a child, a child in a session of its own, and one that was forked twice.
STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, sleep)
        os._exit(0)
    os.wait()
    print("ready", os.environ["CLUSTERTOOL_RANK"], flush=True)
    time.sleep(600)
"""


def hello(done: Done) -> dict[int, dict[str, str]]:
    """rank -> what the trainer of workspaces/hello says of itself, and the node its prefix names."""
    found = {}
    for prefix, rank, node, text in re.findall(r"^(\[trainer (\d+) (\S+)\]) hello (.*)$", done.out, re.M):
        assert prefix
        found[int(rank)] = {"prefix": node, **dict(token.split("=", 1) for token in text.split())}
    return found


def ranks_in_node_order(site: Site, addresses: list[str]) -> None:
    """4 nodes with 2 each: 0 1 | 2 3 | 4 5 | 6 7, and each process got them so."""
    done = site.inv("run", "--workspace", HELLO, "--nproc-per-node", 2, "--all-ranks").ends(0)
    assert "ending the job" not in done.err, "what is over need not be ended"
    output = hello(done)
    assert sorted(output) == list(range(8)), done.out
    for rank, its in output.items():
        assert its["prefix"] == site.name(rank // 2)
        assert (its["rank"], its["world_size"], its["local_rank"]) == (str(rank), "8", str(rank % 2))
        assert (its["node"], its["nodes"], its["job"]) == (str(rank // 2), "4", done.job)
        assert its["endpoint"].rpartition(":")[0] == addresses[rank // 2]
    assert len({its["endpoint"] for its in output.values()}) == 8
    for node in range(4):
        (job,) = site.jobs(node)
        assert (job / "nodefile").read_text() == f"{node}\n"
        logs = {path.name for path in (job / "log").iterdir()}
        assert logs == {f"workerlog.{2 * node}", f"workerlog.{2 * node + 1}", "train.log", "endpoints.log"}
        assert (job / "log/train.log").read_text() == (job / f"log/workerlog.{2 * node}").read_text()
        listed = (job / "log/endpoints.log").read_text().splitlines()
        assert listed == ["PADDLE_TRAINER_ENDPOINTS:", *(output[rank]["endpoint"] for rank in range(8))]
    assert done.last == "clustertool: exit 0 (job): all trainers are done"


def ranks_of_uneven_nodes(site: Site, hosts: list[str]) -> None:
    """Sizes 1, 3, 2: 0 | 1 2 3 | 4 5, as HOSTS says and without an option."""
    site.conf(HOSTS=[{"host": host, "nproc": size} for host, size in zip(hosts, (1, 3, 2))])
    output = hello(site.inv("run", "-w", HELLO, "--all-ranks").ends(0))
    assert {rank: (its["node"], its["local_rank"]) for rank, its in output.items()} == {
        0: ("0", "0"),
        1: ("1", "0"),
        2: ("1", "1"),
        3: ("1", "2"),
        4: ("2", "0"),
        5: ("2", "1"),
    }


def small_word2vec(folder: Path) -> Path:
    """The example with less to do, and its data."""
    target = folder / "word2vec"
    shutil.copytree(WORD2VEC, target, ignore=shutil.ignore_patterns("output", "__pycache__", "train_data_dir"))
    data = WORD2VEC / "train_data_dir"
    if (data / "word_dict.txt").exists():
        shutil.copytree(data, target / "train_data_dir")
    else:
        subprocess.run([sys.executable, "prepare.py"], cwd=target, check=True, capture_output=True)
    toml = target / "job.toml"
    text = toml.read_text()
    assert '"train.py"]' in text
    toml.write_text(text.replace('"train.py"]', '"train.py", "--epochs", "1", "--dim", "16"]'))
    return target


def with_numpy(site: Site) -> Site:
    """The nodes' own python3 may have none."""
    return site.conf(PRELUDE=f"export PATH={Path(sys.executable).parent}:$PATH")


def trains_word2vec(site: Site, nodes: int) -> None:
    """2 pservers and 2 trainers on each node train to the end, the model is on node 0, and nothing is left."""
    done = site.inv("run", "--workspace", small_word2vec(site.folder), "--server-num", 2, "--worker-num", 2).ends(0)
    assert f"{2 * nodes} pservers, {2 * nodes} trainers on {nodes} nodes" in done.err
    assert "all trainers are done, ending the pservers\n" in done.err and "ending the job" not in done.err
    losses = [float(loss) for loss in re.findall(r"loss[= ]+([0-9.]+)", done.out)]
    assert losses, done.out
    assert losses[-1] < losses[0], done.out
    names = [{path.name for path in (site.jobs(node)[0] / "output").iterdir()} for node in range(nodes)]
    assert names[0], "the model is on node 0"
    assert not any(names[1:]), names
    assert "stopped by clustertool" not in done.err, "a pserver that is ended after training is no victim"
    assert site.inv("status").ends(0).out.count("pserver ") == 2 * nodes
    assert not site.living()


# -- the old paddle.py ------------------------------------------------------------------------------------------------

# What its documents have everybody type (run.sh), with a path of ours.
SAMPLE = """
    --dot_period=10 --ports_num_for_sparse=2 --log_period=50 --num_passes=10 --trainer_count=4 --saving_period=1 --local=0
    --config=./trainer_config.py --save_dir=./output --test_period=0 --use_gpu=0
""".split()

# In place of the program of 2016: it writes down what it was given, where that program had its own files.
PADDLE = f"""#!{sys.executable}
import json, os, socket, sys, time
kind, words, given = sys.argv[1], sys.argv[2:], {{}}
while words:
    name, equals, value = words.pop(0)[2:].partition("=")
    given[name] = value if equals else words.pop(0)
print(json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}), flush=True)
with open(os.path.join(os.environ["GLOG_log_dir"], f"paddle_{{kind}}.INFO"), "w") as file:
    file.write("told\\n")
if kind == "pserver":
    with socket.create_server((os.environ["POD_IP"], int(given["port"]))):
        time.sleep(600)
if given["trainer_id"] == "0":
    os.makedirs(given["save_dir"] + "/pass-00000", exist_ok=True)
    open(given["save_dir"] + "/pass-00000/w", "w").close()
"""


def old_paddle(site: Site, **keys: object) -> Path:
    """A workspace as the old tool wanted one. conf.py has the old tool's keys, and what puts `paddle` on the nodes' PATH."""
    for node in range(site.count):
        program = site.home(node) / "programs/paddle"
        program.parent.mkdir()
        program.write_text(PADDLE)
        program.chmod(0o755)
    site.conf(
        PADDLE_PORTS_NUM=2,
        PADDLE_PORTS_NUM_FOR_SPARSE=2,
        PADDLE_USE_GPU="False",
        LD_LIBRARY_PATH="/usr/local/cuda/lib64:/usr/lib64",
        PRELUDE='export PATH="$HOME/programs:$PATH"',
        **keys,
    )
    package = site.folder / "workspace"
    package.mkdir()
    (package / "trainer_config.py").write_text("settings()\n")
    return package


def the_old_tools_sample(site: Site, addresses: list[str]) -> None:
    """Two nodes, and the command line of its documents."""
    done = site.clusterrun(f"--job_dispatch_package={site.folder / 'workspace'}", *SAMPLE).ends(0)
    assert "2 pservers, 2 trainers on 2 nodes" in done.err
    for node in (0, 1):
        (job,) = site.jobs(node)
        server, trainer = (json.loads((job / f"log/{name}.log").read_text()) for name in ("server", "train"))
        pserver, train = (dict(token[2:].split("=", 1) for token in its["argv"][1:]) for its in (server, trainer))
        assert (server["argv"][0], trainer["argv"][0]) == ("pserver", "train")
        nic = server["env"]["NCCL_SOCKET_IFNAME"]
        ports = {"ports_num": "2", "ports_num_for_sparse": "2"}
        assert pserver == {"num_gradient_servers": "2", "nics": nic, "port": server["env"]["PADDLE_PORT"], **ports}
        assert trainer["argv"][6:-1] == SAMPLE, "what was typed, as it was typed"
        assert (train["trainer_id"], train["num_gradient_servers"], train["nics"]) == (str(node), "2", nic)
        assert train["pservers"] == ",".join(addresses)
        assert train["port"] == trainer["env"]["PADDLE_INIT_PORT"]
        assert Path(server["cwd"]).name == Path(trainer["cwd"]).name == job.name
        assert trainer["env"]["PADDLE_INIT_USE_GPU"] == "False"
        assert trainer["env"]["LD_LIBRARY_PATH"].startswith("/usr/local/cuda/lib64:/usr/lib64")
        assert (job / "nodefile").read_text() == f"{node}\n"
        assert (job / "trainer_config.py").exists()
        logs = {path.name for path in (job / "log").iterdir()}
        assert {"server.log", "train.log", "paddle_train.INFO", "paddle_pserver.INFO"} <= logs
    models = [(site.jobs(node)[0] / "output/pass-00000/w").exists() for node in (0, 1)]
    assert models == [True, False], "the model is on node 0"
    assert "told" in site.clustertool("logs", "--file", "paddle_train.INFO", "--host", site.name(1)).ends(0).out
    assert not site.living()
