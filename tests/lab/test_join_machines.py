"""Machines of their own that join: the same job by ssh and by bundles."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertool import __version__
from clustertool.actions import load_workspace
from clustertool.fleet import identity
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.fleet.joining import join_bundle, join_process
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from tests import cases
from tests.lab.lab import Lab, Node
from tests.node_code import add_compiled
from tests.sent_workspace import with_workspace

ENVIRONMENT = """
    import json, os
    with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/env-" + os.environ["RANK"], "w") as file:
        json.dump(dict(os.environ), file)
    print("rank", os.environ["RANK"], "on", os.uname().nodename, os.getcwd())
"""
# What differs between a job by ssh and the same one by join, with the same id: docs/without-ssh.md has this table.
DIFFERENT = {"CLUSTERTOOL_MARK", "KUBEFLOW_TRAINER_SERVER_URL"}
OF_LOGIN = {"SSH_CLIENT", "SSH_CONNECTION", "MAIL", "SHLVL", "OLDPWD", "_"}  # of sshd and of the shells
LOGIN = {"SHELL": "/bin/bash", "LOGNAME": "root"}  # what a login sets and Lab.exec does not


def by_join(site: Any, folder: Path, job: str, options: Options, toml: Mapping[str, Any]) -> list[Any]:
    """Run a job by bundles on all nodes of a lab, with the conf.py of the site; the processes that have ended.

    Only node 0 has the workspace.
    """
    lab: Lab = site.lab
    values = {name: value for name, value in runpy.run_path(str(site.folder / "conf.py")).items() if name.isupper()}
    cluster = replace(read_cluster(values), hosts=())
    owner = Identity(job, 1.0, "root", identity.token(), *identity.certificate(), asked=job, name=job)
    join = JoinFile(
        version=__version__,
        code=join_process.digest(),
        identity=owner,
        cluster=cluster,
        job=read_job(cluster, toml, options),
        nnodes=lab.n,
        coordinator=MeetingPoint("node0"),
        join_timeout=60.0,
    )
    workspace = read_workspace(folder)
    join = with_workspace(join, workspace)
    done: list[Any] = [None] * lab.n
    for node in range(lab.n):
        bundle = lab.home(node) / f"{job}.pyz"
        join_bundle.write(bundle, join, None if node else workspace)
        bundle.write_bytes(add_compiled(bundle.read_bytes()))

    def one(node: int) -> None:
        env = [f"{name}={value}" for name, value in LOGIN.items()]
        path = str(Path("/root") / f"{job}.pyz")
        argv = ["env", *env, sys.executable, path, "join", "--index", str(node), "--report"]
        done[node] = lab.exec(node, argv)

    threads = [threading.Thread(target=one, args=(node,)) for node in range(lab.n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def test_the_same_job_by_ssh_and_by_join(site):
    """Ranks on the same nodes, the same environment but for DIFFERENT, the same logs."""
    pair = site(2)
    folder = pair.workspace(train_py=ENVIRONMENT)
    pair.inv("run", "-w", "job", "--job-id", "same", "--nproc-per-node", 2, "--env", "A=b").ends(0)
    by_ssh = [collected(pair, node) for node in range(2)]
    for node in range(2):
        shutil.rmtree(pair.root(node))
    done = by_join(pair, folder, "same", Options(nproc_per_node="2", env=("A=b",)), {})
    assert [one.returncode for one in done] == [0, 0], [one.stdout + one.stderr for one in done]
    for node, (logs, environments) in enumerate(by_ssh):
        joined_logs, joined = collected(pair, node)
        assert joined_logs == logs and sorted(joined) == sorted(environments) == [f"env-{2 * node + n}" for n in (0, 1)]
        for rank, env in environments.items():
            other = joined[rank]
            names = {name for name in {*env, *other} if env.get(name) != other.get(name)}
            assert names - OF_LOGIN == DIFFERENT, {name: (env.get(name), other.get(name)) for name in names}
    status = pair.inv("status", "--json").ends(0).json
    assert [node["name"] for node in status["nodes"]] == ["node0", "node1"]
    assert not pair.living()


def collected(site: Any, node: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Logs and environments of the ranks of a node."""
    (job,) = site.jobs(node)
    logs = {path.name: path.read_text() for path in (job / "log").glob("workerlog.*")}
    return logs, {path.name: json.loads(path.read_text()) for path in (job / "output").glob("env-*")}


@pytest.mark.chaos
def test_word2vec_by_ssh_and_by_join(site):
    """Parameter servers, shards, and a workspace that only node 0 has. In sync mode losses and model are equal."""
    three = cases.with_numpy(site(3))
    folder = cases.small_word2vec(three.folder)
    three.inv("run", "-w", folder, "--job-id", "w2v", "--server-num", 1, "--worker-num", 1).ends(0)
    by_ssh = [losses(three, node) for node in range(3)], model(three)
    for node in range(3):
        shutil.rmtree(three.root(node))
    options = Options(server_num="1", worker_num="1")
    done = by_join(three, folder, "w2v", options, load_workspace.workspace_toml(folder))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stdout + one.stderr for one in done]
    names = [sorted(path.name for path in (three.jobs(node)[0] / "output").iterdir()) for node in range(3)]
    assert names == [["model.npz", "word_dict.txt"], [], []]
    assert ([losses(three, node) for node in range(3)], model(three)) == by_ssh
    assert not three.living()


def losses(site: Any, node: int) -> tuple[int, str]:
    """The number of steps of the trainer of a node, and its last loss."""
    (log,) = (site.jobs(node)[0] / "log").glob("workerlog.*")
    found = re.findall(r"^trained steps=(\d+) loss=([0-9.]+)", log.read_text(), re.M)
    return int(found[0][0]), found[0][1]


def model(site: Any) -> dict[str, bytes]:
    """The arrays of the model, which node 0 has written."""
    import numpy as np  # not at the top: each worker would import it when it collects the tests

    with np.load(site.jobs(0)[0] / "output/model.npz") as file:
        return {name: file[name].tobytes() for name in file.files}


def test_a_coordinator_whose_own_name_is_a_loopback_address(site):
    """The classic line of /etc/hosts: the others reach node 0 by its real address, and so do the ranks."""
    pair = site(2, nodes={0: Node(hosts=("127.0.1.1 node0",))})
    folder = pair.workspace(train_py="import os; print(os.environ['MASTER_ADDR'], os.environ['POD_IP'])")
    done = by_join(pair, folder, "loop", Options(), {})
    assert [one.returncode for one in done] == [0, 0], [one.stdout + one.stderr for one in done]
    for node in (0, 1):
        log = pair.jobs(node)[0] / f"log/workerlog.{node}"
        assert log.read_text() == f"{pair.lab.address(0)} {pair.lab.address(node)}\n"
