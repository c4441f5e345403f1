"""What must hold on every kind of cluster alike; the tests of each kind call it with a site of theirs."""

from __future__ import annotations

import os
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
        found[int(rank)] = {"prefix": node, **dict(word.split("=", 1) for word in text.split())}
    return found


def ranks_in_node_order(site: Site, addresses: list[str]) -> None:
    """4 nodes with 2 each: 0 1 | 2 3 | 4 5 | 6 7, and each process was told so."""
    done = site.inv("run", "--workspace", HELLO, "--nproc-per-node", 2, "--all-ranks").ends(0)
    said = hello(done)
    assert sorted(said) == list(range(8)), done.out
    for rank, its in said.items():
        assert its["prefix"] == site.name(rank // 2)
        assert (its["rank"], its["world_size"], its["local_rank"]) == (str(rank), "8", str(rank % 2))
        assert (its["node"], its["nodes"], its["job"]) == (str(rank // 2), "4", done.job)
        assert its["endpoint"].rpartition(":")[0] == addresses[rank // 2]
    assert len({its["endpoint"] for its in said.values()}) == 8
    for node in range(4):
        (job,) = site.jobs(node)
        assert (job / "nodefile").read_text() == f"{node}\n"
        logs = {path.name for path in (job / "log").iterdir()}
        assert logs == {f"workerlog.{2 * node}", f"workerlog.{2 * node + 1}", "train.log", "endpoints.log"}
        assert os.readlink(job / "log/train.log") == f"workerlog.{2 * node}"
        listed = (job / "log/endpoints.log").read_text().splitlines()
        assert listed == ["PADDLE_TRAINER_ENDPOINTS:", *(said[rank]["endpoint"] for rank in range(8))]
    assert done.last == "clustertool: exit 0 (job): all trainers are done"


def ranks_of_uneven_nodes(site: Site, hosts: list[str]) -> None:
    """Sizes 1, 3, 2: 0 | 1 2 3 | 4 5, as HOSTS says and without an option."""
    site.conf(HOSTS=[{"host": host, "nproc": size} for host, size in zip(hosts, (1, 3, 2))])
    said = hello(site.inv("run", "-w", HELLO, "--all-ranks").ends(0))
    assert {rank: (its["node"], its["local_rank"]) for rank, its in said.items()} == {
        0: ("0", "0"), 1: ("1", "0"), 2: ("1", "1"), 3: ("1", "2"), 4: ("2", "0"), 5: ("2", "1"),
    }  # fmt: skip


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
    losses = [float(loss) for loss in re.findall(r"loss[= ]+([0-9.]+)", done.out)]
    assert losses, done.out
    assert losses[-1] < losses[0], done.out
    names = [{path.name for path in (site.jobs(node)[0] / "output").iterdir()} for node in range(nodes)]
    assert names[0], "the model is on node 0"
    assert not any(names[1:]), names
    assert "stopped because of it" not in done.err, "a pserver that is ended after training is no victim"
    assert site.inv("status").ends(0).out.count("pserver ") == 2 * nodes
    assert not site.living()
